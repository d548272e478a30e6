"""Maps the adapters of `model.lora` to the layers of megatron-core: names, shapes and rectangles,
as `layout` does for the weights. Pure functions.

    linear layer on a tensor-parallel rank          lora_A              lora_B
    linear_qkv, linear_fc1: a part of the rows      whole on every rank rows
    linear_proj, linear_fc2: a part of the columns  columns             whole on every rank

Each linear layer of transformers has adapters of its own: a fused layer of megatron-core has those
of all its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from relax_events.api.errors import ConfigError
from relax_events.api.training import Coordinates, LoRAConfig, Topology
from relax_events.packages.megatron.layout import Piece, Shard
from relax_events.packages.megatron.sizes import DecoderSizes

NAME = "{}.lora_{}.default.weight"
"""Of a matrix in transformers with peft's adapters, by the linear layer and A or B."""

Linear = tuple[str, str, int, int, int, bool]
"""A linear layer: ours, theirs, and what else `AdaptedPart` has."""


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """A linear layer of transformers with adapters, in a layer of megatron-core on one rank.

    Attributes:
        ours: The layer of megatron-core, in its chunk.
        theirs: The linear layer in transformers.
        position: Among the parts of a fused layer.
        num_columns: Of the whole matrix.
        num_rows: Of the whole matrix.
        splits_rows: Whether a rank has a part of the rows, not of the columns.
    """

    ours: str
    theirs: str
    position: int
    num_columns: int
    num_rows: int
    splits_rows: bool

    @property
    def name(self) -> str:
        """The last part of its name in transformers."""
        return self.theirs.rpartition(".")[2]


def adapted_parts(
    sizes: DecoderSizes, lora: LoRAConfig, *, first: int, num_layers: int
) -> Iterator[AdaptedPart]:
    """Yield the linear layers with adapters among consecutive decoder layers.

    Args:
        sizes: Of the decoder.
        lora: Which linear layers get adapters.
        first: Number of the first layer in the model.
        num_layers: How many.
    """
    heads, groups = sizes.num_heads * sizes.head_dim, sizes.num_groups * sizes.head_dim
    hidden, inner = sizes.hidden_size, sizes.mlp_size
    attention: tuple[Linear, ...] = (
        ("self_attention.linear_qkv", "self_attn.q_proj", 0, hidden, heads, True),
        ("self_attention.linear_qkv", "self_attn.k_proj", 1, hidden, groups, True),
        ("self_attention.linear_qkv", "self_attn.v_proj", 2, hidden, groups, True),
        ("self_attention.linear_proj", "self_attn.o_proj", 0, heads, hidden, False),
    )
    dense: tuple[Linear, ...] = (
        ("mlp.linear_fc1", "mlp.gate_proj", 0, hidden, inner, True),
        ("mlp.linear_fc1", "mlp.up_proj", 1, hidden, inner, True),
        ("mlp.linear_fc2", "mlp.down_proj", 0, inner, hidden, False),
    )
    layer = attention if sizes.num_experts else attention + dense
    for number in range(num_layers):
        for ours, theirs, position, columns, rows, splits_rows in layer:
            name = f"{sizes.prefix}layers.{first + number}.{theirs}"
            if _is_target(name, lora):
                yield AdaptedPart(
                    f"decoder.layers.{number}.{ours}", name, position, columns, rows, splits_rows
                )


def _is_target(name: str, lora: LoRAConfig) -> bool:
    targets = lora.target_modules
    return not targets or any(f".{name}".endswith(f".{target}") for target in targets)


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Gives the parameters of a rank's adapters, in place of `layout.rank_shards`."""

    lora: LoRAConfig

    def __call__(self, sizes: DecoderSizes, topology: Topology, at: Coordinates) -> Iterator[Shard]:
        """Yield the parameters of a rank's adapters.

        Args:
            sizes: Of the decoder.
            topology: All ranks.
            at: The coordinates of this one.
        """
        for chunk, parts in enumerate(self.chunks(sizes, topology, at)):
            before = f"{chunk}." if topology.chunks > 1 else ""
            for part in parts:
                yield from self._matrices(part, before, topology, at)

    def chunks(
        self, sizes: DecoderSizes, topology: Topology, at: Coordinates
    ) -> list[list[AdaptedPart]]:
        """Return the linear layers with adapters in each chunk of a rank."""
        num_own = sizes.num_layers // (topology.pipeline * topology.chunks)
        firsts = (
            (chunk * topology.pipeline + at.pipeline) * num_own for chunk in range(topology.chunks)
        )
        return [
            list(adapted_parts(sizes, self.lora, first=first, num_layers=num_own))
            for first in firsts
        ]

    def _matrices(
        self, part: AdaptedPart, before: str, topology: Topology, at: Coordinates
    ) -> Iterator[Shard]:
        rank = self.lora.rank
        split = part.num_rows if part.splits_rows else part.num_columns
        width = split // topology.tensor
        cut = (at.tensor * width, (at.tensor + 1) * width)
        columns = (0, part.num_columns) if part.splits_rows else cut
        rows = cut if part.splits_rows else (0, part.num_rows)
        for matrix, source, is_replicated in (
            ("A", ((0, rank), columns), part.splits_rows),
            ("B", (rows, (0, rank)), not part.splits_rows),
        ):
            shape = (source[0][1] - source[0][0], source[1][1] - source[1][0])
            piece = Piece(NAME.format(part.theirs, matrix), source, ((0, shape[0]), (0, shape[1])))
            ours = f"{before}{part.ours}.adapters.{part.name}.{matrix}"
            yield Shard(ours, shape, (piece,), is_replicated=is_replicated)

    def require_fits(self, sizes: DecoderSizes, topology: Topology) -> None:
        """Require adapters of each target, and some on each pipeline stage.

        Raises:
            ConfigError: There are none; the text names the target or the stage.
        """
        names = [
            part.theirs
            for part in adapted_parts(sizes, self.lora, first=0, num_layers=sizes.num_layers)
        ]
        for target in self.lora.target_modules:
            if not any(f".{name}".endswith(f".{target}") for name in names):
                every = adapted_parts(sizes, LoRAConfig(), first=0, num_layers=1)
                raise ConfigError(
                    f"model.lora.target_modules names {target!r}, but the linear layers that get "
                    f"adapters are {', '.join(sorted(part.name for part in every))}; name some of "
                    "them"
                )
        for rank in range(topology.num_ranks):
            at = topology.at(rank)
            if not any(self.chunks(sizes, topology, at)):
                raise ConfigError(
                    f"model.lora.target_modules leaves pipeline stage {at.pipeline} of "
                    f"{topology.pipeline} without adapters, and it would have nothing to train; "
                    "name layers of every stage, or lower trainer.pipeline_parallel"
                )
