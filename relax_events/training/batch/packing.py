"""Cuts samples into micro-batches and packs them into the arrays that a model takes. Pure functions
of lengths, numpy alone.

A micro-batch is packed into rows as long as its longest sample, and short samples share a row. One
row for everything would make attention quadratic in the micro-batch; one row per sample would pad.
With equal lengths nothing is padded and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from jaxtyping import Bool, Float32, Int64, Integer
from numpy.typing import NDArray

from relax_events.errors import PoisonSample
from relax_events.events.routed_experts import ExpertShape
from relax_events.events.types import SampleReady
from relax_events.media.model_inputs import MediaInputs
from relax_events.training.batch.paths import (
    count_paths,
    longest_path,
    split_paths,
    sums_by_sample,
)
from relax_events.training.batch.prefix_tree import PrefixTree
from relax_events.training.batch.row_layout import (
    RowLayout,
    TokenSequence,
    layout_separate,
    read_array,
    token_offsets,
)
from relax_events.training.batch.shared_prefixes import (
    PrefixSharing,
    cut_paths,
    layout_shared_prefixes,
)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A packed micro-batch; `loss_positions` index the hidden states of all rows, concatenated."""

    input_ids: Int64[np.ndarray, "rows length"]
    position_ids: Int64[np.ndarray, "rows length"]
    loss_positions: Int64[np.ndarray, " loss_tokens"]
    targets: Int64[np.ndarray, " loss_tokens"]
    temperatures: Float32[np.ndarray, " loss_tokens"]
    num_loss_tokens: Int64[np.ndarray, " samples"]
    num_path_tokens: Int64[np.ndarray, " paths"]
    num_path_loss_tokens: Int64[np.ndarray, " paths"]
    num_tokens: int
    cells: Int64[np.ndarray, " tokens"]
    """Cell of each token of the concatenated samples; several tokens have the same cell where a
    prefix is shared."""
    tree: PrefixTree | None = None
    """Where prefixes are shared: the runs of the only row."""
    media: MediaInputs | None = None
    """Where samples have media: the inputs for placeholders, and rotary positions."""
    experts: ReplayedExperts | None = None
    """Where the engine's routing is replayed: the experts of each token."""
    path_sample_ids: tuple[str, ...] = ()
    """The sample of each path."""
    parts: tuple[PackedBatch, ...] = ()
    """Its paths, in order, cut into passes, where one pass of the model may not be so large. Only
    these then have media and experts."""


@dataclass(frozen=True, slots=True)
class ReplayedExperts:
    """The replayed experts of each cell; none for padding and for the last token of a sample, which
    the engine never processed.
    """

    experts: Integer[np.ndarray, "cells layers top_k"]
    is_replayed: Bool[np.ndarray, " cells"]


def in_one_row(batch: PackedBatch) -> PackedBatch:
    """Lay the rows of a micro-batch that shares nothing end to end: attention can then be computed
    sequence by sequence, where rows with several of them need a mask as large as the square of
    their length. No cell changes its number.
    """
    is_token = np.zeros(batch.input_ids.shape, bool)
    is_token.ravel()[batch.cells] = True
    was_token = np.zeros_like(is_token)  # the cell before, in the same row
    was_token[:, 1:] = is_token[:, :-1]
    begins = np.where(is_token, batch.position_ids == 0, was_token)
    begins[:, 0] = True
    ends = np.append(np.flatnonzero(begins)[1:], begins.size)
    return replace(
        batch,
        input_ids=batch.input_ids.reshape(1, -1),
        position_ids=batch.position_ids.reshape(1, -1),
        tree=PrefixTree.of_sequences(ends),
    )


def micro_batch_slices(lengths: Sequence[int], *, max_tokens: int) -> list[slice]:
    """Cut a sequence of samples into micro-batches, in the given order.

    A micro-batch closes when the next sample would exceed the budget; a sample longer than the
    budget is a micro-batch of its own.

    Args:
        lengths: Tokens of each sample.
        max_tokens: Budget of a micro-batch.
    Returns:
        Consecutive slices that cover all samples.
    """
    slices, start, num_tokens = [], 0, 0
    for index, length in enumerate(lengths):
        if _exceeds_budget(num_tokens, length, max_tokens):
            slices.append(slice(start, index))
            start, num_tokens = index, 0
        num_tokens += length
    return [*slices, slice(start, len(lengths))] if len(lengths) else []


def _exceeds_budget(num_tokens: int, length: int, max_tokens: int) -> bool:
    return num_tokens > 0 and num_tokens + length > max_tokens


class MicroBatcher:
    """Cuts a stream of samples into the micro-batches that `pack_order` gives for the whole."""

    def __init__(self, *, max_tokens: int, whole_prompt_groups: bool = False) -> None:
        """Start empty.

        Args:
            max_tokens: Budget of a micro-batch.
            whole_prompt_groups: Never cut between two consecutive samples of a prompt group.
        """
        self._max_tokens, self._whole_prompt_groups = max_tokens, whole_prompt_groups
        self._samples: list[SampleReady] = []
        self._num_tokens = 0

    @property
    def num_pending(self) -> int:
        """How many samples the micro-batch has that is not closed."""
        return len(self._samples)

    def feed(self, samples: Iterable[SampleReady]) -> Iterator[list[SampleReady]]:
        """Add samples; yield the micro-batches that they close. Samples that must stay together
        must be in one call.
        """
        for _, together in groupby(
            samples,
            key=lambda sample: (
                sample.prompt_group_id if self._whole_prompt_groups else sample.sample_id
            ),
        ):
            if (closed := self.add(*together)) is not None:
                yield closed

    def add(self, *samples: SampleReady) -> list[SampleReady] | None:
        """Add a sample, or several that stay together; return the micro-batch that they closed, if
        any (they start the next one).
        """
        length = sum(len(read_array(sample, "tokens")) for sample in samples)
        closed = (
            self.flush() if _exceeds_budget(self._num_tokens, length, self._max_tokens) else None
        )
        self._samples += samples
        self._num_tokens += length
        return closed

    def flush(self) -> list[SampleReady] | None:
        """Return what is pending as a micro-batch, or None, and start empty."""
        samples, self._samples, self._num_tokens = self._samples, [], 0
        return samples or None


def cut_by_cells(
    samples: Sequence[SampleReady], *, max_cells: int, whole_prompt_groups: bool = False
) -> list[list[SampleReady]]:
    """Cut a micro-batch whose samples can't share rows, so that no part has more cells than the
    budget: its rows, one for each path of a sample, times its longest path.

    Samples of similar lengths are combined, to minimise padding. A sample of more cells is not cut
    here: its paths run in several passes.

    Args:
        samples: In any number.
        max_cells: Budget of a part, in tokens.
        whole_prompt_groups: Never cut between two consecutive samples of a prompt group.
    """
    together = groupby(
        samples,
        key=lambda sample: sample.prompt_group_id if whole_prompt_groups else sample.sample_id,
    )
    units = [
        (max(longest_path(sample) for sample in members), int(count_paths(members).sum()), members)
        for members in (list(group) for _, group in together)
    ]
    parts: list[list[SampleReady]] = []
    num_rows = 0
    for longest, number, members in sorted(units, key=lambda unit: unit[0]):
        if parts and (num_rows + number) * longest <= max_cells:
            parts[-1] += members
            num_rows += number
        else:
            parts.append(members)
            num_rows = number
    return parts


def require_whole_prompt_groups(samples: Sequence[SampleReady]) -> None:
    """Reject a micro-batch in which a prompt group's samples are not complete, adjacent and in
    order.

    Raises:
        PoisonSample: The text names the first such prompt group.
    """
    for group_id, together in groupby(samples, key=lambda sample: sample.prompt_group_id):
        members = list(together)
        indices, expected = (
            [sample.key.sample_index for sample in members],
            list(range(members[0].key.samples_per_prompt)),
        )
        if indices != expected:
            raise PoisonSample(
                f"prompt group {group_id} has adjacent samples {indices}; the loss needs "
                f"all of them, {expected}"
            )


def pack(
    samples: Sequence[TokenSequence],
    *,
    vocab_size: int,
    share_rows: bool = True,
    row_multiple: int = 1,
    sharing: PrefixSharing | None = None,
    experts: ExpertShape | None = None,
) -> PackedBatch:
    """Lay samples into rows, positions starting at 0 for each sample, and for each path of a sample
    that has several.

    Packed samples are separated by their positions alone: the model must get no attention mask and
    `use_cache=False`, since with either of them transformers silently lets neighbours attend to
    each other. Shared prefixes need attention along `tree`.

    Args:
        samples: At least one.
        vocab_size: Bound of token ids.
        share_rows: Whether several samples may stand in one row; False for models that
            can't isolate them.
        row_multiple: Rows are padded to a multiple of so many tokens.
        sharing: Compute a prefix once that several token sequences have in common.
        experts: Of a model that replays the engine's routing; None where it routes by itself.
    Returns:
        The arrays of the micro-batch; loss tokens are in the order of the samples.
    Raises:
        PoisonSample: A sample is empty, has ids outside the vocabulary, arrays of unequal length, a
            loss token with nothing before it, a temperature that is not positive, or no valid
            routing where that is replayed; the text names it.
    """
    paths = split_paths(samples)
    lengths = np.array([_validate_length(path) for path in paths])
    tokens = _concatenate_tokens(paths, lengths, vocab_size=vocab_size)
    mask = np.concatenate([read_array(path, "loss_mask") for path in paths]).astype(bool)
    layout = None
    if sharing is not None:
        layout = layout_shared_prefixes(paths, lengths, sharing, experts=experts)
    if layout is None:
        layout = layout_separate(lengths, share_rows=share_rows, row_multiple=row_multiple)
    input_ids, position_ids = _fill_cells(tokens, lengths, layout)
    num_in_paths = np.add.reduceat(mask.astype(np.int64), np.cumsum(lengths) - lengths)
    num_loss_tokens = sums_by_sample(num_in_paths, samples)
    temperatures = np.array([sample.temperature for sample in samples], np.float32)
    return PackedBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        loss_positions=layout.cells[np.flatnonzero(mask) - 1],
        targets=tokens[mask],
        temperatures=np.repeat(temperatures, num_loss_tokens),
        num_loss_tokens=num_loss_tokens,
        num_path_tokens=lengths,
        num_path_loss_tokens=num_in_paths,
        num_tokens=len(tokens),
        cells=layout.cells,
        tree=layout.tree,
        path_sample_ids=tuple(path.sample_id for path in paths),
        experts=None if experts is None else _replayed_experts(paths, lengths, layout, experts),
    )


def pack_in_passes(
    samples: Sequence[TokenSequence],
    *,
    max_cells: int,
    vocab_size: int,
    share_rows: bool = True,
    sharing: PrefixSharing | None = None,
    experts: ExpertShape | None = None,
) -> PackedBatch:
    """Pack a micro-batch as `pack` does. If a pass of the model may not be so large, its paths are
    also packed as `parts`: consecutive paths that fit a pass, or a single path that fits none.

    Args:
        samples: At least one.
        max_cells: Budget of a pass, in tokens; a shared prefix counts once.
        vocab_size: See `pack`, as the others.
        share_rows: See there.
        sharing: See there.
        experts: See there.
    Raises:
        PoisonSample: As `pack`.
    """

    def pack_paths(paths: Sequence[TokenSequence]) -> PackedBatch:
        return pack(
            paths, vocab_size=vocab_size, share_rows=share_rows, sharing=sharing, experts=experts
        )

    whole = pack_paths(samples)
    if whole.num_tokens <= max_cells and share_rows:
        return whole
    paths = split_paths(samples)
    slices = cut_paths(
        paths, max_cells=max_cells, share_rows=share_rows, sharing=sharing, experts=experts
    )
    if len(slices) == 1:
        return whole
    return replace(whole, experts=None, parts=tuple(pack_paths(paths[part]) for part in slices))


def _concatenate_tokens(
    samples: Sequence[TokenSequence], lengths: NDArray[np.int64], *, vocab_size: int
) -> NDArray[np.int64]:
    """Return the tokens of samples concatenated."""
    tokens = np.concatenate([read_array(sample, "tokens") for sample in samples]).astype(np.int64)
    if (outside := (tokens < 0) | (tokens >= vocab_size)).any():
        at = int(np.argmax(outside))
        sample = samples[int(np.searchsorted(np.cumsum(lengths), at, side="right"))]
        raise PoisonSample(
            f"sample {sample.sample_id}: token id {tokens[at]} is outside the vocabulary of "
            f"{vocab_size}; was it made with another tokenizer?"
        )
    return tokens


def _fill_cells(
    tokens: NDArray[np.int64], lengths: NDArray[np.int64], layout: RowLayout
) -> tuple[Int64[np.ndarray, "rows length"], Int64[np.ndarray, "rows length"]]:
    """Return the token ids and the positions of all cells, padding included."""
    shape = layout.num_rows, layout.row_length
    input_ids = np.zeros(layout.num_rows * layout.row_length, np.int64)
    input_ids[layout.cells] = tokens
    # Padding continues the positions from the row's start: after a single sample, causal attention
    # never attends to it.
    position_ids = np.tile(np.arange(layout.row_length), layout.num_rows)
    position_ids[layout.cells] = token_offsets(lengths)
    return input_ids.reshape(shape), position_ids.reshape(shape)


def _replayed_experts(
    samples: Sequence[TokenSequence],
    lengths: NDArray[np.int64],
    layout: RowLayout,
    shape: ExpertShape,
) -> ReplayedExperts:
    num_cells = layout.num_rows * layout.row_length
    chosen, is_given = (
        np.zeros((num_cells, shape.num_layers, shape.top_k), shape.dtype),
        np.zeros(num_cells, bool),
    )
    is_read = np.ones(len(layout.cells), bool)
    is_read[np.cumsum(lengths) - 1] = False
    cells = layout.cells[is_read]
    chosen[cells] = np.concatenate([shape.checked(sample) for sample in samples])
    is_given[cells] = True
    return ReplayedExperts(chosen, is_given)


def _validate_length(sample: TokenSequence) -> int:
    tokens, mask = read_array(sample, "tokens"), read_array(sample, "loss_mask")
    if not len(tokens) or tokens.shape != mask.shape:
        raise PoisonSample(
            f"sample {sample.sample_id}: tokens {tokens.shape} and loss_mask {mask.shape} "
            "must be equally long and not empty"
        )
    if mask[0]:
        raise PoisonSample(
            f"sample {sample.sample_id}: loss_mask must be 0 at the first token, nothing "
            "stands before it to predict it from; give it a prompt"
        )
    if not sample.temperature > 0:
        raise PoisonSample(
            f"sample {sample.sample_id}: temperature must be > 0, got {sample.temperature}"
        )
    return len(tokens)


def gather_staleness(
    samples: Sequence[SampleReady], *, trainer_version: int
) -> NDArray[np.float32]:
    """Return how many versions each loss token of the samples is behind the trainer.

    Args:
        samples: In packed order. The tokens of one without version segments count as of its oldest
            version.
        trainer_version: Of the weights being trained.
    """
    return np.concatenate(
        [trainer_version - _read_versions(sample) for sample in samples], dtype=np.float32
    )


def _read_versions(sample: SampleReady) -> NDArray[np.int64]:
    """Return the policy version of each loss token; of a masked sample there are none."""
    num_tokens = int(np.count_nonzero(read_array(sample, "loss_mask")))
    if not sample.version_segments or not num_tokens:
        return np.full(num_tokens, sample.key.min_policy_version, np.int64)
    versions, lengths = zip(
        *((segment.policy_version, segment.num_tokens) for segment in sample.version_segments),
        strict=True,
    )
    return np.repeat(np.array(versions, np.int64), lengths)


def gather_loss_values(samples: Sequence[SampleReady], field: str) -> NDArray[np.float32]:
    """Concatenate a per-token array of the samples, at their loss tokens alone.

    Args:
        samples: In packed order.
        field: For example `rollout_logprobs`.
    Returns:
        One value for each loss token.
    Raises:
        PoisonSample: The array is absent, of another length than the tokens, or not finite at a
            loss token; the text names sample and field.
    """
    pairs = [_values_and_mask(sample, field) for sample in samples]
    values, mask = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    mask = mask.astype(bool)
    kept: NDArray[np.float32] = values[mask].astype(np.float32)
    if not np.isfinite(kept).all():
        owners = np.repeat(
            np.arange(len(samples)),
            [int(read_array(sample, "loss_mask").astype(bool).sum()) for sample in samples],
        )
        at = int(np.argmin(np.isfinite(kept)))
        raise PoisonSample(
            f"sample {samples[owners[at]].sample_id}: {field} must be finite wherever "
            f"loss_mask is 1, got {kept[at]}"
        )
    return kept


def _values_and_mask(
    sample: SampleReady, field: str
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    if getattr(sample, field) is None:
        raise PoisonSample(
            f"sample {sample.sample_id} has no {field}, and the algorithm needs them; is the "
            "role that computes them running?"
        )
    values, mask = read_array(sample, field), read_array(sample, "loss_mask")
    if values.shape != mask.shape:
        raise PoisonSample(
            f"sample {sample.sample_id}: {field} {values.shape} must be as long as tokens "
            f"{mask.shape}"
        )
    return values, mask
