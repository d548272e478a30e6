"""Starts a run's worker processes on this machine, starts again what dies, and ends them
together.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import structlog

from relax_events.config import RunConfig
from relax_events.errors import (
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    Fenced,
    RunFailed,
    SchemaError,
    StoreUnavailable,
)
from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import WorkerBeat
from relax_events.kafka.batch_verification import VARIABLE as EXAMINE
from relax_events.kafka.credentials import build_worker_credentials
from relax_events.launcher.deaths import BACKOFF_SECONDS, DeathCount, Progress
from relax_events.launcher.fork_client import ForkServer
from relax_events.launcher.fork_protocol import SpawnRequest, shared_environment
from relax_events.launcher.worker_imports import worker_modules
from relax_events.launcher.worker_processes import WorkerExit, WorkerProcesses, build_rank_requests
from relax_events.projections.scaling import DesiredState, ElasticWorker, ExitReason
from relax_events.runtime.worker import RESTART_CODE

log = structlog.get_logger()
RELAX = "relax_events.cli"
FATAL_CODES = {kind.exit_code: kind for kind in (ConfigError, SchemaError)}
ABANDON_ERRORS = {
    BrokerRefused.exit_code: BrokerRefused
}  # tried again at first: the brokers may be taking up new rights
UNAVAILABLE = frozenset({BrokerUnavailable.__name__, StoreUnavailable.__name__})
"""Errors of what a worker needs and can't have for now: it is started again for as long as that
takes."""
UNAVAILABLE_BACKOFF_SECONDS = BACKOFF_SECONDS[1]
AFTER_DRAIN_SECONDS = 1.0  # the command to stop may reach a worker before it reaches us
AFTER_GOODBYE_SECONDS = 5.0  # the same, for a worker that is not ours to wait for
CODES_WITH_GOODBYE = frozenset({0, Fenced.exit_code})
"""Exit codes of workers whose last heartbeat says that they have stopped."""
LOG_TAIL_LINES = 12
MAX_NOTE = 400
"""Characters of an error in a line on the console; the log has it whole."""


@dataclass(frozen=True, slots=True)
class Fencing:
    """When a process of ours ended because another instance took over its work."""

    pid: int
    fenced_at: int

    def is_over(self, beat: WorkerBeat | None, *, now: int, heartbeat_timeout_seconds: float) -> bool:
        """Tell whether nobody does the work any more: the other instance said goodbye, or was
        silent for too long.

        Args:
            beat: The newest beat in the worker's name. One of our own process says nothing: it may
                be younger than the other's.
            now: Microseconds since the epoch.
            heartbeat_timeout_seconds: After how much silence a worker counts as hung.
        """
        other = beat if beat is not None and beat.pid != self.pid else None
        patience = (
            AFTER_GOODBYE_SECONDS
            if other is not None and other.state is WorkerState.STOPPED
            else heartbeat_timeout_seconds
        )
        heard_at = max(self.fenced_at, other.beat_at if other is not None else 0)
        return now - heard_at > patience * 1e6


@dataclass(slots=True)
class ManagedProcess:
    """A worker, whether its process is there or is to be started. A trainer of several ranks is one
    worker with an order for each rank.
    """

    worker_id: str
    role: str
    requests: dict[str, SpawnRequest]
    logs: Path
    metrics_port: int = 0
    process: WorkerProcesses | None = None
    start_after: float = 0.0
    deaths: DeathCount = field(default_factory=DeathCount)
    is_killed: bool = False
    fenced: Fencing | None = None
    is_elastic: bool = False
    drain_deadline: float | None = None
    abandoned_reason: str = ""
    pids_without_goodbye: set[int] = field(default_factory=set)
    """Pids of the processes since the last one that said goodbye."""

    @property
    def log_path(self) -> Path:
        """Where the worker writes to; the further ranks of a trainer have logs of their own beside
        it.
        """
        return self.logs / f"{self.worker_id}.log"

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def drain_then_kill(self, *, seconds: float) -> None:
        """Ask the process to drain, once, and kill it when that takes longer; at once with 0
        seconds.
        """
        if self.drain_deadline is None:
            self.drain_deadline = time.monotonic() + seconds
            if self.process is not None and self.is_running and seconds:
                self.process.terminate()
        if self.process is not None and self.is_running and time.monotonic() >= self.drain_deadline:
            log.warning(
                "worker.killed",
                worker_id=self.worker_id,
                reason=f"did not drain within {seconds:g} s",
            )
            self.process.kill_group()


def read_log_tail(path: Path) -> str:
    """Return the end of a worker's log."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])


class Supervisor:
    """The processes of a run, each in a process group of its own, with a log file each.

    A worker that ends though the run goes on is started again, later each time; one that ends with
    a usage or configuration error is not, since it would end the same way. One that dies
    `workers.max_restarts` + 1 times in a row without progress ends the run with its error. One that
    was fenced stays down until `revive`: another instance is at its work, and a new one would only
    fence that in turn.

    Elastic workers come and go by `adjust`. One that can't be kept going is given up, and the run
    goes on.
    """

    def __init__(
        self, config: RunConfig, config_path: Path, starter: ForkServer | None = None
    ) -> None:
        """Nothing is started yet.

        Args:
            config: Of the run.
            config_path: Where it stands, for the workers.
            starter: By whom they are started; it is ended with them.
        """
        self._config, self._config_path = config, config_path
        self._logs = config.run_directory / "logs"
        self._environment = shared_environment()
        self._fork_server = starter or ForkServer.from_config(config)
        self._processes = {process.worker_id: process for process in self._build_initial()}
        self._num_places = len(self._processes) + config.trainer.ranks - 1

    def _build_initial(self) -> list[ManagedProcess]:
        workers = [
            (role, index) for role, count in self._config.roles().items() for index in range(count)
        ]
        return [
            self._build_process(role, index, place=place) for place, (role, index) in enumerate(workers)
        ]

    def _build_process(
        self, role: str, index: int, *, place: int, overrides: Sequence[str] = ()
    ) -> ManagedProcess:
        worker_id, port = f"{role}-{index}", self._config.telemetry.port_of(place)
        environment = self._environment | {
            "RELAX_TELEMETRY__METRICS_PORT": str(port),
            **build_worker_credentials(self._config, role),
        }
        order = SpawnRequest(
            RELAX,
            ["worker", role, str(self._config_path), *overrides],
            environment,
            worker_modules(self._config, role),
        )
        ranks = build_rank_requests(
            order, num_ranks=self._config.trainer.ranks if role == "trainer" else 1
        )
        named = {
            f"{role}-{at}": replace(rank, arguments=[*rank.arguments, "--index", str(at)])
            for at, rank in enumerate(ranks, start=index)
        }
        return ManagedProcess(worker_id, role, named, self._logs, port)

    def reconcile(
        self, elastic: Iterable[ElasticWorker]
    ) -> list[tuple[ElasticWorker, ExitReason, str]]:
        """Start the elastic workers that shall be there, have those go that shall, and return who
        is gone, how and why.

        Whoever is returned is forgotten: leave it out from then on.
        """
        gone = [
            (worker, *found) for worker in elastic if (found := self._reconcile_worker(worker)) is not None
        ]
        for worker, departure, reason in gone:
            self._processes.pop(worker.worker_id, None)
            log.info("worker.left", worker_id=worker.worker_id, departure=departure, reason=reason)
        return gone

    def _reconcile_worker(self, worker: ElasticWorker) -> tuple[ExitReason, str] | None:
        """Bring one worker nearer to where it shall be; return how it went, and why, once it
        has.
        """
        managed = self._processes.get(worker.worker_id)
        if managed is not None and managed.abandoned_reason:
            return ExitReason.FAILED, managed.abandoned_reason
        if worker.desired_state is DesiredState.RUNNING and managed is None:
            managed = self._processes[worker.worker_id] = self._build_elastic(worker)
            self._spawn(managed)
        if worker.desired_state is not DesiredState.LEAVING:
            return None
        if managed is None or managed.process is None:
            return ExitReason.ABSENT, "there was no process"
        longest = self._config.workers.drain_seconds + AFTER_DRAIN_SECONDS
        managed.drain_then_kill(seconds=longest if worker.drain_micros is None else worker.drain_micros / 1e6)
        code = managed.process.poll()
        if code is None:
            return None
        return (
            (ExitReason.DRAINED, "it drained")
            if code == 0
            else (ExitReason.KILLED, f"it ended with exit code {code}")
        )

    def _build_elastic(self, worker: ElasticWorker) -> ManagedProcess:
        """Return the place of an elastic worker; its port is the first free one behind those of the
        start.
        """
        taken = {managed.metrics_port for managed in self._processes.values()} - {0}
        place = next(
            place
            for place in count(self._num_places)
            if self._config.telemetry.port_of(place) not in taken
        )
        overrides = (
            ["engine.name=sglang", f'engine.sglang.urls=["{worker.url}"]'] if worker.url else []
        )
        managed = self._build_process(
            worker.role, int(worker.worker_id.rpartition("-")[2]), place=place, overrides=overrides
        )
        managed.is_elastic = True
        return managed

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of those that live, by worker; those of a trainer's ranks as well."""
        return {
            name: pid
            for managed in self._processes.values()
            if managed.process
            for name, pid in managed.process.pids.items()
        }

    def start(self) -> None:
        """Start every worker."""
        for managed in self._processes.values():
            self._spawn(managed)

    def _spawn(self, managed: ManagedProcess) -> None:
        managed.is_killed = False
        managed.process = WorkerProcesses.start(self._fork_server, managed.requests, logs=managed.logs)
        managed.pids_without_goodbye |= managed.process.started_pids
        log.info("worker.spawned", worker_id=managed.worker_id, pid=managed.process.pid)

    def poll(self, progress: Progress) -> list[str]:
        """Look after the processes once.

        Args:
            progress: What the run has achieved by now.
        Returns:
            A line for each worker that died: who, of what, and where its log is.
        Raises:
            ConfigError, SchemaError: A worker ended with an error that a restart won't mend; the
                text names it and the log.
            RunFailed, BrokerRefused: A worker died too often without progress; likewise.
        """
        now = time.monotonic()
        notes: list[str] = []
        for managed in self._processes.values():
            if managed.drain_deadline is not None or managed.abandoned_reason:
                continue
            if managed.process is None:
                if managed.fenced is None and now >= managed.start_after:
                    self._spawn(managed)
            elif (code := managed.process.poll()) == Fenced.exit_code:
                log.warning("worker.fenced", worker_id=managed.worker_id, pid=managed.process.pid)
                managed.fenced, managed.process = Fencing(managed.process.pid, now_micros()), None
                managed.pids_without_goodbye.clear()
            elif code == 0:
                log.info("worker.ended", worker_id=managed.worker_id)
                managed.process, managed.start_after = None, now + AFTER_DRAIN_SECONDS
                managed.pids_without_goodbye.clear()
            elif code is not None:
                notes.append(self._handle_death(managed, managed.process, progress))
        return notes

    def _handle_death(
        self, managed: ManagedProcess, process: WorkerProcesses, progress: Progress
    ) -> str:
        """Count a death, and have the worker started again or give it up; return what a person
        shall read of it.
        """
        ending = process.exit()
        is_away = ending.error is not None and ending.error.error_class in UNAVAILABLE
        is_asked = managed.is_killed or (ending.code == RESTART_CODE and not is_away)
        counts = (
            not is_asked and not is_away
        )  # the health manager counts what it asks for, and no worker is to blame for what is away
        if counts:
            managed.deaths = managed.deaths.count_death(
                progress, worker_id=managed.worker_id, role=managed.role, pid=process.pid
            )
        is_too_often = counts and managed.deaths.exceeds(
            self._config.workers.max_restarts, is_elastic=managed.is_elastic
        )
        if ending.has_client_abort:
            self._enable_batch_verification()
        if ending.code in FATAL_CODES or is_too_often:
            return self._abandon(managed, ending)
        delay = 0.0 if is_asked else UNAVAILABLE_BACKOFF_SECONDS if is_away else managed.deaths.backoff_seconds
        log.warning(
            "worker.died",
            worker_id=ending.worker_id,
            code=ending.code,
            error=ending.text,
            restart_in_seconds=delay,
        )
        managed.process, managed.start_after = None, time.monotonic() + delay
        what = "was ended by the health manager" if is_asked else f"died: {ending.text[:MAX_NOTE]}"
        return f"{ending.worker_id} {what}; it is started again; log: {ending.log_path}"

    def _enable_batch_verification(self) -> None:
        """Have this process, and all that are started from now on, check record batches themselves:
        Kafka's client would abort again.
        """
        os.environ[EXAMINE] = "1"
        self._environment[EXAMINE] = "1"
        for managed in self._processes.values():
            managed.requests = {
                name: replace(order, environment=order.environment | {EXAMINE: "1"})
                for name, order in managed.requests.items()
            }

    def _abandon(self, managed: ManagedProcess, ending: WorkerExit) -> str:
        """Give an elastic worker up, or end the run with the error of another one."""
        if ending.code in FATAL_CODES:
            what = "can't go on"
        elif managed.is_elastic:
            what = f"died {managed.deaths.num_idle} times in a row without a finished record"
        else:
            what = f"died {managed.deaths.num_stalled} times in a row without a committed step"
        text = f"{ending.worker_id} {what}: {ending.text}; log: {ending.log_path}"
        if ending.error is None:
            text += f", which ends in:\n{read_log_tail(ending.log_path)}"
        log.error(
            "worker.given_up", worker_id=ending.worker_id, code=ending.code, error=ending.text
        )
        if not managed.is_elastic:
            raise {**FATAL_CODES, **ABANDON_ERRORS}.get(ending.code, RunFailed)(text)
        managed.abandoned_reason = text
        return text

    @property
    def fenced(self) -> dict[str, Fencing]:
        """Workers whose work another instance took over."""
        return {
            name: managed.fenced
            for name, managed in self._processes.items()
            if managed.fenced is not None
        }

    def restart_fenced(self, worker_id: str) -> None:
        """Let `tend` start a fenced worker again."""
        self._processes[worker_id].fenced = None

    def kill(self, worker_id: str) -> None:
        """Kill a hung worker, with all its ranks if it is one of several; `tend` starts it again.
        Its leases and partitions are free at once.
        """
        managed = next(
            (managed for managed in self._processes.values() if worker_id in managed.requests), None
        )
        if managed is not None and managed.process is not None and managed.is_running:
            log.warning("worker.killed", worker_id=worker_id)
            managed.is_killed = True
            managed.process.kill_group()

    def lacks_final_heartbeat(self, beat: WorkerBeat) -> bool:
        """Tell whether a worker's newest heartbeat is of a process of ours that ended without
        saying goodbye.

        Not where another instance speaks in its name, or has fenced it.
        """
        managed = next(
            (managed for managed in self._processes.values() if beat.worker_id in managed.requests),
            None,
        )
        if (
            managed is None
            or managed.is_running
            or beat.state is WorkerState.STOPPED
            or beat.host != socket.gethostname()
        ):
            return False
        ended_in_order = managed.process is not None and managed.process.poll() in CODES_WITH_GOODBYE
        return not ended_in_order and beat.pid in managed.pids_without_goodbye

    def stop(self, *, timeout_seconds: float, tick: Callable[[], None] = lambda: None) -> None:
        """Ask all to drain, wait, and kill what is left at the deadline."""
        for managed in self._processes.values():
            if managed.process is not None and managed.is_running:
                managed.process.terminate()
        deadline = time.monotonic() + timeout_seconds
        for managed in self._processes.values():
            while (
                managed.process is not None and managed.is_running and time.monotonic() < deadline
            ):
                try:
                    managed.process.wait(0.2)
                except subprocess.TimeoutExpired:
                    tick()
        for managed in self._processes.values():
            if managed.process is not None and managed.is_running:
                log.warning(
                    "worker.killed",
                    worker_id=managed.worker_id,
                    reason=f"did not drain within {timeout_seconds:g} s",
                )
                managed.process.kill_group()
                managed.process.wait(10)
        self._fork_server.close()
