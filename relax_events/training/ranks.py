"""Defines how the ranks of a trainer communicate: small arrays, bytes, and gradient reduction.
Imports no torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from relax_events.config.topology import Coordinates, Topology

if TYPE_CHECKING:
    from torch import Tensor

RENDEZVOUS_FD_VARIABLE = "RELAX_RENDEZVOUS_FD"
"""Environment variable of rank 0: file descriptor of a socket that listens on MASTER_PORT. The
supervisor binds it, so that no other process can take the port."""


CollectiveContext = Callable[[], AbstractContextManager[None]]
"""Entered around every collective, which may wait long for other ranks."""


class GatheringRanks(Protocol):
    """What statistics over a train step need of the ranks that have its samples. Collective."""

    rank: int
    size: int

    def all_gather(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Stack every rank's array, in rank order; see `Ranks`."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""


class Ranks(GatheringRanks, Protocol):
    """The processes that train one model together.

    Every method is collective: all ranks call it at the same point. It returns once all have
    called, or raises RankLost at the deadline given when the ranks were opened. Nothing is pickled.
    """

    rank: int
    size: int
    local_rank: int

    @property
    def topology(self) -> Topology:
        """How the ranks are laid out."""

    @property
    def at(self) -> Coordinates:
        """Where this rank lies."""

    def all_gather(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Stack every rank's array, in rank order: [size, ...]. Shape and dtype must be the same on
        all.
        """

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order; lengths may differ."""

    def broadcast(self, data: bytes | None, *, source: int = 0) -> bytes:
        """Send the source rank's bytes to all; the others pass None."""

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send a part to every rank, in rank order; return what each rank sent to this one. Lengths
        may differ; large parts travel in pieces.
        """

    def share_with_peers(self, data: bytes | None) -> bytes:
        """Return the bytes of this rank's data leader, which alone brings some; the others pass
        None. Large ones travel in pieces.
        """

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over ranks, in place."""

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Return the context for code that calls collectives of its own; it raises RankLost where
        one fails.

        Args:
            what: Named in the error.
        """

    def wrap_collectives(self, around: CollectiveContext) -> None:
        """Enter this around every collective from now on. Not collective."""

    def close(self) -> None:
        """Leave the group. Not collective; a second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class DataRanks:
    """The copies of the model, each of which several ranks hold together and of which one rank
    speaks: the first rank that computes the loss. Collective over all ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Take the speakers from the topology: on the last pipeline stage, the first ranks along
        the tensor and context axes.
        """
        topology = ranks.topology
        last = topology.num_ranks - topology.num_ranks // topology.pipeline
        self._ranks, self._speakers = ranks, [last + rank for rank in topology.data_leaders()]
        self.rank, self.size = ranks.at.data, topology.data

    def all_gather(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Stack the array of each copy of the model."""
        return self._ranks.all_gather(values)[self._speakers]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of each copy of the model."""
        rows = self._ranks.all_gather_bytes(data)
        return [rows[rank] for rank in self._speakers]


class SingleRank:
    """The trivial group of one process."""

    rank = 0
    size = 1
    local_rank = 0

    @property
    def topology(self) -> Topology:
        """Data parallelism alone."""
        return Topology(num_ranks=self.size)

    @property
    def at(self) -> Coordinates:
        """Where this rank lies."""
        return self.topology.at(self.rank)

    def all_gather(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return the array with a leading axis of 1."""
        return values[None]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes in a list."""
        return [data]

    def broadcast(self, data: bytes | None, *, source: int = 0) -> bytes:
        """Return the bytes.

        Raises:
            ValueError: There is nothing to broadcast, or the source is not rank 0.
        """
        if data is None or source != 0:
            raise ValueError(
                f"the only rank is 0 and must bring the data, got source {source} and data {data!r}"
            )
        return data

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Return the part for this rank in a list."""
        return list(parts)

    def share_with_peers(self, data: bytes | None) -> bytes:
        """Return the bytes.

        Raises:
            ValueError: There is nothing to share.
        """
        return self.broadcast(data)

    def all_reduce(self, tensor: Tensor) -> None:
        """Do nothing: the sum over one rank is the tensor."""

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Do nothing: no other rank is waited for."""
        return nullcontext()

    def wrap_collectives(self, around: CollectiveContext) -> None:
        """Do nothing: no collective waits."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
