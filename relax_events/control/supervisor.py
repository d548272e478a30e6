"""Starts a run's worker processes on this machine, starts again what dies, and ends them together."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import structlog

from relax_events.broker.credentials import credential_environment
from relax_events.config import RunConfig
from relax_events.control.scaling import Departure, ElasticWorker, Standing
from relax_events.control.starting.environment import shared_environment
from relax_events.control.starting.imports import modules_of
from relax_events.control.starting.order import Order
from relax_events.control.starting.starter import ForkedWorker, Starter
from relax_events.errors import BrokerRefused, ConfigError, Fenced, RunFailed, SchemaError
from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import WorkerBeat

log = structlog.get_logger()
RELAX, TORCHRUN = "relax_events.cli", "torch.distributed.run"
FATAL_CODES = {kind.exit_code: kind for kind in (ConfigError, SchemaError)}
GIVEN_UP = {BrokerRefused.exit_code: BrokerRefused}  # tried again at first: the brokers may be taking up new rights
BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0)
RESTART_WINDOW_SECONDS = 60.0
AFTER_DRAIN_SECONDS = 1.0  # the command to stop may reach a worker before it reaches us
AFTER_GOODBYE_SECONDS = 5.0  # the same, for a worker that is not ours to wait for
LOG_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Fencing:
    """When a process of ours ended because another instance took over its work."""

    pid: int
    fenced_at: int

    def is_over(self, beat: WorkerBeat | None, *, now: int, hung_seconds: float) -> bool:
        """Tell whether nobody does the work any more: the other instance said goodbye, or was silent for too long.

        Args:
            beat: The newest beat in the worker's name. One of our own process says nothing: it may be younger than the other's.
            now: Microseconds since the epoch.
            hung_seconds: After how much silence a worker counts as hung.
        """
        other = beat if beat is not None and beat.pid != self.pid else None
        patience = AFTER_GOODBYE_SECONDS if other is not None and other.state is WorkerState.STOPPED else hung_seconds
        heard_at = max(self.fenced_at, other.beat_at if other is not None else 0)
        return now - heard_at > patience * 1e6


@dataclass(slots=True)
class ManagedProcess:
    """A worker process, or the place where the next one will be."""

    worker_id: str
    order: Order
    log_path: Path
    metrics_port: int = 0
    process: ForkedWorker | None = None
    start_after: float = 0.0
    starts: list[float] = field(default_factory=list)
    fenced: Fencing | None = None
    is_elastic: bool = False
    leave_by: float | None = None
    given_up: str = ""

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def leave(self, *, seconds: float) -> None:
        """Ask the process to drain, once, and kill it when that takes longer; at once with 0 seconds."""
        if self.leave_by is None:
            self.leave_by = time.monotonic() + seconds
            if self.process is not None and self.is_running and seconds:
                self.process.terminate()
        if self.process is not None and self.is_running and time.monotonic() >= self.leave_by:
            log.warning("worker.killed", worker_id=self.worker_id, reason=f"did not drain within {seconds:g} s")
            self.process.kill_group()

    def log_tail(self) -> str:
        """Return the end of the worker's log."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])


class Supervisor:
    """The processes of a run, each in a process group of its own, with a log file each.

    A worker that ends though the run goes on is started again, later each time; one that ends with a usage or
    configuration error is not, since it would end the same way. One that was fenced stays down until `revive`: another
    instance is at its work, and a new one would only fence that in turn.

    Elastic workers come and go by `adjust`. One that can't be kept going is given up, and the run goes on.
    """

    def __init__(self, config: RunConfig, config_path: Path, starter: Starter | None = None) -> None:
        """Nothing is started yet.

        Args:
            config: Of the run.
            config_path: Where it stands, for the workers.
            starter: By whom they are started; it is ended with them.
        """
        self._config, self._config_path = config, config_path
        self._logs = config.run_directory / "logs"
        self._environment = shared_environment()
        self._starter = starter or Starter.of(config)
        self._processes = {process.worker_id: process for process in self._planned()}
        self.num_restarts = 0
        self._num_places = len(self._processes) + config.trainer.ranks - 1

    def _planned(self) -> list[ManagedProcess]:
        workers = [(role, index) for role, count in self._config.roles().items() for index in range(count)]
        return [self._process(role, index, place=place) for place, (role, index) in enumerate(workers)]

    def _process(self, role: str, index: int, *, place: int, overrides: Sequence[str] = ()) -> ManagedProcess:
        worker_id, port = f"{role}-{index}", self._config.telemetry.port_of(place)
        module, arguments = RELAX, ["worker", role, str(self._config_path), *overrides, "--index", str(index)]
        if role == "trainer" and self._config.trainer.ranks > 1:
            arguments = ["--standalone", "--nproc-per-node", str(self._config.trainer.ranks), "-m", module, *arguments]
            module = TORCHRUN
        environment = self._environment | {"RELAX_TELEMETRY__METRICS_PORT": str(port), **credential_environment(self._config, role)}
        order = Order(module, arguments, environment, modules_of(self._config, role))
        return ManagedProcess(worker_id, order, self._logs / f"{worker_id}.log", port)

    def adjust(self, elastic: Iterable[ElasticWorker]) -> list[tuple[ElasticWorker, Departure, str]]:
        """Start the elastic workers that shall be there, have those go that shall, and return who is gone, how and why.

        Whoever is returned is forgotten: leave it out from then on.
        """
        gone = [(worker, *found) for worker in elastic if (found := self._adjusted(worker)) is not None]
        for worker, departure, reason in gone:
            self._processes.pop(worker.worker_id, None)
            log.info("worker.left", worker_id=worker.worker_id, departure=departure, reason=reason)
        return gone

    def _adjusted(self, worker: ElasticWorker) -> tuple[Departure, str] | None:
        """Bring one worker nearer to where it shall be; return how it went, and why, once it has."""
        managed = self._processes.get(worker.worker_id)
        if managed is not None and managed.given_up:
            return Departure.FAILED, managed.given_up
        if worker.standing is Standing.WANTED and managed is None:
            managed = self._processes[worker.worker_id] = self._elastic(worker)
            self._spawn(managed)
        if worker.standing is not Standing.LEAVING:
            return None
        if managed is None or managed.process is None:
            return Departure.ABSENT, "there was no process"
        longest = self._config.workers.drain_seconds + AFTER_DRAIN_SECONDS
        managed.leave(seconds=longest if worker.drain_micros is None else worker.drain_micros / 1e6)
        code = managed.process.poll()
        if code is None:
            return None
        return (Departure.DRAINED, "it drained") if code == 0 else (Departure.KILLED, f"it ended with exit code {code}")

    def _elastic(self, worker: ElasticWorker) -> ManagedProcess:
        """Return the place of an elastic worker; its port is the first free one behind those of the start."""
        taken = {managed.metrics_port for managed in self._processes.values()} - {0}
        place = next(place for place in count(self._num_places) if self._config.telemetry.port_of(place) not in taken)
        overrides = ["engine.name=sglang", f'engine.sglang.urls=["{worker.url}"]'] if worker.url else []
        managed = self._process(worker.role, int(worker.worker_id.rpartition("-")[2]), place=place, overrides=overrides)
        managed.is_elastic = True
        return managed

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker."""
        return {name: managed.process.pid for name, managed in self._processes.items() if managed.is_running and managed.process}

    def start(self) -> None:
        """Start every worker."""
        for managed in self._processes.values():
            self._spawn(managed)

    def _spawn(self, managed: ManagedProcess) -> None:
        managed.starts = [*managed.starts[-50:], time.monotonic()]
        managed.process = self._starter.start(managed.order, log_path=managed.log_path)
        log.info("worker.spawned", worker_id=managed.worker_id, pid=managed.process.pid)

    def tend(self) -> None:
        """Look after the processes once.

        Raises:
            ConfigError, SchemaError: A worker ended with an error that a restart won't mend; the text ends with its log.
            RunFailed: A worker ended too often; likewise.
        """
        now = time.monotonic()
        for managed in self._processes.values():
            if managed.leave_by is not None or managed.given_up:
                continue
            if managed.process is None:
                if managed.fenced is None and now >= managed.start_after:
                    self._spawn(managed)
            elif (code := managed.process.poll()) == Fenced.exit_code:
                log.warning("worker.fenced", worker_id=managed.worker_id, pid=managed.process.pid)
                managed.fenced, managed.process = Fencing(managed.process.pid, now_micros()), None
            elif code is not None:
                self._note_end(managed, code)

    def _note_end(self, managed: ManagedProcess, code: int) -> None:
        recent = [start for start in managed.starts if time.monotonic() - start < RESTART_WINDOW_SECONDS]
        if code in FATAL_CODES or len(recent) > self._config.workers.max_restarts:
            kind = {**FATAL_CODES, **GIVEN_UP}.get(code, RunFailed)
            text = f"{managed.worker_id} ended with exit code {code}; the end of {managed.log_path}:\n{managed.log_tail()}"
            if not managed.is_elastic:
                raise kind(text)
            managed.given_up = text
            return
        delay = BACKOFF_SECONDS[min(max(len(recent) - 1, 0), len(BACKOFF_SECONDS) - 1)]  # one that lived for long starts at once
        if code == 0:
            delay = max(delay, AFTER_DRAIN_SECONDS)
        else:
            self.num_restarts += 1
        log.warning("worker.ended" if code == 0 else "worker.died", worker_id=managed.worker_id, code=code, restart_in_seconds=delay)
        managed.process, managed.start_after = None, time.monotonic() + delay

    @property
    def fenced(self) -> dict[str, Fencing]:
        """Workers whose work another instance took over."""
        return {name: managed.fenced for name, managed in self._processes.items() if managed.fenced is not None}

    def revive(self, worker_id: str) -> None:
        """Let `tend` start a fenced worker again."""
        self._processes[worker_id].fenced = None

    def kill(self, worker_id: str) -> None:
        """Kill a hung worker; `tend` starts it again. Its leases and partitions are free at once."""
        managed = self._processes.get(worker_id)
        if managed is not None and managed.process is not None and managed.is_running:
            log.warning("worker.killed", worker_id=worker_id)
            managed.process.kill_group()

    def stop(self, *, timeout_seconds: float, tick: Callable[[], None] = lambda: None) -> None:
        """Ask all to drain, wait, and kill what is left at the deadline."""
        for managed in self._processes.values():
            if managed.process is not None and managed.is_running:
                managed.process.terminate()
        deadline = time.monotonic() + timeout_seconds
        for managed in self._processes.values():
            while managed.process is not None and managed.is_running and time.monotonic() < deadline:
                try:
                    managed.process.wait(0.2)
                except subprocess.TimeoutExpired:
                    tick()
        for managed in self._processes.values():
            if managed.process is not None and managed.is_running:
                log.warning("worker.killed", worker_id=managed.worker_id, reason=f"did not drain within {timeout_seconds:g} s")
                managed.process.kill_group()
                managed.process.wait(10)
        self._starter.close()
