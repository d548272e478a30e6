"""Ranks that are threads of this process, for tests of what several ranks do together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from relax_events.config.topology import Topology
from relax_events.training.ranks import SingleRank

Result = TypeVar("Result")
DEADLINE_SECONDS = 60


class ThreadRank(SingleRank):
    """A rank of several that are threads of this process."""

    def __init__(
        self, rank: int, topology: Topology, barrier: threading.Barrier, slots: list[Any]
    ) -> None:
        self.rank, self.size, self._topology = rank, topology.num_ranks, topology
        self.barrier, self._slots = barrier, slots

    @property
    def topology(self) -> Topology:
        """How the ranks are laid out."""
        return self._topology

    def _swap(self, mine: Any) -> list[Any]:
        self._slots[self.rank] = mine
        self.barrier.wait(DEADLINE_SECONDS)
        everyone = list(self._slots)
        self.barrier.wait(DEADLINE_SECONDS)
        return everyone

    def all_gather(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Stack every rank's array."""
        return np.stack(self._swap(values))

    def broadcast(self, data: bytes | None, *, source: int = 0) -> bytes:
        """Return the bytes of the source rank."""
        return self.all_gather_bytes(data or b"")[source]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes."""
        return self._swap(data)

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Return what each rank sent to this one."""
        return [sent[self.rank] for sent in self._swap(list(parts))]

    def share_with_peers(self, data: bytes | None) -> bytes:
        """Return the data leader's bytes."""
        shared: bytes = self._swap(data)[self.topology.data_leader(self.at.data)]
        return shared

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by its sum over ranks."""
        tensor.copy_(sum(self._swap(tensor.clone())))


def make_ranks(topology: Topology) -> list[ThreadRank]:
    """Return all ranks, in order; each is used by a thread of its own."""
    barrier, slots = threading.Barrier(topology.num_ranks), [None] * topology.num_ranks
    return [ThreadRank(rank, topology, barrier, slots) for rank in range(topology.num_ranks)]


def run_ranks(topology: Topology, program: Callable[[ThreadRank], Result]) -> list[Result]:
    """Run a program on every rank at once; return the results in rank order."""
    ranks = make_ranks(topology)

    def call(rank: ThreadRank) -> Result:
        try:
            return program(rank)
        except BaseException:
            rank.barrier.abort()  # or the others would wait for this one
            raise

    with ThreadPoolExecutor(topology.num_ranks) as pool:
        futures = [pool.submit(call, rank) for rank in ranks]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
