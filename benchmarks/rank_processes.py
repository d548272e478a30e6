"""Starts a benchmark's program once for each rank of a trainer, on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relax_events.config.topology import Topology
from relax_events.training.distributed import open_ranks
from relax_events.training.ranks import RENDEZVOUS_FD_VARIABLE, Ranks, SingleRank


def train_as_rank(
    train: Callable[[Ranks], dict[str, float]],
    topology: Callable[[int], Topology],
    *,
    num_ranks: int,
    timeout_seconds: float,
) -> None:
    """Train as the rank that this process is, and print the result for `run_ranks`.

    Args:
        train: Trains, and returns what is printed.
        topology: Lays so many ranks out.
        num_ranks: In number.
        timeout_seconds: Deadline of collectives.
    """
    if num_ranks == 1:
        print(json.dumps(train(SingleRank())))
        return
    with open_ranks(timeout_seconds=timeout_seconds, lay_out=topology) as ranks:
        print(json.dumps(train(ranks)))


def run_ranks(
    module: str, arguments: Sequence[str], *, num_ranks: int, timeout_seconds: float
) -> list[dict[str, Any]]:
    """Run a module as so many ranks; return what each printed as JSON in its last line.

    Args:
        module: As `python -m` takes it.
        arguments: Of the command line, the same for all ranks.
        num_ranks: In number.
        timeout_seconds: Deadline of each.
    Raises:
        SystemExit: A rank failed.
    """
    command, processes = [sys.executable, "-m", module, *arguments], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(num_ranks):
            ranked = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
            ranked |= {"MASTER_PORT": listener.getsockname()[1]}
            ranked |= {"TORCHELASTIC_USE_AGENT_STORE": True}
            served = {RENDEZVOUS_FD_VARIABLE: listener.fileno()} if rank == 0 else {}
            variables = {name: str(value) for name, value in (ranked | served).items()}
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    env=os.environ | variables | {"MASTER_ADDR": "127.0.0.1"},
                    pass_fds=[listener.fileno()] if rank == 0 else [],
                    text=True,
                )
            )
    results = []
    for process in processes:
        output, _ = process.communicate(timeout=timeout_seconds)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        results.append(json.loads(output.splitlines()[-1]))
    return results


def clear_peak() -> None:
    """Reset the count of this process's peak memory."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the most memory that was resident since the peak was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
