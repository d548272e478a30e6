"""The engine `transformers`: continuous batching over a Hugging Face model in this process, on CPU
or GPU.

Samples wait in a queue and enter a table of running rows as rows become free:

    submit --> waiting --> prefill (once for all samples of a prompt) --> rows --> decode, one token
    in every row --> finished --> poll
                  ^                                                        |
                  +------------ restart, sleep: with the tokens so far ----+

A sample's tokens follow from its seed and the model's probabilities, whatever runs alongside and
whenever it starts: each token is sampled with the sample's own seed, and its prompt is padded by
its own length alone. Its log-probabilities equal the model's within rounding. A continued
sample keeps its recorded tokens and log-probabilities; only its next tokens are computed.

The same requests in the same order at the same steps give the same bits on the same machine.
Another order of arrival may not: other rows in the batch can change a sample's rounding, and a
random number at the border of two tokens may then select the other one. `invariance` chooses batch
sizes so that this is rare; with `max_running_samples = 1` a sample is computed alone, and its bits
depend on nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from relax_events.config import EngineConfig, ModelConfig
from relax_events.engines.protocol import EngineUsage, GeneratedSample, GenerationRequest
from relax_events.engines.requests import SampleState, build_samples
from relax_events.engines.transformers.causal_model import CausalModel
from relax_events.engines.transformers.invariance import measure_invariance
from relax_events.engines.transformers.kv_cache import RowCache
from relax_events.engines.transformers.prefill_inputs import (
    PrefillInputs,
    PrefixGroup,
    group_prefills,
    round_up,
)
from relax_events.engines.transformers.rows import RowTable
from relax_events.engines.transformers.sampling import sample_tokens, top_tokens, uniforms
from relax_events.errors import WeightsError
from relax_events.events.parts import FinishReason
from relax_events.planning.inventory import num_threads
from relax_events.weights import Weights

TOKEN_BLOCK = 16
"""Attention lengths, and prompts of models that allow padding, are padded to multiples of this."""
MAX_WAITED_STEPS = 4
"""Decoding steps that samples wait for others to be prefilled together; about the cost of a small
prefill.
"""


class TransformersEngine:
    """Implements `engines.protocol.Engine` in this process; see the module's docstring."""

    def __init__(
        self, model_path: Path, *, config: EngineConfig, model: ModelConfig, policy_version: int = 0
    ) -> None:
        """Load the model at its own version.

        Args:
            model_path: A folder in Hugging Face layout.
            config: Bounds on rows and context; `threads` applies to the whole process.
            model: Dtype, device and attention.
            policy_version: Version of the weights in the folder.
        Raises:
            ConfigError: The model can't be loaded or served.
        """
        torch.set_num_threads(num_threads(config.threads))
        self.policy_version = policy_version
        self._config = config
        self._model = CausalModel(model_path, config=model)
        self._row_block = self._model.row_block
        max_rows, max_tokens = (
            round_up(config.max_running_samples, self._row_block),
            round_up(config.max_context_tokens, TOKEN_BLOCK),
        )
        self._cache = RowCache(max_rows=max_rows, max_tokens=max_tokens)
        self._table = RowTable(
            max_rows=max_rows, max_tokens=config.max_context_tokens, experts=self._model.experts
        )
        with self._model.with_effective_adapters():
            self._rule = measure_invariance(self._model, max_rows=max_rows, max_tokens=max_tokens)
        self._prompt_block = TOKEN_BLOCK if self._model.pads_prompts else 1
        self._waiting: deque[SampleState] = deque()
        self._prefills: deque[list[PrefixGroup]] = deque()
        """Of admitted samples without a row. No row decodes until they are done, so results do not
        depend on when a poll returns."""
        self._running_ids: set[str] = set()
        """Of all samples that wait or have a row."""
        self._finished: list[GeneratedSample] = []
        self._num_submitted = self._num_waited_steps = 0
        self.num_tokens = 0
        """Tokens sampled so far."""
        self._num_prefilled = self._num_cached = self._num_recomputed = 0
        self._asleep = False
        self._is_interrupted = False

    @property
    def num_running(self) -> int:
        """Samples submitted and not finished."""
        return self._num_waiting + self._table.num_rows

    @property
    def _num_waiting(self) -> int:
        admitted = sum(len(samples) for groups in self._prefills for samples in groups)
        return len(self._waiting) + admitted

    @property
    def usage(self) -> EngineUsage:
        """Samples in the engine, and tokens processed so far."""
        return EngineUsage(
            num_decoding=self._table.num_rows,
            num_waiting=self._num_waiting,
            num_generated=self.num_tokens,
            num_prefilled=self._num_prefilled,
            num_cached=self._num_cached,
            num_recomputed=self._num_recomputed,
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._model.vocab_size

    @property
    def cache_bytes(self) -> int:
        """Current size of the key-value cache in bytes."""
        return self._cache.num_bytes

    def submit(self, request: GenerationRequest) -> None:
        """Queue a prompt group's samples.

        Raises:
            PoisonSample: The request can't be generated; the text says why, and nothing is queued.
        """
        samples = build_samples(
            request,
            first_order=self._num_submitted,
            running_ids=self._running_ids,
            model=self._model,
            max_context_tokens=self._config.max_context_tokens,
        )
        self._num_submitted += len(samples)
        for sample in samples:
            if (reason := sample.finish_reason) is not None:
                self._finished.append(sample.to_generated(reason))
            else:
                self._waiting.append(sample)
                self._running_ids.add(sample.sample_id)

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Decode until a sample finishes or the timeout, which the last step may overrun; return at
        once when nothing runs or the engine sleeps.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._finished and self.num_running and not self._asleep:
            self._step()
            if time.monotonic() >= deadline or self._is_interrupted:
                break
        self._is_interrupted = False
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self) -> None:
        """Make a decoding poll return after its current step."""
        self._is_interrupted = True

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Remove the named samples, or all of them without `sample_ids`, and return them with their
        tokens so far.
        """
        removed_ids = None if sample_ids is None else set(sample_ids)
        rows = [
            row
            for row, sample in enumerate(self._table.samples)
            if removed_ids is None or sample.sample_id in removed_ids
        ]
        removed = self._remove_rows(rows)
        self._requeue_admitted()
        kept = deque[SampleState]()
        for sample in self._waiting:
            is_removed = removed_ids is None or sample.sample_id in removed_ids
            (removed if is_removed else kept).append(sample)
        self._waiting = kept
        self._running_ids.difference_update(sample.sample_id for sample in removed)
        return [sample.to_generated(FinishReason.ABORT) for sample in removed]

    def read_weights(self, folder: Path) -> dict[str, Tensor]:
        """Read a folder's weights without loading them into the model; from any thread.

        Raises:
            ConfigError: The folder is missing or holds no model of this kind.
        """
        return self._model.read_weights(folder)

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        """Switch to another policy version; on an error the old one keeps serving.

        Raises:
            WeightsError: The weights don't fit the model; the text names the tensor.
        """
        was_asleep = self._asleep
        self.wake()
        try:
            self._model.replace_weights(weights.tensors, base_digest=weights.base_digest)
        except WeightsError:
            if was_asleep:
                self.sleep()
            raise
        self.policy_version = weights.policy_version
        if on_running == "swap":
            self._table.mark_version(weights.policy_version)
        else:
            self._requeue_running()

    def offload_to(self, folder: Path) -> None:
        """Also free the weights of the CPU in every sleep from now on: they go to a file there."""
        self._model.offload_to(folder)

    def sleep(self) -> None:
        """Release the device memory; running samples wait, and their cache is recomputed after
        `wake`.
        """
        self._requeue_running()
        self._cache.release()
        self._model.offload()
        self._asleep = True

    def wake(self) -> None:
        """Move the model back to the device; does nothing when awake."""
        if self._asleep:
            self._model.reload()
            self._asleep = False

    def close(self) -> None:
        """Drop the running samples and free the device memory."""
        self._requeue_running()
        self._prefills.clear()
        self._waiting.clear()
        self._running_ids.clear()
        self._cache.release()
        self._model.free_device()

    @torch.inference_mode()
    def _step(self) -> None:
        """Compute one prefill of the waiting samples, and after the last one decode a token in
        every row.
        """
        if not self._prefills:
            self._admit()
        if self._prefills:
            self._prefill(self._prefills.popleft())
        if self._table.num_rows and not self._prefills:
            self._decode()

    def _admit(self) -> None:
        """Take waiting samples for their prefills, if this step is one to prefill at."""
        if self._waiting and not self._table.num_rows:
            # Otherwise one long sample would determine the cache's length for the rest of the run.
            self._cache.release_large()
        if self._should_prefill():
            self._num_waited_steps = 0
            self._prefills.extend(self._take_prefills())

    def _should_prefill(self) -> bool:
        """Return whether to prefill waiting samples now: a prefill of few costs almost as much as
        one of many, so a few samples wait some steps for more.
        """
        self._num_waited_steps += bool(self._waiting)
        return (
            len(self._waiting) >= self._table.num_rows or self._num_waited_steps > MAX_WAITED_STEPS
        )

    def _take_prefills(self) -> Iterator[list[PrefixGroup]]:
        """Take waiting samples while there is room, oldest first, and yield them by prefill."""
        room = self._config.max_running_samples - self._table.num_rows
        samples = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        # Unpadded prompts prefilled together would round differently than each alone.
        together = self._rule.prefills_together and self._prompt_block > 1
        return group_prefills(samples, prompt_block=self._prompt_block, together=together)

    def _prefill(self, groups: list[PrefixGroup]) -> None:
        """Compute the cache of sequences of equal padded length, and sample the next token of every
        sample.
        """
        inputs = PrefillInputs.from_groups(groups, prompt_block=self._prompt_block)
        lengths = inputs.lengths
        logits, prompts = self._model.prefill(
            self._tensor(inputs.token_ids), self._tensor(lengths - 1), inputs.media
        )
        experts = self._model.routed_experts(num_rows=len(lengths))
        first = self._table.num_rows
        for row, samples in enumerate(groups):
            self._count_prefill(samples)
            for sample in samples:
                if experts is not None:  # keep what earlier attempts recorded
                    sample.experts = np.concatenate(
                        [sample.experts, experts[row, len(sample.experts) : lengths[row] - 1]]
                    )
                self._table.add(sample, policy_version=self.policy_version)
        rows = slice(first, self._table.num_rows)
        sources = np.repeat(np.arange(len(groups)), [len(samples) for samples in groups])
        self._cache.fill(
            range(rows.start, rows.stop),
            prompts,
            sources=sources.tolist(),
            num_tokens=int(lengths.max()),
        )
        self._record(
            rows,
            logits[self._tensor(sources)],
            None if experts is None else experts[sources, lengths[sources] - 1],
        )

    def _count_prefill(self, groups: PrefixGroup) -> None:
        num_tokens = len(groups[0].sequence)
        self._num_prefilled += num_tokens
        self._num_cached += num_tokens * (len(groups) - 1)
        self._num_recomputed += sum(len(sample.tokens) for sample in groups)

    def _decode(self) -> None:
        num_rows, table = self._table.num_rows, self._table
        padded = max(self._rule.min_rows, round_up(num_rows, self._row_block))
        table.next_tokens[num_rows:padded] = table.positions[
            num_rows:padded
        ] = table.position_shifts[num_rows:padded] = 0
        num_tokens = round_up(int(table.positions[:num_rows].max()) + 1, TOKEN_BLOCK)
        tokens, positions, shifts = (
            self._tensor(values[:padded])
            for values in (table.next_tokens, table.positions, table.position_shifts)
        )
        logits = self._model.decode(
            tokens, positions, self._cache, num_tokens=num_tokens, shifts=shifts
        )
        experts = self._model.routed_experts(num_rows=padded)
        self._record(
            slice(0, num_rows),
            logits[:num_rows],
            None if experts is None else experts[:num_rows, 0],
        )

    def _record(self, rows: slice, logits: Tensor, experts: np.ndarray | None) -> None:
        """Sample a token for each of the rows; finished samples become results.

        Args:
            rows: The computed rows.
            logits: Logits after the last token of each row.
            experts: Experts of that token.
        """
        seeds, counts, sampling = self._table.sampling_inputs(rows)
        tokens, logprobs = sample_tokens(logits, uniforms(seeds, counts), sampling=sampling)
        self.num_tokens += len(tokens)
        num_top = self._table.num_top_tokens
        top = top_tokens(logits, num_tokens=num_top) if num_top else None
        ended = self._table.record(rows, tokens, logprobs, top_tokens=top, experts=experts)
        if not len(ended):
            return
        if broken := [row for row in ended.tolist() if not np.isfinite(logprobs[row - rows.start])]:
            self._cache.clear(broken)
        for sample in self._remove_rows(ended.tolist()):
            self._running_ids.discard(sample.sample_id)
            if np.isfinite(sample.logprobs[-1]):
                self._finished.append(
                    sample.to_generated(sample.finish_reason or FinishReason.LENGTH)
                )
            else:
                error = (
                    f"policy version {self.policy_version} returned a non-finite log-probability "
                    f"at token {len(sample.tokens)}; are its weights finite?"
                )
                self._finished.append(sample.to_generated(FinishReason.ERROR, error=error))

    def _remove_rows(self, rows: Sequence[int]) -> list[SampleState]:
        samples, sources, targets = self._table.remove(rows)
        if sources:
            self._cache.move(sources, targets, num_tokens=int(self._table.positions[targets].max()))
        return samples

    def _requeue_running(self) -> None:
        """Put running samples back in front of the waiting ones, in order of submission."""
        running = self._remove_rows(range(self._table.num_rows))
        self._waiting.extendleft(sorted(running, key=lambda sample: sample.order, reverse=True))

    def _requeue_admitted(self) -> None:
        """Put samples whose prefill is still to come back in front of the waiting ones."""
        admitted = [sample for groups in self._prefills for samples in groups for sample in samples]
        self._prefills.clear()
        self._waiting.extendleft(sorted(admitted, key=lambda sample: sample.order, reverse=True))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)
