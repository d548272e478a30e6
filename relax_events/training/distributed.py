"""Implements ranks over torch.distributed: gloo for the CPU and for small data, NCCL for gradients
on GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from relax_events.errors import EnvironmentProblem, RankLost
from relax_events.training.ranks import RENDEZVOUS_FD_VARIABLE, CollectiveContext, Ranks, SingleRank

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def open_ranks(*, timeout_seconds: float) -> Ranks:
    """Join the ranks that `relax run` or torchrun started, or return a single rank.

    Args:
        timeout_seconds: Deadline of joining and of every later collective.
    Raises:
        EnvironmentProblem: torchrun's environment is incomplete; the text names what is missing.
        RankLost: The other ranks did not join before the deadline.
    """
    if "RANK" not in os.environ:
        return SingleRank()
    if missing := [name for name in TORCHRUN_VARIABLES if name not in os.environ]:
        raise EnvironmentProblem(
            f"RANK is set but {', '.join(missing)} is not; start several ranks with "
            "torchrun, or unset RANK for one"
        )
    return TorchRanks(timeout_seconds=timeout_seconds)


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

    def __init__(self, *, timeout_seconds: float) -> None:
        """Join the group; see `open_ranks`.

        Args:
            timeout_seconds: Deadline of joining and of every later collective.
        """
        self.rank, self.size, self.local_rank = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        self._collective_context: CollectiveContext = nullcontext
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        self._store = serve_rendezvous(self.size, timeout_seconds=timeout_seconds)
        self._attempt(
            "joining",
            lambda: dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds)),
        )

    def _attempt(self, what: str, collective: Callable[[], object]) -> None:
        try:
            with self._collective_context():
                collective()
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} of {self.size}: {what} failed, another rank died or is "
                f"behind ({error}); "
                "see its log, or raise trainer.collective_timeout_seconds"
            ) from error

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
