"""Flat slices of parameters as rectangles of Hugging Face tensors, and micro-batches as one row."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_events.config.topology import Topology
from relax_events.media.model_inputs import MediaInputs
from relax_events.packages.megatron.layout import cut, full_shapes, rank_shards
from relax_events.packages.megatron.row import lay_out_row
from relax_events.packages.megatron.sizes import DecoderSizes
from relax_events.packages.megatron.slices import flat_pieces
from relax_events.training.batch.packing import PackedBatch

pytestmark = pytest.mark.unit
SIZES = DecoderSizes(
    prefix="model.",
    num_layers=2,
    hidden_size=6,
    num_heads=4,
    num_groups=2,
    head_dim=2,
    mlp_size=0,
    vocab_size=11,
    is_tied=False,
    num_experts=4,
    top_k=2,
    expert_size=6,
    reads_media=True,
    towers=(
        ("visual.patches", (4, 3, 2, 2, 2)),
        ("visual.positions", (5, 3)),
        ("visual.bias", (7,)),
    ),
)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "topology",
    [Topology.of(1), Topology.of(4, tensor=2, expert=2, expert_tensor=2), Topology.of(2, tensor=2)],
)
def test_slices_give_every_element_of_a_tensor(topology: Topology, num_slices: int) -> None:
    whole = {
        name: torch.arange(prod(shape), dtype=torch.float64).view(shape)
        for name, shape in full_shapes(SIZES).items()
    }
    found = {name: torch.full_like(values, -1) for name, values in whole.items()}
    for rank in range(topology.num_ranks):
        shards = list(rank_shards(SIZES, topology, topology.at(rank)))
        flat = torch.cat([_shard_values(shard, whole) for shard in shards])
        size = -(-len(flat) // num_slices)
        for start in range(0, len(flat), size):
            first = 0
            for shard in shards:
                end = min(start + size, len(flat))
                for piece in flat_pieces(shard, first=first, start=start, end=end):
                    values = piece.of(flat[start:end])
                    box = tuple(
                        (at, at + length)
                        for at, length in zip(piece.offset, values.shape, strict=True)
                    )
                    cut(found[piece.name], box).copy_(values)
                first += prod(shard.shape)
    for name, values in whole.items():
        assert torch.equal(found[name], values), name


def _shard_values(shard: object, whole: dict[str, Tensor]) -> Tensor:
    values = torch.full(shard.shape, -2.0, dtype=torch.float64)  # type: ignore[attr-defined]
    for piece in shard.pieces:  # type: ignore[attr-defined]
        source = cut(whole[piece.name], piece.source)
        cut(values, piece.target).copy_(source.view(cut(values, piece.target).shape))
    return values.flatten()


def batch_of(lengths: list[int]) -> PackedBatch:
    """Two samples in the first row, the third in the second; the last token of each is trained."""
    cells = np.concatenate([np.arange(8), 8 + np.arange(lengths[2])])
    input_ids, position_ids = np.zeros(16, np.int64), np.tile(np.arange(8), 2)
    input_ids[cells] = np.arange(1, len(cells) + 1)
    position_ids[cells] = np.concatenate([np.arange(length) for length in lengths])
    ends = np.cumsum(lengths)
    return PackedBatch(
        input_ids=input_ids.reshape(2, 8),
        position_ids=position_ids.reshape(2, 8),
        loss_positions=cells[ends - 2],
        targets=ends,
        temperatures=np.ones(3, np.float32),
        num_loss_tokens=np.ones(3, np.int64),
        num_path_tokens=np.array(lengths),
        num_path_loss_tokens=np.ones(3, np.int64),
        num_tokens=len(cells),
        cells=cells,
    )


def test_a_row_has_the_samples_without_padding_between_them() -> None:
    row = lay_out_row(batch_of([5, 3, 4]), multiple=8)
    assert row.tokens.tolist() == [*range(1, 13), 0, 0, 0, 0]
    assert row.positions[:12].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert row.tree.ends.tolist() == [5, 8, 12]
    assert row.loss_positions.tolist() == [3, 6, 10]


def test_each_rank_of_a_row_has_the_media_of_its_tokens() -> None:
    batch = batch_of([5, 3, 4])
    media = MediaInputs(
        positions=np.stack([batch.position_ids, 2 * batch.position_ids, 3 * batch.position_ids]),
        cells=np.array([1, 2, 9]),  # of the first sample, and of the third
        features=np.array([4, 5, 0]),
        media=(),
    )
    rows = [
        lay_out_row(replace(batch, media=media), multiple=4, parts=2, index=at) for at in range(2)
    ]
    found = [
        (row.media.positions.tolist(), row.media.features.tolist()) for row in rows if row.media
    ]
    assert found == [([1, 2, 3], [4, 5, 0]), ([], [])]
    assert rows[0].token_indices[[1, 2, 3]].tolist() == [1, 2, 9]
    assert rows[0].media is not None
    assert rows[0].media.rotary[2].tolist() == (3 * rows[0].positions).tolist()


def test_context_parallel_ranks_share_the_loss_tokens() -> None:
    rows = [lay_out_row(batch_of([5, 3, 4]), multiple=4, parts=2, index=at) for at in range(2)]
    assert rows[0].token_indices.tolist() == [0, 1, 2, 9, 10, 11]
    assert rows[1].token_indices.tolist() == [3, 4, 5, 6, 7, 8]
    assert rows[0].loss_tokens.tolist() == [2]
    assert rows[1].loss_tokens.tolist() == [0, 1]
    for row in rows:
        assert (
            row.token_indices[row.loss_positions].tolist()
            == np.array([3, 6, 10])[row.loss_tokens].tolist()
        )


def test_a_row_without_samples_is_padding() -> None:
    row = lay_out_row(None, multiple=4)
    assert (row.tokens.tolist(), row.tree.ends.tolist(), row.loss_tokens.tolist()) == (
        [0] * 4,
        [],
        [],
    )
