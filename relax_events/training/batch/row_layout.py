"""Reads a sample's token arrays and assigns each token of a micro-batch a cell in the model's rows.
Pure functions of arrays and lengths, numpy alone.

There are two layouts. Separate: each sample has its own prompt, and positions that restart at 0
separate it from its neighbours:

    row        p p p p a a a | p p p p b b | -          position   0 1 2 3 4 5 6   0 1 2 3 4 5   .

Shared prompt: the common prompt of a prompt group's samples is stored once, and their completions
follow as branches:

    row        p p p p | a a a | b b | -                position   0 1 2 3   4 5 6   4 5   .
    branch     0 0 0 0   1 1 1   2 2   0

A token attends to the earlier tokens of its unit's prompt and of its own branch, so its hidden
state equals that of the separate layout, within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import NDArray

from relax_events.errors import PoisonSample
from relax_events.events.parts import Array, MediaRef
from relax_events.events.tensors import dense
from relax_events.events.types import SampleReady, SampleRolledOut


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
    return dense(getattr(sample, field), what=f"sample {sample.sample_id}: {field}")


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
        rule = f"topk_ids must be 0 to {vocab_size - 1}"
        raise PoisonSample(
            f"sample {sample.sample_id}: {rule}, got {ids.min()} to {ids.max()}; do policy "
            "and teacher share a vocabulary?"
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
        remedy = (
            "is the role that computes them running, and was the run recorded with these "
            "distill_tokens?"
        )
        raise PoisonSample(
            f"sample {sample.sample_id} has no {field}, and the algorithm needs them; {remedy}"
        )
    values, num_loss_tokens = (
        read_array(sample, field),
        int(read_array(sample, "loss_mask").astype(bool).sum()),
    )
    if values.ndim != 2 or len(values) != num_loss_tokens or values.shape[1] < num_ids:
        rule = f"{field} must be {num_loss_tokens} loss tokens by at least {num_ids} ids"
        raise PoisonSample(f"sample {sample.sample_id}: {rule}, got {values.shape}")
    return values[:, :num_ids]


MAX_MASK_CELLS = 2**26
"""Cells of the attention mask that shared prompts need: 256 MiB of float32."""
PADDING = -1


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """The cost model that decides between the two layouts.

    `cell_cost` is the cost of a pair of tokens in attention, relative to that of a token in all
    matrices.
    """

    cell_cost: float


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Cells are counted through all rows laid end to end. `units` and `branches` are set where
    prompts are shared: a number for each cell.
    """

    cells: Int64[np.ndarray, " tokens"]
    num_rows: int
    row_length: int
    units: Int64[np.ndarray, " cells"] | None = None
    branches: Int64[np.ndarray, " cells"] | None = None

    def cost(self, sharing: PromptSharing) -> float:
        """Return the cost of a forward pass, in tokens."""
        return self.num_rows * self.row_length * (1 + self.row_length * sharing.cell_cost)

    @property
    def num_mask_cells(self) -> int:
        """Cells of an attention mask over all rows."""
        return self.num_rows * self.row_length**2


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


def layout_shared_prompts(
    samples: Sequence[TokenSequence], lengths: NDArray[np.int64], *, same_routing: bool = False
) -> RowLayout | None:
    """Lay out consecutive samples with the same prompt after one copy of it; None where no two have
    the same prompt.

    Args:
        samples: At least one.
        lengths: Tokens of each.
        same_routing: Whether prompts count as the same only with equal routing: a sample that
            continued under other weights may have another routing of its prompt.
    """
    units = np.array(
        [len(list(alike)) for alike in _group_by_prompt(samples, same_routing=same_routing)],
        np.int64,
    )
    if len(units) == len(samples):
        return None
    unit_of = np.repeat(np.arange(len(units)), units)
    first_of_unit: NDArray[np.int64] = np.cumsum(units) - units
    prompts = np.array([sample.num_prompt_tokens for sample in samples], np.int64)
    completions: NDArray[np.int64] = lengths - prompts
    before = np.cumsum(completions) - completions
    in_unit = (
        before - before[first_of_unit][unit_of]
    )  # completion tokens of earlier samples in the unit
    unit_lengths = prompts[first_of_unit] + np.add.reduceat(completions, first_of_unit)
    row_length = int(unit_lengths.max())
    cells, num_rows = _first_fit(unit_lengths, row_length=row_length)
    offsets = token_offsets(lengths)
    is_completion = offsets >= np.repeat(prompts, lengths)
    cells_of_tokens = (
        np.repeat(cells[unit_of], lengths)
        + offsets
        + np.where(is_completion, np.repeat(in_unit, lengths), 0)
    )
    unit_of_cell, branch_of_cell = (
        np.full(num_rows * row_length, PADDING),
        np.zeros(num_rows * row_length, np.int64),
    )
    unit_of_cell[cells_of_tokens] = np.repeat(unit_of, lengths)
    branch_of_cell[cells_of_tokens] = np.where(
        is_completion, np.repeat(np.arange(len(samples)) - first_of_unit[unit_of] + 1, lengths), 0
    )
    return RowLayout(cells_of_tokens, num_rows, row_length, unit_of_cell, branch_of_cell)


def choose_layout(
    apart: RowLayout, branched: RowLayout | None, sharing: PromptSharing
) -> RowLayout:
    """Return the cheaper of two layouts of the same samples."""
    if (
        branched is None
        or branched.num_mask_cells > MAX_MASK_CELLS
        or branched.cost(sharing) >= apart.cost(sharing)
    ):
        return apart
    return branched


def _group_by_prompt(
    samples: Sequence[TokenSequence], *, same_routing: bool
) -> Iterator[Iterator[TokenSequence]]:
    def prompt(sample: TokenSequence) -> tuple[str, bytes, bytes, bytes]:
        end = sample.num_prompt_tokens
        routing = (
            read_array(sample, "routed_experts")[:end].tobytes()
            if same_routing and sample.routed_experts is not None
            else b""
        )
        media = b"".join(one.digest for one in sample.prompt_media)
        return sample.prompt_group_id, read_array(sample, "tokens")[:end].tobytes(), routing, media

    return (alike for _, alike in groupby(samples, key=prompt))


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
