"""Starts and ends the processes of one worker together: one process, or one for each rank of the
trainer; and lists the modules that a role's worker imports before its work starts.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import structlog

from relax_events.config import RunConfig
from relax_events.errors import EnvironmentProblem, RankLost
from relax_events.launcher.fork_client import ForkedWorker, ForkServer
from relax_events.launcher.fork_protocol import SpawnRequest
from relax_events.launcher.memory_kills import MemoryKills
from relax_events.plugins import ENGINES, ROLES, TRAINER_BACKENDS, list_installed
from relax_events.telemetry.final_error import FinalError, read_final_error
from relax_events.training.ranks import RENDEZVOUS_FD_VARIABLE

log = structlog.get_logger()
LOOPBACK = "127.0.0.1"
OTHERS_SECONDS = 10.0
"""Time limit for the other ranks to exit by themselves once one has failed: their next collective
fails at once, unless they hang."""
CLIENT_ASSERTS, LOG_END_BYTES = b"rd_slice_", 16 * 1024
"""Common part of the names of librdkafka's assertions on a response's bytes, and how much of a log
is searched for it."""
CLIENT_ABORT_TEXT = (
    "ended by SIGABRT: Kafka's client aborted while it parsed a record batch "
    "whose checksum fails; processes that start from now on "
    "fetch single record batches, to name it (RELAX_FETCH_SINGLE_BATCHES=1)"
)


class PortTaken(EnvironmentProblem):
    """A process listens on the port that a run file names."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker's exit, described by the rank that caused it.

    Attributes:
        worker_id: Of that rank.
        code: Its exit code, -N if signal N ended it.
        log_path: Its log.
        error: The error that it ended with; None where it could not write one.
        memory: Why the kernel killed processes while it ran; empty where it killed none.
    """

    worker_id: str
    code: int
    log_path: Path
    error: FinalError | None
    memory: str = ""

    @property
    def has_client_abort(self) -> bool:
        """Whether Kafka's client aborted while it parsed a response."""
        return self.code == -signal.SIGABRT and CLIENT_ASSERTS in _read_end(self.log_path)

    @property
    def text(self) -> str:
        """The error, or what is known without one."""
        if self.error is not None:
            return str(self.error)
        if self.has_client_abort:
            return CLIENT_ABORT_TEXT
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        cause = f", {self.memory}" if self.memory and self.code == -signal.SIGKILL else ""
        return f"ended by {_signal_name(-self.code)}{cause}"


def _read_end(path: Path) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_END_BYTES))
        return file.read()
    return b""


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def build_rank_requests(
    request: SpawnRequest,
    *,
    num_ranks: int,
    ranks: Sequence[int],
    rendezvous: tuple[str, int] | None = None,
) -> dict[int, SpawnRequest]:
    """Return the spawn request of each rank, with all variables that torch.distributed reads.

    Args:
        request: Without them.
        num_ranks: On all hosts.
        ranks: Those on this host.
        rendezvous: Address and port of rank 0; on one host None, and the port is chosen at the
            start.
    """
    address, port = rendezvous or (LOOPBACK, 0)
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return {
        rank: replace(
            request,
            environment=request.environment
            | shared
            | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)},
        )
        for local_rank, rank in enumerate(ranks)
    }


def _listen(address: str, port: int) -> socket.socket:
    """Listen for the other ranks; on all interfaces where they are on other hosts."""
    try:
        return socket.create_server((LOOPBACK if address == LOOPBACK else "", port), backlog=128)
    except OSError as error:
        kind = PortTaken if port and error.errno == errno.EADDRINUSE else EnvironmentProblem
        raise kind(
            f"rank 0 can't listen on port {port} for the ranks of other hosts "
            f"({error.strerror}); set hosts.rendezvous_port"
        ) from error


class WorkerProcesses:
    """All processes of a worker, with the interface of `subprocess.Popen`."""

    def __init__(self, processes: Mapping[str, ForkedWorker], logs: Path) -> None:
        """Take over running processes; see `start`."""
        self._processes, self._logs = dict(processes), logs
        self._killed: set[str] = set()
        self._kill_at: float | None = None
        self._ending: WorkerExit | None = None
        self._kills = MemoryKills.read()

    @classmethod
    def start(
        cls, fork_server: ForkServer, requests: Mapping[str, SpawnRequest], *, logs: Path
    ) -> Self:
        """Start the processes.

        Args:
            fork_server: Forks them.
            requests: By worker id, rank 0 first.
            logs: The folder of their logs, one each.
        Raises:
            RunFailed: The fork server can't be started.
            PortTaken: A process listens on the port of rank 0.
            EnvironmentProblem: Rank 0 can't listen for another reason.
        """
        first = next(iter(requests.values())).environment
        if first.get("RANK") != "0":
            return cls(
                {
                    name: fork_server.spawn(request, log_path=logs / f"{name}.log")
                    for name, request in requests.items()
                },
                logs,
            )
        started: dict[str, ForkedWorker] = {}
        with (
            _listen(first["MASTER_ADDR"], int(first["MASTER_PORT"])) as listener,
            contextlib.ExitStack() as undo,
        ):
            undo.callback(lambda: cls(started, logs).kill_group())
            port = {"MASTER_PORT": str(listener.getsockname()[1])}
            for name, request in requests.items():
                is_first = not started
                started_request = replace(
                    request,
                    environment=request.environment | port,
                    socket_variable=RENDEZVOUS_FD_VARIABLE if is_first else "",
                )
                started[name] = fork_server.spawn(
                    started_request,
                    log_path=logs / f"{name}.log",
                    listener=listener if is_first else None,
                )
            undo.pop_all()
        return cls(started, logs)

    @property
    def pid(self) -> int:
        """Process id of the first rank, which sends the worker's heartbeats."""
        return next(iter(self._processes.values())).pid

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running processes, by worker id."""
        return {
            name: process.pid for name, process in self._processes.items() if process.poll() is None
        }

    @property
    def started_pids(self) -> set[int]:
        """Process ids of all processes, exited ones included."""
        return {process.pid for process in self._processes.values()}

    def poll(self) -> int | None:
        """Return the exit code once all have exited: that of the rank that caused it. When one rank
        fails, the others are ended.
        """
        codes = {name: process.poll() for name, process in self._processes.items()}
        living = [name for name, code in codes.items() if code is None]
        if not living:
            return self.exit().code
        if any(codes.values()):
            self._end(living)
        return None

    def _end(self, living: list[str]) -> None:
        now = time.monotonic()
        self._kill_at = self._kill_at or now + OTHERS_SECONDS
        if now < self._kill_at:
            return
        for name in living:
            log.warning(
                "worker.killed",
                worker_id=name,
                reason=f"another rank failed, and this one did not end within {OTHERS_SECONDS:g} s",
            )
            self._killed.add(name)
            self._processes[name].kill_group()

    def exit(self) -> WorkerExit:
        """Return the worker's exit, once all processes have exited. A rank that only lost a peer is
        not the cause, nor is a rank that was killed for it.
        """
        if self._ending is None:
            self._ending = min(
                (self._build_exit(name, process) for name, process in self._processes.items()),
                key=self._blame,
            )
        return self._ending

    def _build_exit(self, name: str, process: ForkedWorker) -> WorkerExit:
        path, code = self._logs / f"{name}.log", process.wait(0)
        if code <= 0:
            return WorkerExit(name, code, path, None, memory=self._kills.explain())
        return WorkerExit(name, code, path, read_final_error(path, pid=process.pid))

    def _blame(self, ending: WorkerExit) -> tuple[bool, bool, bool, int]:
        """Sort the cause first: a rank that failed by itself, the earliest of them. A signal leaves
        no time and sorts before the others.
        """
        error = ending.error
        is_follower = error is not None and error.error_class == RankLost.__name__
        return (
            ending.code == 0,
            ending.worker_id in self._killed,
            is_follower,
            error.failed_at if error is not None else 0,
        )

    def wait(self, timeout: float) -> int:
        """Wait until all have exited, and return the exit code; see `poll`.

        Raises:
            subprocess.TimeoutExpired: One still runs.
        """
        deadline = time.monotonic() + timeout
        for process in self._processes.values():
            process.wait(max(0.0, deadline - time.monotonic()))
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(next(iter(self._processes)), timeout)
        return code

    def terminate(self) -> None:
        """Signal the processes to drain."""
        for process in self._processes.values():
            process.terminate()

    def kill_group(self) -> None:
        """Kill the processes and all their children."""
        for process in self._processes.values():
            process.kill_group()


BACKEND_ROLES = frozenset({"reference", "actor-forward", "critic", "teacher", "trainer"})
"""Roles that load the trainer's backend."""
TORCH_ROLES = frozenset({"trainer", "critic"})
"""Roles whose own modules import torch."""
COMMAND = "relax_events.cli.run"
ACCELERATORS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Device files of GPU drivers. Where one exists, `auto` means a GPU."""


def worker_modules(config: RunConfig, role: str) -> list[str]:
    """List the modules that a role's worker on this machine imports at its start."""
    is_on_cpu = computes_on_cpu(config)
    names = [(ROLES, role)] if is_on_cpu or role not in TORCH_ROLES else []
    if is_on_cpu:
        engines = {
            "rollout": config.rollout_engine,
            "evaluator": config.engine.name,
            "judge": config.judge.engine.name,
        }
        names += [
            (ENGINES, engines.get(role, "")),
            (TRAINER_BACKENDS, config.trainer.backend if role in BACKEND_ROLES else ""),
        ]
    return [
        COMMAND,
        *(
            list_installed(group)[name].module
            for group, name in names
            if name in list_installed(group)
        ),
    ]


def computes_on_cpu(config: RunConfig) -> bool:
    """Return whether torch may be imported before a fork. A process that has initialised a GPU, as
    some imports do, can't be forked.
    """
    cpu_devices = {"cpu"} if any(path.exists() for path in ACCELERATORS) else {"cpu", "auto"}
    teachers = {one.device for one in config.list_teachers().values()}
    return {config.model.device, config.judge.device, *teachers} <= cpu_devices


def run_modules(config: RunConfig) -> list[str]:
    """List the modules of all roles of a run, each once."""
    return list(
        dict.fromkeys(name for role in config.roles() for name in worker_modules(config, role))
    )
