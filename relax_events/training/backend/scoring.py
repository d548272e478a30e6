"""Computes log-probabilities in forward passes for the reference, actor-forward and teacher."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import structlog
import torch
from jaxtyping import Float32
from numpy.typing import NDArray

from relax_events.config import ModelConfig
from relax_events.errors import OutOfMemory
from relax_events.events.routed_experts import ExpertShape
from relax_events.events.types import SampleRolledOut
from relax_events.media.library import MediaLibrary
from relax_events.models.adapters import published_parameters
from relax_events.models.causal_lm import open_device
from relax_events.models.layers import use_padded_experts
from relax_events.models.offload import Offload
from relax_events.runtime.failpoints import failpoint
from relax_events.training.backend.determinism import make_deterministic
from relax_events.training.backend.out_of_memory import PassMemory
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.protocol import IdsOf, SampleScores
from relax_events.training.batch.packing import PackedBatch, micro_batch_slices, pack
from relax_events.training.batch.paths import count_paths, split_paths
from relax_events.training.batch.row_layout import (
    TokenSequence,
    padded_length,
    read_array,
    read_topk_ids,
)
from relax_events.training.batch.sample_intake import SampleMedia

if TYPE_CHECKING:
    from relax_events.weights.manifest import Weights

log = structlog.get_logger()
T = TypeVar("T")
ROW_TOKENS = 8
"""Rows are padded to a multiple of so many tokens: CPU kernels round fewer of them differently."""
NO_IDS = np.zeros((0, 0), np.int64)
"""Each sample's ids if none are requested."""


class LogprobScorer:
    """Scores samples with the model code that the trainer uses.

    A sample is scored in its own row, padded by its own length, so other samples of the forward
    pass change its scores by rounding only. With `max_tokens = 1` it is scored alone, and repeated
    scoring gives the same bits.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        model: ModelConfig,
        threads: int,
        max_tokens: int,
        library: MediaLibrary | None = None,
    ) -> None:
        """Load a model at version 0.

        Args:
            model_path: A folder in Hugging Face layout; the reference's may differ from
                `model.path`.
            model: Dtype, device and attention, and whether the engine's routing is replayed.
            threads: CPU threads; 0 takes all processors that the process may use.
            max_tokens: Budget of one packed forward.
            library: The media of samples; None for text-only samples.
        Raises:
            ConfigError: The model can't be loaded.
        """
        device = open_device(model.device)
        make_deterministic(device, threads=threads)
        self.policy_version = 0
        self._model = PolicyModel(model_path, config=model, device=device, separate_media=True)
        if device.type == "cpu":
            use_padded_experts(self._model.module)
        self._media = None if library is None else SampleMedia(self._model.family, library)
        self._max_tokens, self._memory = max_tokens, PassMemory()
        self._offload: Offload | None = None

    def score(self, samples: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Return the tempered log-probability of every loss token, in nats, and 0 elsewhere.

        Args:
            samples: In any number; they are packed into forward passes within the budget.
        Returns:
            One array for each sample, as long as its tokens.
        Raises:
            PoisonSample: A sample can't be scored; the text names it.
            OutOfMemory: A path does not fit the device alone; the error names its sample.
        """
        return [
            scores.logprobs for scores in self._score(samples, [NO_IDS] * len(samples), num_top=0)
        ]

    def score_topk(
        self, samples: Sequence[SampleRolledOut], *, num_ids: int, ids_of: IdsOf
    ) -> list[SampleScores]:
        """Return the same and the log-probabilities of several token ids at each loss token; see
        `Scorer`.
        """
        if ids_of == "model":
            return self._score(samples, [NO_IDS] * len(samples), num_top=num_ids)
        sample_ids = [
            read_topk_ids(sample, num_ids=num_ids, vocab_size=self._model.vocab_size).astype(
                np.int64
            )
            for sample in samples
        ]
        if ids_of == "both":
            return self._score(samples, sample_ids, num_top=num_ids)
        return [replace(scores, ids=None) for scores in self._score(samples, sample_ids, num_top=0)]

    def _score(
        self, samples: Sequence[TokenSequence], ids: Sequence[NDArray[np.int64]], *, num_top: int
    ) -> list[SampleScores]:
        scores: dict[int, SampleScores] = {}
        paths = split_paths(samples)
        ids = [
            part
            for path_ids, sample in zip(ids, samples, strict=True)
            for part in _by_path(path_ids, sample)
        ]

        def score_rows(indices: Sequence[int]) -> list[SampleScores]:
            return self._score_rows(
                [paths[index] for index in indices],
                [ids[index] for index in indices],
                num_top=num_top,
            )

        groups = list(group_by_padded_length(paths, max_tokens=self._max_tokens))
        for indices, rows in score_in_halves(groups, score_rows):
            scores |= zip(indices, rows, strict=True)
        ordered = iter([scores[index] for index in range(len(paths))])
        return [
            join_paths(list(islice(ordered, number))) for number in count_paths(samples).tolist()
        ]

    def _score_rows(
        self, samples: Sequence[TokenSequence], ids: Sequence[NDArray[np.int64]], *, num_top: int
    ) -> list[SampleScores]:
        batch = pack_in_own_rows(
            samples, vocab_size=self._model.vocab_size, experts=self._model.experts
        )
        if self._media is not None:
            batch = self._media.add_to(batch, samples)
        token_ids = None if ids[0] is NO_IDS else np.concatenate(ids)

        def compute() -> list[NDArray[np.generic]]:
            with torch.inference_mode():
                output = self._model.token_logprobs(batch, ids=token_ids, num_top=num_top)
                tensors = output.logprobs.float(), output.ids.int(), output.id_logprobs.float()
                return [tensor.cpu().numpy() for tensor in tensors]

        values, *top = self._memory.run(batch, compute)
        best, best_logprobs = (
            np.split(array, np.cumsum(batch.num_loss_tokens)[:-1]) for array in top
        )
        logprobs = unpack_values(values, samples)
        return [SampleScores(*parts) for parts in zip(logprobs, best, best_logprobs, strict=True)]

    def offload_to(self, folder: Path) -> None:
        """Let `move_away` write the weights of the CPU into this folder."""
        self._offload = Offload(folder)

    def move_away(self) -> int:
        """Free the device's memory of the weights; return how many bytes that are. They are used
        again after `bring_back` only.
        """
        assert self._offload is not None, "offload_to comes first"
        return self._offload.move_away(self._model.module.parameters())

    def bring_back(self) -> None:
        """Restore the weights."""
        assert self._offload is not None, "offload_to comes first"
        self._offload.bring_back()

    def copy_weights(self) -> Weights:
        """Return the loaded weights in memory of the host."""
        from relax_events.weights.manifest import Weights

        tensors = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in published_parameters(self._model.module).items()
        }
        return Weights(self.policy_version, tensors, b"")

    def load_weights(self, weights: Weights) -> None:
        """Load another policy version; on an error the old one stays.

        Raises:
            WeightsError: The weights don't fit the model.
        """
        self._model.replace_weights(weights.tensors, base_digest=weights.base_digest)
        self.policy_version = weights.policy_version


def _by_path(ids: NDArray[np.int64], sample: TokenSequence) -> list[NDArray[np.int64]]:
    """Return the token ids of a sample's loss tokens by path."""
    if ids is NO_IDS:
        return [NO_IDS] * len(split_paths([sample]))
    masks = [read_array(path, "loss_mask").astype(bool) for path in split_paths([sample])]
    return np.split(ids, np.cumsum([mask.sum() for mask in masks])[:-1])


def join_paths(paths: list[SampleScores]) -> SampleScores:
    """Return the scores of a sample from the scores of its paths."""
    if len(paths) == 1:
        return paths[0]
    return SampleScores(
        np.concatenate([path.logprobs for path in paths]),
        np.concatenate([path.ids for path in paths if path.ids is not None]),
        np.concatenate([path.id_logprobs for path in paths if path.id_logprobs is not None]),
    )


def group_by_padded_length(
    samples: Sequence[TokenSequence], *, max_tokens: int
) -> Iterator[list[int]]:
    """Yield the indices of samples of one padded length, as many as fit the budget of one forward
    pass.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        by_length[padded_length(len(read_array(sample, "tokens")), multiple=ROW_TOKENS)].append(
            index
        )
    for length, indices in by_length.items():
        yield from (
            indices[part]
            for part in micro_batch_slices([length] * len(indices), max_tokens=max_tokens)
        )


def score_in_halves(
    groups: Sequence[Sequence[int]], score: Callable[[Sequence[int]], T]
) -> Iterator[tuple[Sequence[int], T]]:
    """Score micro-batches, and yield each with its scores. One of several paths that does not fit
    the device is scored in two halves.

    Args:
        groups: The indices of the paths of each micro-batch.
        score: Scores such paths in one pass.
    Raises:
        OutOfMemory: A path does not fit alone.
    """
    left = list(groups)[::-1]
    while left:
        group = left.pop()
        try:
            scores = score(group)
        except OutOfMemory as error:
            if len(group) == 1:
                raise
            problem = str(error)  # the error's frames hold tensors
        else:
            yield group, scores
            continue
        failpoint("scorer.out_of_memory")
        log.warning("scoring.out_of_memory", num_paths=len(group), error=problem)
        middle = len(group) // 2
        left += [group[middle:], group[:middle]]


def pack_in_own_rows(
    samples: Sequence[TokenSequence], *, vocab_size: int, experts: ExpertShape | None = None
) -> PackedBatch:
    """Pack samples of one padded length, one per row."""
    return pack(
        samples, vocab_size=vocab_size, share_rows=False, row_multiple=ROW_TOKENS, experts=experts
    )


def unpack_values(
    values: Float32[np.ndarray, " loss_tokens"], samples: Sequence[TokenSequence]
) -> list[NDArray[np.float32]]:
    """Return the values of the loss tokens of samples, which are in their order, by sample: as long
    as its tokens, with 0 elsewhere.
    """
    masks = [read_array(sample, "loss_mask").astype(bool) for sample in samples]
    scores = [np.zeros(len(mask), np.float32) for mask in masks]
    ends = np.cumsum([mask.sum() for mask in masks], dtype=np.int64)
    for score, mask, piece in zip(scores, masks, np.split(values, ends)[:-1], strict=True):
        score[mask] = piece
    return scores
