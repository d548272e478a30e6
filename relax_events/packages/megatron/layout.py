"""Maps the parameters of a Hugging Face decoder to those of megatron-core's, by one table: names,
shapes and rectangles alone.

A rank holds a shard of every tensor of its pipeline stage. A shard is made of rectangles of tensors
in Hugging Face names:

    megatron-core, on one of the tensor-parallel ranks          transformers
    word_embeddings, output_layer     rows                      embed_tokens, lm_head
    linear_qkv                        [queries, key, value]     q_proj, k_proj, v_proj
                                      of each of its groups
    linear_proj, linear_fc2           columns                   o_proj, down_proj
    linear_fc1                        [gate rows, up rows]      gate_proj, up_proj
    local_experts.E.linear_fc1        the same, of one expert   experts.gate_up_proj[E]
    local_experts.E.linear_fc2        columns, of one expert    experts.down_proj[E]
    norms, router                     whole on every rank       norms, gate
    towers                            whole, on the first       the same names
                                      pipeline stage
    value_head                        whole on every rank       weight, bias (of a critic alone)

Everything else follows from the rectangles: loading, the stream of weights, gradients in tests,
checkpoints, conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from relax_events.api.training import Coordinates, Topology
from relax_events.packages.megatron.sizes import DecoderSizes

if TYPE_CHECKING:
    from torch import Tensor

TOWERS = "towers"
"""The attribute of the first chunk of layers that holds the towers."""
Box = tuple[tuple[int, int], ...]
"""A rectangle: start and end along each dimension."""


ShardsOf = Callable[[DecoderSizes, Topology, Coordinates], "Iterator[Shard]"]
"""Yields the parameters of a rank."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a Hugging Face tensor, and the rectangle of a shard that holds it.

    Attributes:
        name: In transformers.
        source: In the tensor. An expert's has one more dimension than `target`, of
            length 1.
        target: In the shard.
    """

    name: str
    source: Box
    target: Box


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter of megatron-core on one rank.

    Attributes:
        name: On this rank, where layers and experts are counted from 0. Where a stage holds
            several chunks of layers, their number comes first.
        shape: On this rank.
        pieces: What it is made of; rows of the padded vocabulary are in none.
        is_expert: Whether it belongs to an expert, and so is copied over the ranks of
            `Axis.EXPERT_DATA`; others are copied over `Axis.DATA_CONTEXT`.
        is_replicated: Whether all tensor-parallel ranks hold it whole.
        is_copy: Whether it is the last stage's copy of a tied embedding.
        is_new: Whether it is in no folder of a pretrained model, and begins as zeros.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    is_expert: bool = False
    is_replicated: bool = False
    is_copy: bool = False
    is_new: bool = False


def full_shapes(
    sizes: DecoderSizes, shards_of: ShardsOf | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of the decoder in transformers, tied ones once.

    Args:
        sizes: Of the decoder.
        shards_of: Yields the parameters of a rank; by default all, `rank_shards`.
    """
    shapes: dict[str, list[int]] = {}
    whole = Topology.of(1)
    for shard in (shards_of or rank_shards)(sizes, whole, whole.at(0)):
        for piece in shard.pieces:
            ends = shapes.setdefault(piece.name, [0] * len(piece.source))
            for axis, (_, end) in enumerate(piece.source):
                ends[axis] = max(ends[axis], end)
    return {name: tuple(shape) for name, shape in shapes.items()}


def rank_shards(sizes: DecoderSizes, topology: Topology, at: Coordinates) -> Iterator[Shard]:
    """Yield the parameters of a rank, in the order of its model.

    Args:
        sizes: Of the decoder; it must fit the topology.
        topology: All ranks.
        at: The coordinates of this one.
    """
    rank = _Rank(sizes, topology, at)
    for chunk in range(topology.chunks):
        for shard in rank.chunk(chunk):
            yield shard if topology.chunks == 1 else replace(shard, name=f"{chunk}.{shard.name}")


def holds_first_copy(shard: Shard, at: Coordinates) -> bool:
    """Return whether a rank gives a shard that several ranks hold."""
    if shard.is_copy:
        return False
    if shard.is_expert:
        return at.expert_data == 0
    return at.data == at.context == 0 and (at.tensor == 0 or not shard.is_replicated)


def cut(values: Tensor, box: Box) -> Tensor:
    """Return a rectangle of a tensor as a view."""
    return values[tuple(slice(*ends) for ends in box)]


@dataclass(frozen=True, slots=True)
class _Rank:
    sizes: DecoderSizes
    topology: Topology
    at: Coordinates

    def chunk(self, chunk: int) -> Iterator[Shard]:
        """Yield the parameters of a chunk of layers, with those before the first one of the model
        and after its last one.
        """
        sizes, at, topology = self.sizes, self.at, self.topology
        if at.pipeline == chunk == 0:
            yield self.vocabulary("embedding.word_embeddings.weight", f"{sizes.prefix}embed_tokens")
            for name, shape in sizes.towers:
                box = tuple((0, size) for size in shape)
                piece = Piece(f"{sizes.outer_prefix}{name}", box, box)
                yield Shard(f"{TOWERS}.{name}", shape, (piece,), is_replicated=True)
        yield from self.layers(chunk * topology.pipeline + at.pipeline)
        if (at.pipeline, chunk) == (topology.pipeline - 1, topology.chunks - 1):
            yield self.vector(
                "decoder.final_layernorm.weight", f"{sizes.prefix}norm.weight", sizes.hidden_size
            )
            yield from self.head()

    def head(self) -> Iterator[Shard]:
        sizes = self.sizes
        if sizes.has_value_head:
            for name, length in (("weight", sizes.hidden_size), ("bias", 1)):
                yield replace(self.vector(f"value_head.{name}", name, length), is_new=True)
        elif not sizes.is_tied:
            yield self.vocabulary("output_layer.weight", "lm_head")
        elif self.topology.pipeline > 1:
            tied = self.vocabulary("output_layer.weight", f"{sizes.prefix}embed_tokens")
            yield replace(tied, is_copy=True)

    def layers(self, index: int) -> Iterator[Shard]:
        """Yield the layers of a chunk, counted over all stages: they are dealt out in turn."""
        num_own = self.sizes.num_layers // (self.topology.pipeline * self.topology.chunks)
        for number in range(num_own):
            ours = f"decoder.layers.{number}."
            theirs = f"{self.sizes.prefix}layers.{index * num_own + number}."
            yield from self._attention(ours, theirs)
            if self.sizes.num_experts:
                yield from self._experts(f"{ours}mlp.", f"{theirs}mlp.")
            else:
                yield from self._dense(f"{ours}mlp.", f"{theirs}mlp.")

    def _attention(self, ours: str, theirs: str) -> Iterator[Shard]:
        sizes = self.sizes
        hidden, width = sizes.hidden_size, sizes.head_dim
        attention, attention_ours = f"{theirs}self_attn.", f"{ours}self_attention."
        yield self.vector(
            f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", hidden
        )
        yield self.columns(
            f"{attention_ours}linear_proj.weight", f"{attention}o_proj.weight", hidden,
            sizes.num_heads * width,
        )  # fmt: skip
        yield self._queries_keys_values(f"{attention_ours}linear_qkv.weight", attention)
        for part in "qk":
            yield self.vector(
                f"{attention_ours}{part}_layernorm.weight", f"{attention}{part}_norm.weight", width
            )
        yield self.vector(
            f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", hidden
        )

    def _queries_keys_values(self, name: str, attention: str) -> Shard:
        sizes = self.sizes
        columns = (0, sizes.hidden_size)
        num_own = sizes.num_groups // self.topology.tensor
        num_queries = sizes.num_heads // sizes.num_groups * sizes.head_dim
        pieces, end = [], 0
        for group in range(self.at.tensor * num_own, (self.at.tensor + 1) * num_own):
            for part, num_rows in (
                ("q", num_queries),
                ("k", sizes.head_dim),
                ("v", sizes.head_dim),
            ):
                start, end = end, end + num_rows
                source = ((group * num_rows, (group + 1) * num_rows), columns)
                pieces.append(
                    Piece(f"{attention}{part}_proj.weight", source, ((start, end), columns))
                )
        return Shard(name, (end, sizes.hidden_size), tuple(pieces))

    def _dense(self, ours: str, theirs: str) -> Iterator[Shard]:
        rows = _part(self.sizes.mlp_size, self.topology.tensor, self.at.tensor)
        columns, num_rows = (0, self.sizes.hidden_size), rows[1] - rows[0]
        yield Shard(
            f"{ours}linear_fc1.weight",
            (2 * num_rows, self.sizes.hidden_size),
            tuple(
                Piece(
                    f"{theirs}{part}_proj.weight",
                    (rows, columns),
                    ((index * num_rows, (index + 1) * num_rows), columns),
                )
                for index, part in enumerate(("gate", "up"))
            ),
        )
        yield self.columns(
            f"{ours}linear_fc2.weight", f"{theirs}down_proj.weight", self.sizes.hidden_size,
            self.sizes.mlp_size,
        )  # fmt: skip

    def _experts(self, ours: str, theirs: str) -> Iterator[Shard]:
        sizes, topology = self.sizes, self.topology
        router = Piece(
            f"{theirs}gate.weight", *[((0, sizes.num_experts), (0, sizes.hidden_size))] * 2
        )
        yield Shard(
            f"{ours}router.weight", (sizes.num_experts, sizes.hidden_size), (router,),
            is_replicated=True,
        )  # fmt: skip
        num_own = sizes.num_experts // topology.expert
        start, end = _part(sizes.expert_size, topology.expert_tensor, self.at.expert_tensor)
        hidden, inner = (0, sizes.hidden_size), end - start
        for number in range(num_own):
            expert = self.at.expert * num_own + number
            module, one = f"{ours}experts.local_experts.{number}.", (expert, expert + 1)
            yield Shard(
                f"{module}linear_fc1.weight",
                (2 * inner, sizes.hidden_size),
                tuple(
                    Piece(
                        f"{theirs}experts.gate_up_proj",
                        (one, (half + start, half + end), hidden),
                        ((index * inner, (index + 1) * inner), hidden),
                    )
                    for index, half in enumerate((0, sizes.expert_size))
                ),
                is_expert=True,
            )
            piece = Piece(
                f"{theirs}experts.down_proj", (one, hidden, (start, end)), (hidden, (0, inner))
            )
            yield Shard(
                f"{module}linear_fc2.weight", (sizes.hidden_size, inner), (piece,), is_expert=True
            )

    def vocabulary(self, ours: str, theirs: str) -> Shard:
        padded = self.sizes.padded_vocab_size(self.topology.tensor)
        start, end = _part(padded, self.topology.tensor, self.at.tensor)
        last, columns = min(end, self.sizes.vocab_size), (0, self.sizes.hidden_size)
        piece = Piece(f"{theirs}.weight", ((start, last), columns), ((0, last - start), columns))
        return Shard(ours, (end - start, self.sizes.hidden_size), (piece,) if last > start else ())

    def columns(self, ours: str, theirs: str, num_rows: int, num_columns: int) -> Shard:
        start, end = _part(num_columns, self.topology.tensor, self.at.tensor)
        rows = (0, num_rows)
        piece = Piece(theirs, (rows, (start, end)), (rows, (0, end - start)))
        return Shard(ours, (num_rows, end - start), (piece,))

    def vector(self, ours: str, theirs: str, length: int) -> Shard:
        return Shard(
            ours, (length,), (Piece(theirs, ((0, length),), ((0, length),)),), is_replicated=True
        )


def _part(size: int, num_parts: int, index: int) -> tuple[int, int]:
    part = size // num_parts
    return index * part, (index + 1) * part
