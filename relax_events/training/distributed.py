"""Implements ranks over torch.distributed: gloo for the CPU and for small data, NCCL for gradients
on GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from relax_events.config.topology import Axis, Coordinates, Topology
from relax_events.errors import EnvironmentProblem, RankLost
from relax_events.runtime.lifecycle import Lifecycle
from relax_events.training.ranks import RENDEZVOUS_FD_VARIABLE, CollectiveContext, Ranks, SingleRank

LOST = re.compile(r"gloo|NCCL|Connection (closed|reset)|Timed out", re.IGNORECASE)
"""Texts of errors of torch.distributed that have no class of their own."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

PIECE_BYTES = 64 << 20
"""Bytes that a rank sends at once, to all others together."""
COLLECTIVE_MARGIN_SECONDS = 60.0
"""Seconds after its own deadline at which a collective counts as hung."""
LayOut = Callable[[int], Topology]


def open_ranks(*, timeout_seconds: float, lay_out: LayOut = Topology.of) -> Ranks:
    """Join the ranks that `relax run` or torchrun started, or return a single rank.

    Args:
        timeout_seconds: Deadline of joining and of every later collective.
        lay_out: Returns the topology of so many ranks; by default all are data parallel.
    Raises:
        ConfigError: The topology does not fit the number of ranks.
        EnvironmentProblem: torchrun's environment is incomplete; the text names what is missing.
        RankLost: The other ranks did not join before the deadline.
    """
    if "RANK" not in os.environ:
        lay_out(1)
        return SingleRank()
    if missing := [name for name in TORCHRUN_VARIABLES if name not in os.environ]:
        raise EnvironmentProblem(
            f"RANK is set but {', '.join(missing)} is not; start several ranks with "
            "torchrun, or unset RANK for one"
        )
    return TorchRanks(timeout_seconds=timeout_seconds, lay_out=lay_out)


def wait_visibly(ranks: Ranks, lifecycle: Lifecycle, *, timeout_seconds: float) -> None:
    """Continue the worker's heartbeats in collectives, and say that it waits for other ranks.

    Args:
        ranks: This process and its peers.
        lifecycle: Of its worker.
        timeout_seconds: Deadline of a collective.
    """
    ranks.wrap_collectives(
        lambda: lifecycle.activity(
            "wait for the other ranks",
            deadline_seconds=timeout_seconds + COLLECTIVE_MARGIN_SECONDS,
            is_progress=False,
        )
    )


def serve_rendezvous(num_ranks: int, *, timeout_seconds: float) -> TCPStore | None:
    """Serve the rendezvous store if this rank was given a listening socket; all ranks join as
    clients.
    """
    if (listener := os.environ.pop(RENDEZVOUS_FD_VARIABLE, None)) is None:
        return None
    host, port, timeout = (
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        timedelta(seconds=timeout_seconds),
    )
    return TCPStore(host, port, num_ranks, True, timeout, False, master_listen_fd=int(listener))


class TorchRanks:
    """Ranks over torch.distributed. A rank that dies or hangs makes the others' next collective
    raise RankLost by the deadline.
    """

    def __init__(self, *, timeout_seconds: float, lay_out: LayOut = Topology.of) -> None:
        """Join the group; see `open_ranks`.

        Args:
            timeout_seconds: Deadline of joining and of every later collective.
            lay_out: Returns the topology of so many ranks.
        """
        self.rank, self.size, self.local_rank = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        self.topology: Topology = lay_out(self.size)
        self.at: Coordinates = self.topology.at(self.rank)
        self._collective_context: CollectiveContext = nullcontext
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        self._store = serve_rendezvous(self.size, timeout_seconds=timeout_seconds)
        self._attempt(
            "joining",
            lambda: dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds)),
        )
        self._peers = self._join_peers(timeout_seconds) if self.topology.model > 1 else None

    def _join_peers(self, timeout_seconds: float) -> dist.ProcessGroup:
        """Create the groups of ranks that hold a copy of the model together; return this rank's."""
        joined: dict[int, dist.ProcessGroup] = {}

        def create() -> None:
            for ranks in self.topology.groups(Axis.MODEL):
                group: Any = dist.new_group(
                    ranks, timeout=timedelta(seconds=timeout_seconds), backend="gloo"
                )
                joined.update(dict.fromkeys(ranks, group))

        self._attempt("joining the model-parallel ranks", create)
        return joined[self.rank]

    def _attempt(self, what: str, collective: Callable[[], object]) -> None:
        try:
            with self._collective_context():
                collective()
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: RuntimeError) -> RankLost:
        return RankLost(
            f"rank {self.rank} of {self.size}: {what} failed, another rank died or is "
            f"behind ({error}); "
            "see its log, or raise trainer.collective_timeout_seconds"
        )

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Raise RankLost where a collective within fails; other errors stay as they are."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not LOST.search(str(error)):
                raise
            raise self._lost(what, error) from error

    def all_gather(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Stack every rank's array, in rank order."""
        mine = torch.from_numpy(
            np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8).copy()
        )
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._attempt("all_gather", lambda: dist.all_gather(parts, mine))
        return np.stack([part.numpy().view(values.dtype).reshape(values.shape) for part in parts])

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order: lengths first, then padded to the longest."""
        lengths = self.all_gather(np.array([len(data)], np.int64))[:, 0].tolist()
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = self.all_gather(padded) if max(lengths) else np.zeros((self.size, 0), np.uint8)
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, data: bytes | None, *, source: int = 0) -> bytes:
        """Send the source rank's bytes to all: the length first, then the bytes.

        Raises:
            ValueError: This is the source, and there is nothing to broadcast.
        """
        if self.rank == source and data is None:
            raise ValueError(
                f"rank {source} is the source of the broadcast and must bring the data"
            )
        length = torch.tensor([len(data or b"")])
        self._attempt("broadcast", lambda: dist.broadcast(length, src=source))
        content = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source and data:
            content = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        if length:
            self._attempt("broadcast", lambda: dist.broadcast(content, src=source))
        return content.numpy().tobytes()

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send a part to every rank: all lengths first, then the bytes in pieces."""
        lengths = self.all_gather(np.array([len(part) for part in parts], np.int64))
        piece = max(1, PIECE_BYTES // self.size)
        received = [bytearray() for _ in parts]
        for start in range(0, int(lengths.max()), piece):
            sizes = (lengths - start).clip(0, piece)
            sent = b"".join(part[start : start + piece] for part in parts)
            mine = sizes[:, self.rank].tolist()
            pieces = self._exchange_piece(sent, sizes[self.rank].tolist(), mine)
            for whole, got in zip(received, pieces.split(mine), strict=True):
                whole += got.numpy().tobytes()
        return [bytes(whole) for whole in received]

    def _exchange_piece(self, sent: bytes, sizes: list[int], expected: list[int]) -> Tensor:
        outgoing = torch.from_numpy(np.frombuffer(sent, np.uint8).copy())
        pieces = torch.empty(sum(expected), dtype=torch.uint8)

        def exchange() -> None:
            dist.all_to_all_single(pieces, outgoing, expected, sizes)

        self._attempt("exchange_bytes", exchange)
        return pieces

    def share_with_peers(self, data: bytes | None) -> bytes:
        """Return the bytes of this rank's data leader: the length first, then pieces.

        Raises:
            ValueError: This is the data leader, and there is nothing to share.
        """
        if self.at.is_data_leader and data is None:
            raise ValueError(f"rank {self.rank} is the data leader and must bring the data")
        if self._peers is None:
            return data or b""
        length = torch.tensor([len(data or b"")])
        self._broadcast_to_peers(length)
        content = torch.empty(int(length), dtype=torch.uint8)
        if data:
            content = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        for piece in content.split(PIECE_BYTES) if len(content) else ():
            self._broadcast_to_peers(piece)
        return content.numpy().tobytes()

    def _broadcast_to_peers(self, tensor: Tensor) -> None:
        leader = self.topology.data_leader(self.at.data)
        self._attempt(
            "share_with_peers", lambda: dist.broadcast(tensor, src=leader, group=self._peers)
        )

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over ranks, in place."""
        self._attempt("all_reduce", lambda: dist.all_reduce(tensor))

    def wrap_collectives(self, around: CollectiveContext) -> None:
        """See `Ranks`."""
        self._collective_context = around

    def close(self) -> None:
        """Leave the group; a second call does nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
