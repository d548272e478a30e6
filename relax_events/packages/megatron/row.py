"""Lays a packed micro-batch into one row without padding between its samples, and cuts the row for
the ranks that share it. Pure functions, numpy alone.

    samples of 5, 3 and 4 tokens, row_multiple 4       tokens  a a a a a b b b c c c c
    ends 5, 8, 12                                      parts   0 0 0 1 1 1 1 1 1 0 0 0  (2 ranks)

Where samples share prefixes, the row is that of their `PrefixTree`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, Integer
from numpy.typing import NDArray

from relax_events.api.engines import ProcessedMedia
from relax_events.training.batch.packing import PackedBatch
from relax_events.training.batch.prefix_tree import PrefixTree
from relax_events.training.batch.row_layout import padded_length


@dataclass(frozen=True, slots=True, eq=False)
class RowMedia:
    """The media of a row.

    Attributes:
        rotary: Rotary positions of its tokens: time, row and column.
        positions: Indices among one rank's tokens of those whose embeddings are replaced.
        features: Index of the feature of each of these, in the concatenated features of `pieces`.
        pieces: Every file once.
    """

    rotary: Int64[np.ndarray, "3 row"]
    positions: Int64[np.ndarray, " media_tokens"]
    features: Int64[np.ndarray, " media_tokens"]
    pieces: tuple[ProcessedMedia, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A micro-batch as one row, and what one context-parallel rank has of it.

    Attributes:
        tokens: Of the row; 0 in the padding at its end.
        positions: Of each token in its sample.
        tree: Where each sample ends, and what samples share.
        token_indices: Indices of this rank's tokens, in its order.
        loss_positions: Indices of this rank's tokens that predict a loss token, among its tokens.
        loss_tokens: Which loss tokens of the micro-batch these predict.
        experts: Of each token of the row, where the engine's routing is replayed.
        is_replayed: Which tokens of the row have recorded experts.
        media: Where samples have media.
    """

    tokens: Int64[np.ndarray, " row"]
    positions: Int64[np.ndarray, " row"]
    tree: PrefixTree
    token_indices: Int64[np.ndarray, " own"]
    loss_positions: Int64[np.ndarray, " own_loss_tokens"]
    loss_tokens: Int64[np.ndarray, " own_loss_tokens"]
    experts: Integer[np.ndarray, "row layers top_k"] | None = None
    is_replayed: Bool[np.ndarray, " row"] | None = None
    media: RowMedia | None = None


def lay_out_row(batch: PackedBatch | None, *, multiple: int, parts: int = 1, index: int = 0) -> Row:
    """Return the row of a micro-batch.

    Args:
        batch: None for a row of padding alone, where other ranks have a micro-batch and this one
            has none.
        multiple: The row is padded to a multiple of so many tokens.
        parts: Context-parallel ranks.
        index: Of this one.
    """
    tokens, positions, loss_positions, tree = _without_padding(batch)
    length = padded_length(max(len(tokens), 1), multiple=multiple)
    padding = (0, length - len(tokens))
    token_indices = np.concatenate(
        [np.arange(*part) for part in context_parts(length, num_parts=parts, index=index)]
    )
    own_index = np.full(length, -1)
    own_index[token_indices] = np.arange(len(token_indices))
    predicting = own_index[loss_positions]
    loss_tokens = np.flatnonzero(predicting >= 0)
    experts, is_replayed = _pad_experts(batch, length)
    return Row(
        tokens=np.pad(tokens, padding),
        positions=np.pad(positions, padding),
        tree=tree,
        token_indices=token_indices,
        loss_positions=predicting[loss_tokens],
        loss_tokens=loss_tokens,
        experts=experts,
        is_replayed=is_replayed,
        media=_lay_out_media(batch, own_index),
    )


def _lay_out_media(
    batch: PackedBatch | None, own_index: Int64[np.ndarray, " row"]
) -> RowMedia | None:
    """Return the media of a row, given the index of its tokens among the tokens of one rank."""
    if batch is None or batch.media is None:
        return None
    media, cells = batch.media, _cells_of_row(batch)
    rotary = np.zeros((3, len(own_index)), np.int64)
    rotary[:, : len(cells)] = media.positions.reshape(3, -1)[:, cells]
    positions = own_index[_index_of_cells(batch)[media.cells]]
    is_own = positions >= 0
    return RowMedia(rotary, positions[is_own], media.features[is_own], media.media)


def _pad_experts(
    batch: PackedBatch | None, length: int
) -> tuple[NDArray[np.generic] | None, NDArray[np.bool_] | None]:
    """Return the replayed experts of a row's tokens, none for its padding."""
    if batch is None or batch.experts is None:
        return None, None
    cells = _cells_of_row(batch)
    experts, is_replayed = batch.experts.experts[cells], batch.experts.is_replayed[cells]
    padding = (0, length - len(experts))
    return np.pad(experts, (padding, (0, 0), (0, 0))), np.pad(is_replayed, padding)


def _without_padding(
    batch: PackedBatch | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], PrefixTree]:
    """Return the tokens of the row, their positions, the indices that predict the loss tokens, and
    its tree.
    """
    if batch is None:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing, PrefixTree.of_sequences(nothing)
    cells = _cells_of_row(batch)
    positions = batch.position_ids.ravel()[cells]
    ends = np.append(np.flatnonzero(positions == 0)[1:], len(positions))
    return (
        batch.input_ids.ravel()[cells],
        positions,
        _index_of_cells(batch)[batch.loss_positions],
        batch.tree or PrefixTree.of_sequences(ends),
    )


def _cells_of_row(batch: PackedBatch) -> NDArray[np.int64]:
    """Return the cell of each token of the row: the samples one after the other, or the row of
    their tree.
    """
    return batch.cells if batch.tree is None else np.arange(batch.input_ids.size)


def _index_of_cells(batch: PackedBatch) -> NDArray[np.int64]:
    """Return the index of each cell's token in the row."""
    cells = _cells_of_row(batch)
    index = np.empty(batch.input_ids.size, np.int64)
    index[cells] = np.arange(len(cells))
    return index


def context_parts(num_tokens: int, *, num_parts: int, index: int) -> list[tuple[int, int]]:
    """Return the two parts of a row that a context-parallel rank holds: as many parts from its end
    as from its start, so that all ranks attend to as many tokens. One part where the row is whole.

    Args:
        num_tokens: Of the row, a multiple of twice the ranks.
        num_parts: Context-parallel ranks.
        index: Of this one.
    """
    if num_parts == 1:
        return [(0, num_tokens)]
    size = num_tokens // (2 * num_parts)
    last = 2 * num_parts - 1 - index
    return [(index * size, (index + 1) * size), (last * size, (last + 1) * size)]
