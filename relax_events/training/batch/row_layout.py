"""Reads a sample's token arrays and assigns each token of a micro-batch a cell in the model's rows.
Pure functions of arrays and lengths, numpy alone.

There are two layouts. Separate: positions that restart at 0 separate a sample from its neighbours.

    row        p p p p a a a | p p p p b b | -          position   0 1 2 3 4 5 6   0 1 2 3 4 5   .

Shared prefixes: one row, in which each common prefix stands once; see `prefix_tree`.

    row        p p p p a a a | b b                      position   0 1 2 3 4 5 6   4 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import NDArray

from relax_events.errors import PoisonSample
from relax_events.events.parts import Array, MediaRef
from relax_events.events.tensors import dense
from relax_events.events.types import SampleReady, SampleRolledOut
from relax_events.training.batch.prefix_tree import PrefixTree


class TokenSequence(Protocol):
    """What packing needs of a sample; SampleRolledOut and SampleReady have it."""

    @property
    def sample_id(self) -> str:
        """The sample's name, for errors."""

    @property
    def prompt_group_id(self) -> str:
        """Its prompt group."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def tokens(self) -> Array:
        """Prompt and completion, int32."""

    @property
    def loss_mask(self) -> Array:
        """1 where the policy generated the token."""

    @property
    def routed_experts(self) -> Array | None:
        """The experts of all tokens but the last; see `events.routed_experts`."""

    @property
    def temperature(self) -> float:
        """Divides the logits."""

    @property
    def path_lengths(self) -> Sequence[int]:
        """Tokens of each path, where the sample has several."""

    @property
    def prompt_media(self) -> Sequence[MediaRef]:
        """The media files of the prompt."""


def read_array(sample: TokenSequence, field: str) -> NDArray[np.generic]:
    """Return an array field; the caller must have fetched stored arrays."""
    array: Array = getattr(sample, field)
    if isinstance(array, np.ndarray):  # the usual case, many times a sample: without an error text
        return array
    return dense(array, what=f"sample {sample.sample_id}: {field}")


@dataclass(frozen=True, slots=True)
class TokenSets:
    """The ids of a micro-batch in packed order, with the teacher's log-probabilities of them, in
    nats.
    """

    ids: Int64[np.ndarray, "loss_tokens ids"]
    teacher_logprobs: Float32[np.ndarray, "loss_tokens ids"]

    @classmethod
    def from_samples(
        cls, samples: Sequence[SampleReady], *, num_ids: int, vocab_size: int
    ) -> TokenSets:
        """Concatenate the sets of samples.

        Args:
            samples: In packed order.
            num_ids: Ids at each loss token; if samples were recorded with more, the most
                probable ones are used.
            vocab_size: Bound of token ids.
        Raises:
            PoisonSample: A sample lacks its set, or the set does not match the sample or the
                vocabulary; the text names it.
        """
        ids = [read_topk_ids(sample, num_ids=num_ids, vocab_size=vocab_size) for sample in samples]
        return cls(
            np.concatenate(ids).astype(np.int64),
            np.concatenate([_teacher_logprobs(sample, num_ids) for sample in samples]),
        )


def read_topk_ids(
    sample: SampleReady | SampleRolledOut, *, num_ids: int, vocab_size: int
) -> NDArray[np.generic]:
    """Return a sample's `topk_ids`, the most probable ones of them.

    Args:
        sample: The decoded event.
        num_ids: Ids at each loss token.
        vocab_size: Bound of token ids.
    Raises:
        PoisonSample: It has none, too few, or one outside the vocabulary; the text names it.
    """
    ids = _rows(sample, "topk_ids", num_ids)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise PoisonSample(
            f"sample {sample.sample_id}: topk_ids must be 0 to {vocab_size - 1}, got {ids.min()} "
            f"to {ids.max()}; do policy and teacher share a vocabulary?"
        )
    return ids


def _teacher_logprobs(sample: SampleReady, num_ids: int) -> NDArray[np.float32]:
    values = _rows(sample, "topk_teacher_logprobs", num_ids).astype(np.float32)
    if not np.isfinite(values).all():
        raise PoisonSample(
            f"sample {sample.sample_id}: topk_teacher_logprobs must be finite, got "
            f"{values[~np.isfinite(values)][0]}"
        )
    return values


def _rows(sample: SampleReady | SampleRolledOut, field: str, num_ids: int) -> NDArray[np.generic]:
    if getattr(sample, field) is None:
        raise PoisonSample(
            f"sample {sample.sample_id} has no {field}, and the algorithm needs them; is the role "
            "that computes them running, and was the run recorded with these distill_tokens?"
        )
    values, num_loss_tokens = (
        read_array(sample, field),
        int(read_array(sample, "loss_mask").astype(bool).sum()),
    )
    if values.ndim != 2 or len(values) != num_loss_tokens or values.shape[1] < num_ids:
        raise PoisonSample(
            f"sample {sample.sample_id}: {field} must be {num_loss_tokens} loss tokens by at least "
            f"{num_ids} ids, got {values.shape}"
        )
    return values[:, :num_ids]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Cells are counted through all rows laid end to end; several tokens have the same one where a
    prefix is shared. Then `tree` is set.
    """

    cells: Int64[np.ndarray, " tokens"]
    num_rows: int
    row_length: int
    tree: PrefixTree | None = None


def layout_separate(
    lengths: NDArray[np.int64], *, share_rows: bool, row_multiple: int
) -> RowLayout:
    """Lay samples into rows as long as the longest of them.

    Args:
        lengths: Tokens of each sample.
        share_rows: Whether several may stand in one row.
        row_multiple: Rows are padded to a multiple of so many tokens.
    """
    row_length = padded_length(int(lengths.max()), multiple=row_multiple)
    cells, num_rows = (
        _first_fit(lengths, row_length=row_length)
        if share_rows
        else (np.arange(len(lengths)) * row_length, len(lengths))
    )
    return RowLayout(token_offsets(lengths) + np.repeat(cells, lengths), num_rows, row_length)


def token_offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each token's offset in its own sample, for concatenated samples."""
    cells_of_tokens: NDArray[np.int64] = np.arange(int(lengths.sum())) - np.repeat(
        np.cumsum(lengths) - lengths, lengths
    )
    return cells_of_tokens


def padded_length(length: int, *, multiple: int) -> int:
    """Round a length up to a multiple."""
    return -(-length // multiple) * multiple


def _first_fit(lengths: NDArray[np.int64], *, row_length: int) -> tuple[NDArray[np.int64], int]:
    """Return the first cell of each sequence, and the number of rows: first fit, longest
    first.
    """
    cells = np.empty(len(lengths), np.int64)
    shortest, num_rows = int(lengths.min()), 0
    open_rows: dict[int, int] = {}
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        row = next(
            (row for row, used in open_rows.items() if used + length <= row_length), num_rows
        )
        used = open_rows.pop(row, 0)
        cells[index] = row * row_length + used
        num_rows = max(num_rows, row + 1)
        if used + length + shortest <= row_length:
            open_rows[row] = used + length
    return cells, num_rows
