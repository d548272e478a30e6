"""Lays the ranks of a trainer out over data, tensor, pipeline, context and expert parallelism. Pure
functions of sizes.

Ranks are numbered as megatron-core numbers them: tensor changes fastest, then context, then data,
then pipeline. With 16 ranks, tensor 2, context 2 and pipeline 2:

    rank = tensor + 2 * (context + 2 * (data + 2 * pipeline))

Expert layers of a pipeline stage are laid out over the same ranks in another way: expert tensor
changes fastest, then expert, then expert data.

Ranks with the same data coordinate hold one copy of the model together, and train the same
micro-batches. Their data leader is the one whose other coordinates are 0: it alone reads
partitions of the log, and sends its micro-batches to the others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import log

from relax_events.errors import ConfigError


class Axis(StrEnum):
    """A way to group ranks; the members of a group differ in the coordinates that it names."""

    DATA = "data"
    TENSOR = "tensor"
    PIPELINE = "pipeline"
    CONTEXT = "context"
    EXPERT = "expert"
    EXPERT_TENSOR = "expert_tensor"
    EXPERT_DATA = "expert_data"
    MODEL = "model"
    """Tensor, context and pipeline: the ranks that hold one copy of the model."""
    DATA_CONTEXT = "data_context"
    """Data and context: the ranks over which gradients of weights outside experts are summed."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank lies along each axis, each counted from 0."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    expert_data: int

    @property
    def is_data_leader(self) -> bool:
        """Whether the rank reads partitions of the log, for itself and its model-parallel peers."""
        return self.tensor == self.pipeline == self.context == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """See the module's docstring. Create it by `Topology.of`, which checks that the sizes fit.

    Attributes:
        num_ranks: All ranks of the trainer.
        tensor: Ranks over which each matrix is split.
        pipeline: Stages into which the layers are split.
        context: Ranks over which each sequence is split.
        expert: Ranks over which the experts of a layer are distributed.
        expert_tensor: Ranks over which each expert's matrices are split.
        chunks: Chunks of layers that each stage holds, dealt out over the stages in turn.
    """

    num_ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    chunks: int = 1

    @classmethod
    def of(
        cls,
        num_ranks: int,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        context: int = 1,
        expert: int = 1,
        expert_tensor: int = 1,
        chunks: int = 1,
    ) -> Topology:
        """Return the topology of these sizes.

        Raises:
            ConfigError: A size is below 1, or the ranks can't be divided so; the text names the
                smallest changes that fit.
        """
        topology = cls(
            num_ranks=num_ranks,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            chunks=chunks,
        )
        topology._require_fit()
        return topology

    @property
    def data(self) -> int:
        """Copies of the model, each trained on other micro-batches."""
        return self.num_ranks // self.model

    @property
    def model(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_data(self) -> int:
        """Copies of each expert."""
        return self._ranks_of_stage // (self.expert * self.expert_tensor)

    @property
    def _ranks_of_stage(self) -> int:
        return self.num_ranks // self.pipeline

    def at(self, rank: int) -> Coordinates:
        """Return where a rank lies.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank must be in 0 to {self.num_ranks - 1}, got {rank}")
        pipeline, in_stage = divmod(rank, self._ranks_of_stage)
        rest, tensor = divmod(in_stage, self.tensor)
        data, context = divmod(rest, self.context)
        rest, expert_tensor = divmod(in_stage, self.expert_tensor)
        expert_data, expert = divmod(rest, self.expert)
        return Coordinates(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            expert_data=expert_data,
        )

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return all groups of ranks along an axis, each ascending; every rank is in exactly one.

        All ranks get the same list, so they may create process groups from it in this order.
        """
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(self.num_ranks):
            at = self.at(rank)
            groups[tuple(getattr(at, name) for name in FIXED[axis])].append(rank)
        return sorted(groups.values())

    def data_leader(self, data: int) -> int:
        """Return the rank that reads the log for a data coordinate."""
        return data * self.tensor * self.context

    def data_leaders(self) -> list[int]:
        """Return the data leaders, by data coordinate."""
        return [self.data_leader(data) for data in range(self.data)]

    def _require_fit(self) -> None:
        for size in fields(self):
            if (value := getattr(self, size.name)) < 1:
                raise ConfigError(f"{KEYS[size.name]} must be >= 1, got {value}")
        if self.chunks > 1 and self.pipeline == 1:
            raise ConfigError(
                f"{self._name('chunks')} are of each pipeline stage, and there is one stage; set "
                "trainer.pipeline_parallel, or leave trainer.pipeline_chunks out"
            )
        if self.fits:
            return
        raise ConfigError(f"{self._problem()}; set {' or '.join(self._remedies())}")

    @property
    def fits(self) -> bool:
        """Whether the ranks can be divided so."""
        return (
            self.num_ranks % self.model == 0
            and self._ranks_of_stage % (self.expert * self.expert_tensor) == 0
        )

    def _problem(self) -> str:
        if self.num_ranks % self.model:
            return (
                f"{self._name('num_ranks')} must be a multiple of {self._name('tensor')} * "
                f"{self._name('pipeline')} * {self._name('context')} = {self.model}"
            )
        experts = self.expert * self.expert_tensor
        return (
            f"{self._name('expert')} * {self._name('expert_tensor')} = {experts} must divide the "
            f"{self._ranks_of_stage} ranks of a pipeline stage ({self._name('num_ranks')} / "
            f"{self._name('pipeline')})"
        )

    def _name(self, size: str) -> str:
        return f"{KEYS[size]} ({getattr(self, size)})"

    def _remedies(self) -> list[str]:
        """Return the nearest number of ranks that fits, and the nearest change of one other size,
        if there is one: by a factor, since a model that can be split by 4 can be split by 2, and
        often not by 3.
        """
        step = self.model * self.expert * self.expert_tensor
        ranks = [replace(self, num_ranks=number) for number in range(1, self.num_ranks + step + 1)]
        sizes = [
            replace(self, **{size: value})
            for size in KEYS
            if size not in ("num_ranks", "chunks")
            for value in range(1, self.num_ranks + 1)
            if value % getattr(self, size) == 0 or getattr(self, size) % value == 0
        ]
        nearest = (
            min((one for one in change if one.fits), key=self._distance, default=None)
            for change in (ranks, sizes)
        )
        return [self._difference(one) for one in nearest if one is not None]

    def _distance(self, other: Topology) -> tuple[float, int]:
        changes = [
            (getattr(self, size), getattr(other, size))
            for size in KEYS
            if getattr(self, size) != getattr(other, size)
        ]
        # of two equally near sizes the smaller one, which asks nothing more of the model
        return sum(abs(log(after / before)) for before, after in changes), sum(
            after for _, after in changes
        )

    def _difference(self, other: Topology) -> str:
        return next(
            f"{key} = {getattr(other, size)}"
            for size, key in KEYS.items()
            if getattr(self, size) != getattr(other, size)
        )


KEYS = {
    "num_ranks": "trainer.ranks",
    "tensor": "trainer.tensor_parallel",
    "pipeline": "trainer.pipeline_parallel",
    "context": "trainer.context_parallel",
    "expert": "trainer.expert_parallel",
    "expert_tensor": "trainer.expert_tensor_parallel",
    "chunks": "trainer.pipeline_chunks",
}
"""The setting of each size."""
FIXED: dict[Axis, tuple[str, ...]] = {
    Axis.DATA: ("tensor", "pipeline", "context"),
    Axis.TENSOR: ("data", "pipeline", "context"),
    Axis.PIPELINE: ("data", "tensor", "context"),
    Axis.CONTEXT: ("data", "tensor", "pipeline"),
    Axis.EXPERT: ("pipeline", "expert_tensor", "expert_data"),
    Axis.EXPERT_TENSOR: ("pipeline", "expert", "expert_data"),
    Axis.EXPERT_DATA: ("pipeline", "expert", "expert_tensor"),
    Axis.MODEL: ("data",),
    Axis.DATA_CONTEXT: ("tensor", "pipeline"),
}
"""The coordinates in which the members of a group along an axis agree."""
