"""One process of `benchmarks.compute`: measures a run file and prints milliseconds by side as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.ready_samples import ready_sample
from relax_events.config import RunConfig, load_run_config
from relax_events.config.unset_keys import with_values
from relax_events.data.rendering import PromptRenderer
from relax_events.data.sources import open_stream
from relax_events.engines.protocol import GeneratedSample, GenerationRequest, SampleRequest
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.events.types import SampleReady
from relax_events.session.defaults import resolve_defaults
from relax_events.training.backend.factory import open_backend
from relax_events.training.backend.scoring import LogprobScorer
from relax_events.training.ranks import SingleRank

POLL_SECONDS = 60.0
CHANGES = {"algorithm.kl_coefficient": 0.0, "algorithm.old_logprobs": "rollout"}


def requests_of(config: RunConfig, step: int, stop: int) -> list[GenerationRequest]:
    """Return the prompt groups of a step, as the prompter would issue them."""
    renderer = PromptRenderer.from_folder(config.model.path, config.data)
    stream, run = open_stream(config.data, seed=config.run.seed), config.run
    first = step * run.prompts_per_step
    return [
        GenerationRequest(
            prompt_group_id=str(number),
            prompt_tokens=np.asarray(renderer.prompt_tokens(stream[number].messages), np.int32),
            samples=tuple(
                SampleRequest(
                    sample_id=f"{number}/{index}",
                    seed=number * run.samples_per_prompt + index,
                    tokens=np.zeros(0, np.int32),
                    logprobs=np.zeros(0, np.float32),
                    segments=(),
                )
                for index in range(run.samples_per_prompt)
            ),
            sampling=config.engine.sampling,
            stop_token_ids=(stop,),
        )
        for number in range(first, first + run.prompts_per_step)
    ]


def generate(
    engine: TransformersEngine, requests: Sequence[GenerationRequest], *, one_by_one: bool = False
) -> list[GeneratedSample]:
    """Generate all samples of some prompt groups."""
    finished = []
    for request in requests:
        engine.submit(request)
        if one_by_one:
            finished += engine.poll(timeout_seconds=0.0)  # one decoding step
    while engine.num_running:
        finished += engine.poll(timeout_seconds=POLL_SECONDS)
    return finished


def ready_samples(
    requests: Sequence[GenerationRequest], finished: Sequence[GeneratedSample]
) -> list[SampleReady]:
    """Return generated samples with random advantages."""
    by_id, generator = {one.sample_id: one for one in finished}, np.random.default_rng(0)
    samples = []
    for group_index, request in enumerate(requests):
        prompt = request.prompt_tokens
        for sample_index, asked in enumerate(request.samples):
            one = by_id[asked.sample_id]
            tokens = np.concatenate([prompt, one.tokens])
            is_loss = np.arange(len(tokens)) >= len(prompt)
            samples.append(
                ready_sample(
                    tokens,
                    num_prompt_tokens=len(prompt),
                    samples_per_prompt=len(request.samples),
                    group_index=group_index,
                    sample_index=sample_index,
                    rollout_logprobs=np.append(np.zeros_like(prompt, np.float32), one.logprobs),
                    advantages=(is_loss * generator.normal()).astype(np.float32),
                )
            )
    return samples


class Bare:
    """A loop of transformers and torch alone."""

    def __init__(self, config: RunConfig) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._config = config

    def generate(self, requests: Sequence[GenerationRequest]) -> None:
        """Generate by `generate`."""
        longest = max(len(one.prompt_tokens) for one in requests)
        ids = np.zeros((len(requests), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, one in enumerate(requests):
            ids[row, longest - len(one.prompt_tokens) :] = one.prompt_tokens
            mask[row, longest - len(one.prompt_tokens) :] = 1
        sampling, number = self._config.engine.sampling, len(requests[0].samples)
        with torch.no_grad():
            self._model.generate(
                torch.from_numpy(ids).repeat_interleave(number, 0),
                attention_mask=torch.from_numpy(mask).repeat_interleave(number, 0),
                do_sample=True,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=requests[0].stop_token_ids[0],
                pad_token_id=0,
            )

    def logprobs(self, samples: Sequence[SampleReady]) -> tuple[Tensor, ...]:
        """Return log-probabilities, mask, advantages and rollout log-probabilities of the
        completions, padded: prompts on the left, completions on the right.
        """
        prompt = max(one.num_prompt_tokens for one in samples)
        completion = max(len(np.asarray(one.tokens)) - one.num_prompt_tokens for one in samples)
        shape = len(samples), prompt + completion
        ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        values = np.zeros((3, len(samples), completion), np.float32)
        for row, one in enumerate(samples):
            tokens, own = np.asarray(one.tokens), one.num_prompt_tokens
            cells = slice(prompt - own, prompt - own + len(tokens))
            ids[row, cells], mask[row, cells] = tokens, 1
            columns = (one.loss_mask, one.advantages, one.rollout_logprobs)
            values[:, row, : len(tokens) - own] = [np.asarray(column)[own:] for column in columns]
        logits = self._model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            logits_to_keep=completion + 1,
            use_cache=False,
        ).logits[:, :-1]
        targets = torch.from_numpy(ids[:, prompt:, None])
        return logits.log_softmax(-1).gather(-1, targets)[..., 0], *torch.from_numpy(values)

    def train(self, samples: Sequence[SampleReady]) -> None:
        """Take a step with the clipped loss."""
        logprobs, mask, advantages, rollout = self.logprobs(samples)
        ratio = (logprobs - rollout).exp()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        ((losses * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def score(self, samples: Sequence[SampleReady]) -> None:
        """Compute log-probabilities."""
        self.logprobs(samples)

    @torch.inference_mode()
    def matrices(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        """Multiply what prefills and decoding steps multiply.

        Args:
            shapes: Rows, tokens of each row, and what they attend to.
        """
        config = self._model.config
        heads, groups, width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        for rows, length, seen in shapes:
            hidden = torch.ones(rows * length, config.hidden_size)
            past = torch.ones(rows, groups, seen, width)
            for layer in self._model.model.layers:
                attention, mlp = layer.self_attn, layer.mlp
                query = linear(hidden, attention.q_proj.weight)
                linear(hidden, attention.k_proj.weight)
                linear(hidden, attention.v_proj.weight)
                if length == 1:
                    scaled_dot_product_attention(
                        query.view(rows, groups, heads // groups, width), past, past
                    )
                else:
                    scaled_dot_product_attention(
                        query.view(rows, length, heads, width).transpose(1, 2),
                        past,
                        past,
                        is_causal=True,
                        enable_gqa=True,
                    )
                linear(query, attention.o_proj.weight)
                linear(hidden, mlp.up_proj.weight)
                linear(linear(hidden, mlp.gate_proj.weight), mlp.down_proj.weight)
            linear(hidden[:rows], self._model.lm_head.weight)


def shapes_of(
    engine: TransformersEngine, requests: Sequence[GenerationRequest]
) -> list[tuple[int, int, int]]:
    """Generate some prompt groups, and return rows, tokens and what they attend to of each pass."""
    model, shapes = engine._model, []  # noqa: SLF001
    prefill, decode = model.prefill, model.decode

    def prefill_noted(ids: Tensor, *rest: Any) -> Any:
        shapes.append((*ids.shape, ids.shape[1]))
        return prefill(ids, *rest)

    def decode_noted(tokens: Tensor, *rest: Any, num_tokens: int, shifts: Tensor) -> Tensor:
        shapes.append((len(tokens), 1, num_tokens))
        return decode(tokens, *rest, num_tokens=num_tokens, shifts=shifts)

    model.prefill, model.decode = prefill_noted, decode_noted  # type: ignore[method-assign]
    generate(engine, requests)
    del model.prefill, model.decode
    return shapes


def measure(config: RunConfig, num_steps: int) -> dict[str, list[float]]:
    """Return milliseconds a sample of each step by side; the first step is a warm-up."""
    stop = AutoTokenizer.from_pretrained(config.model.path).eos_token_id
    engine = TransformersEngine(config.model.path, config=config.engine, model=config.model)
    backend: Any = open_backend(config, SingleRank())
    scorer = LogprobScorer(
        config.model.path,
        model=config.model,
        threads=1,
        max_tokens=config.trainer.max_tokens_per_micro_batch,
    )
    bare, found = Bare(config), defaultdict(list)
    for step in range(num_steps + 1):
        requests = requests_of(config, step, stop)
        shapes = shapes_of(engine, requests)
        samples = ready_samples(requests, generate(engine, requests))
        packed = backend._pack(samples).batch.input_ids.size  # noqa: SLF001
        length = max(len(np.asarray(one.tokens)) for one in samples)
        fewer = samples[:: max(1, round(len(samples) * length / packed))]

        def train() -> None:
            backend.accumulate(samples)  # noqa: B023
            backend.step()

        sides: dict[str, Callable[[], object]] = {
            "generation: engine, a step at once": lambda: generate(engine, requests),  # noqa: B023
            "generation: engine, prompts one by one": lambda: generate(
                engine,
                requests,  # noqa: B023
                one_by_one=True,
            ),
            "generation: transformers": lambda: bare.generate(requests),  # noqa: B023
            "generation: matrices": lambda: bare.matrices(shapes),  # noqa: B023
            "training: trainer": train,
            "training: transformers, padded": lambda: bare.train(samples),  # noqa: B023
            "training: transformers, as many tokens": lambda: bare.train(fewer),  # noqa: B023
            "scoring: scorer": lambda: scorer.score(samples),  # noqa: B023
            "scoring: transformers, padded": lambda: bare.score(samples),  # noqa: B023
        }
        for name, side in sides.items():
            started = time.process_time()
            side()
            spent = time.process_time() - started
            if name.endswith("as many tokens"):  # rows are whole: charge what the tokens take
                spent *= packed / (len(fewer) * length)
            if step:
                found[name].append(1000 * spent / len(samples))
    return found


def main(run_file: Path, model: Path, num_steps: int) -> None:
    """Measure a run file with the model of a folder."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    given = with_values(load_run_config(run_file), CHANGES | {"model.path": model})
    config, _ = resolve_defaults(given)
    torch.set_num_threads(1)
    print(json.dumps(measure(config, num_steps)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
