"""Starts a run's worker processes on this machine, restarts processes that die, and ends them
together.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, count
from pathlib import Path

import structlog

from relax_events.config import RunConfig
from relax_events.config.run_config import RANKED_ROLES
from relax_events.errors import (
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    Fenced,
    RankLost,
    RunFailed,
    SchemaError,
    StoreUnavailable,
)
from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import WorkerHeartbeat
from relax_events.kafka.workarounds.altered_batches import VARIABLE as SINGLE_BATCHES
from relax_events.launcher.device_assignment import DeviceAssignment
from relax_events.launcher.fork_client import ForkServer
from relax_events.launcher.fork_protocol import SpawnRequest, shared_environment
from relax_events.launcher.managed_process import (
    BACKOFF_SECONDS,
    Fencing,
    ManagedProcess,
    Progress,
    read_log_tail,
)
from relax_events.launcher.worker_processes import (
    PortTaken,
    WorkerExit,
    WorkerProcesses,
    build_rank_requests,
    worker_modules,
)
from relax_events.objects.credentials import build_worker_store_environment
from relax_events.projections.scaling import ElasticWorker, ExitReason
from relax_events.runtime.control_view import RESTART_CODE
from relax_events.runtime.hosting import SEPARATOR
from relax_events.session.principals import build_worker_credentials

log = structlog.get_logger()
RELAX = "relax_events.cli"
FATAL_CODES = {kind.exit_code: kind for kind in (ConfigError, SchemaError)}
ABANDON_ERRORS = {
    BrokerRefused.exit_code: BrokerRefused
}  # retried at first: new ACLs may still propagate to the brokers
UNAVAILABLE = frozenset({BrokerUnavailable.__name__, StoreUnavailable.__name__})
"""Errors of unavailable services: the worker is restarted for as long as the outage takes."""
RANKS_REMEDY = (
    " (ranks of several hosts must reach each other: see hosts.rendezvous_port and the ports "
    "behind firewalls, and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on a host with several "
    "interfaces)"
)
UNAVAILABLE_BACKOFF_SECONDS = BACKOFF_SECONDS[1]
PORT_SECONDS = 10.0  # for a worker to notice that its supervisor is gone
AFTER_DRAIN_SECONDS = 1.0  # the stop command may reach a worker before this process
CODES_WITH_GOODBYE = frozenset({0, Fenced.exit_code})
"""Exit codes of workers whose last heartbeat is STOPPED."""
KILLED, MAX_NOTE = "was killed by the health manager", 400
"""Maximum characters of an error on the console; the log has all of it."""


class Supervisor:
    """The worker processes of a run, each in a process group of its own, with a log file each.

    A worker that exits while the run continues is restarted, with a growing delay. A worker that
    exits with a usage or configuration error is not restarted: it would fail the same way. A worker
    that dies `workers.max_restarts` + 1 times in a row without progress ends the run with its
    error. A fenced worker stays down until `restart_fenced`: another instance does its work, and a
    restart would only fence that one.

    `reconcile` adds and removes elastic workers. An elastic worker that keeps failing is abandoned,
    and the run continues.
    """

    def __init__(
        self,
        config: RunConfig,
        config_path: Path,
        fork_server: ForkServer | None = None,
        *,
        host: int = 0,
    ) -> None:
        """Start nothing yet.

        Args:
            config: Of the run.
            config_path: The resolved run file, for the workers.
            fork_server: Spawns the workers; it is closed with them.
            host: This machine, among those of `hosts.addresses`; its workers alone are started.
        """
        self._config, self._config_path = config, config_path
        self._logs = config.run_directory / "logs"
        self._environment = shared_environment()
        self._devices = DeviceAssignment.of_machine(config, host=host)
        self._fork_server = fork_server or ForkServer.from_config(config)
        self._processes = {process.worker_id: process for process in self._build_initial()}
        self._num_ports = sum(config.processes().values())
        self._first_death, self._num_steps, self._started_at_step = "", 0, 0

    def _build_initial(self) -> list[ManagedProcess]:
        pairs = dict(self._config.hosted_pairs())
        workers = [
            (role, index)
            for role, count in self._config.roles().items()
            if role not in pairs.values()
            for index in self._list_starts(role, count)
        ]
        starts = accumulate(
            (self._num_ranks(role) + (role in pairs) for role, _ in workers), initial=0
        )
        return [
            self._build_process(role, index, port_index=port_index, hosted=pairs.get(role, ""))
            for port_index, (role, index) in zip(starts, workers, strict=False)
        ]

    def _list_starts(self, role: str, count: int) -> list[int]:
        """Return the indices of a role's workers on this host; the first rank's of a worker with
        ranks.
        """
        if role in RANKED_ROLES:
            return self._list_ranks(role)[:1]
        return self._devices.list_indices(role, count)

    def _list_ranks(self, role: str) -> list[int]:
        return self._devices.list_indices(role, self._config.processes()[role])

    def _num_ranks(self, role: str) -> int:
        """Return the processes of a worker of a role on this host."""
        return len(self._list_ranks(role)) if role in RANKED_ROLES else 1

    def _build_process(
        self,
        role: str,
        index: int,
        *,
        port_index: int,
        overrides: Sequence[str] = (),
        hosted: str = "",
    ) -> ManagedProcess:
        roles = [role, hosted] if hosted else [role]
        worker_id, port = f"{role}-{index}", self._config.telemetry.worker_port(port_index)
        environment = self._environment | {
            "RELAX_TELEMETRY__METRICS_PORT": str(port),
            **build_worker_credentials(self._config, role),
            **build_worker_store_environment(role),
            **self._devices.variables(role, index),
        }
        order = SpawnRequest(
            RELAX,
            [
                "worker",
                SEPARATOR.join(roles),
                str(self._config_path),
                *self._devices.overrides(role, index),
                *overrides,
            ],
            environment,
            list(dict.fromkeys(chain(*(worker_modules(self._config, one) for one in roles)))),
        )
        named = {
            f"{role}-{at}": replace(one, arguments=[*one.arguments, "--index", str(at)])
            for at, one in self._build_requests(role, index, order).items()
        }
        other = f"{hosted}-{index}" if hosted else ""
        return ManagedProcess(worker_id, role, named, self._logs, port, hosted=other)

    def _build_requests(
        self, role: str, index: int, order: SpawnRequest
    ) -> dict[int, SpawnRequest]:
        """Return the spawn request of a worker by its index, or of each of its ranks here."""
        size = self._config.processes().get(role, 1) if role in RANKED_ROLES else 1
        if size == 1:
            return {index: order}
        addresses = self._config.hosts.addresses
        rendezvous = None
        if addresses:
            first = self._devices.find_host(f"{role}-0")
            port = self._config.hosts.rendezvous_port + RANKED_ROLES.index(role)
            rendezvous = addresses[first], port
        return build_rank_requests(
            order, num_ranks=size, ranks=self._list_ranks(role), rendezvous=rendezvous
        )

    def reconcile(
        self, elastic: Iterable[ElasticWorker]
    ) -> list[tuple[ElasticWorker, ExitReason, str]]:
        """Start and end elastic workers according to their desired state, and return the workers
        that have exited, with how and why.

        A returned worker is forgotten: omit it from further calls.
        """
        gone = [
            (worker, *exit_and_reason)
            for worker in elastic
            if (exit_and_reason := self._reconcile_worker(worker)) is not None
        ]
        for worker, departure, reason in gone:
            self._processes.pop(worker.worker_id, None)
            self._devices.release(worker.worker_id)
            log.info("worker.left", worker_id=worker.worker_id, departure=departure, reason=reason)
        return gone

    def _reconcile_worker(self, worker: ElasticWorker) -> tuple[ExitReason, str] | None:
        """Move one worker towards its desired state; return how and why it exited, once it has."""
        managed = self._processes.get(worker.worker_id)
        if managed is not None and managed.abandoned_reason:
            return ExitReason.FAILED, managed.abandoned_reason
        if not worker.is_leaving:
            if managed is None:
                managed = self._processes[worker.worker_id] = self._build_elastic(worker)
                self._spawn(managed)
            return None
        if managed is None or managed.process is None:
            return ExitReason.ABSENT, "there was no process"
        longest = self._config.workers.drain_seconds + AFTER_DRAIN_SECONDS
        managed.drain_then_kill(
            seconds=longest if worker.drain_micros is None else worker.drain_micros / 1e6
        )
        code = managed.process.poll()
        if code is None:
            return None
        return (
            (ExitReason.DRAINED, "it drained")
            if code == 0
            else (ExitReason.KILLED, f"it ended with exit code {code}")
        )

    def _build_elastic(self, worker: ElasticWorker) -> ManagedProcess:
        """Return the managed process of an elastic worker; its metrics port is the first free one
        after the ports of the initial workers.
        """
        ports = {managed.metrics_port for managed in self._processes.values()} - {0}
        port_index = next(
            port_index
            for port_index in count(self._num_ports)
            if self._config.telemetry.worker_port(port_index) not in ports
        )
        overrides = (
            ["engine.name=sglang", f'engine.sglang.urls=["{worker.url}"]'] if worker.url else []
        )
        managed = self._build_process(
            worker.role,
            int(worker.worker_id.rpartition("-")[2]),
            port_index=port_index,
            overrides=overrides,
        )
        managed.is_elastic = True
        return managed

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running processes by worker id, including a trainer's
        ranks.
        """
        return {
            name: pid for managed in self._processes.values() for name, pid in managed.pids.items()
        }

    def start(self, *, num_steps: int = 0) -> None:
        """Start every worker.

        Args:
            num_steps: Committed train steps when the session began.
        """
        self._started_at_step = num_steps
        for managed in self._processes.values():
            self._spawn(managed)

    def _spawn(self, managed: ManagedProcess) -> None:
        managed.is_killed = False
        try:
            managed.process = WorkerProcesses.start(
                self._fork_server, managed.requests, logs=managed.logs
            )
        except PortTaken as error:
            self._wait_for_port(managed, error)
            return
        managed.port_deadline = None
        managed.pids_without_goodbye |= managed.process.started_pids
        log.info("worker.spawned", worker_id=managed.worker_id, pid=managed.process.pid)

    def _wait_for_port(self, managed: ManagedProcess, error: PortTaken) -> None:
        """Start a worker later whose port an earlier process of it holds, which drains.

        Raises:
            PortTaken: It is held for longer than that takes.
        """
        now = time.monotonic()
        if managed.port_deadline is None:
            seconds = self._config.workers.drain_seconds + PORT_SECONDS
            managed.port_deadline = now + seconds
        elif now >= managed.port_deadline:
            raise error
        managed.start_after = now + AFTER_DRAIN_SECONDS
        log.warning("worker.waits_for_port", worker_id=managed.worker_id, reason=str(error))

    def poll(self, progress: Progress) -> list[str]:
        """Check the processes once, and restart the processes that are due.

        Args:
            progress: The run's progress by now.
        Returns:
            A line for each worker that died: its name, its error and its log.
        Raises:
            ConfigError, SchemaError: A worker exited with an error that a restart won't fix; the
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
        """Count a death, and schedule a restart or abandon the worker; return a line for the
        console.
        """
        ending = process.exit()
        is_lost = self._is_lost(ending)
        is_unavailable = (ending.error is not None and ending.error.error_class in UNAVAILABLE) or (
            is_lost and progress.num_steps > self._started_at_step
        )
        is_commanded = managed.is_killed or (ending.code == RESTART_CODE and not is_unavailable)
        counts = (
            not is_commanded and not is_unavailable
        )  # the health manager counts its own restarts, and an outage is no fault of the worker
        if counts:
            managed.deaths = managed.deaths.count_death(
                progress,
                worker_id=managed.worker_id,
                role=managed.role,
                pid=process.pid,
                cause=ending.text,
            )
            if not self._first_death or progress.num_steps > self._num_steps:
                self._first_death = f"{ending.worker_id}: {ending.text}"
                self._num_steps = progress.num_steps
        is_too_often = counts and managed.deaths.exceeds(
            self._config.workers.max_restarts + is_lost, is_elastic=managed.is_elastic
        )  # one more for a rank that others have lost: theirs is the error to end with
        if ending.has_client_abort:
            self._fetch_single_batches()
        if ending.code in FATAL_CODES or is_too_often:
            return self._abandon(managed, ending)
        delay = (
            0.0
            if is_commanded
            else UNAVAILABLE_BACKOFF_SECONDS
            if is_unavailable
            else managed.deaths.backoff_seconds
        )
        log.warning(
            "worker.died",
            worker_id=ending.worker_id,
            code=ending.code,
            error=ending.text,
            restart_in_seconds=delay,
        )
        managed.process, managed.start_after = None, time.monotonic() + delay
        what = KILLED if is_commanded else f"died: {ending.text[:MAX_NOTE]}"
        return f"{ending.worker_id} {what}; it is restarted; log: {ending.log_path}"

    def _is_lost(self, ending: WorkerExit) -> bool:
        """Return whether a rank ended because it could not reach those of other hosts. Once a step
        was committed in this session, that is an outage and no fault of the worker.
        """
        return (
            self._config.hosts.num_hosts > 1
            and ending.error is not None
            and ending.error.error_class == RankLost.__name__
        )

    def _fetch_single_batches(self) -> None:
        """Fetch single record batches in this process and in all workers that start from now on:
        Kafka's client would abort again, and name no batch.
        """
        os.environ[SINGLE_BATCHES] = self._environment[SINGLE_BATCHES] = "1"
        for managed in self._processes.values():
            managed.requests = {
                name: replace(order, environment=order.environment | {SINGLE_BATCHES: "1"})
                for name, order in managed.requests.items()
            }

    def _abandon(self, managed: ManagedProcess, ending: WorkerExit) -> str:
        """Abandon an elastic worker, or end the run with the error of another one."""
        if ending.code in FATAL_CODES:
            what = "can't continue"
        elif managed.is_elastic:
            what = f"died {managed.deaths.num_idle} times in a row without a finished record"
        else:
            what = f"died {managed.deaths.num_stalled} times in a row without a committed step"
        causes = managed.deaths.describe_causes(ending.text, is_elastic=managed.is_elastic)
        first = self._first_death
        if first and not any(first.startswith(f"{name}: ") for name in managed.requests):
            causes += f" (the first death since the last committed step: {first})"
        remedy = RANKS_REMEDY if self._is_lost(ending) else ""
        text = f"{ending.worker_id} {what}: {causes}{remedy}; log: {ending.log_path}"
        if ending.error is None:
            text += f", which ends in:\n{read_log_tail(ending.log_path)}"
        log.error(
            "worker.abandoned", worker_id=ending.worker_id, code=ending.code, error=ending.text
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
        """Let `poll` restart a fenced worker."""
        self._processes[worker_id].fenced = None

    def kill(self, worker_id: str) -> None:
        """Kill a hung worker with all its ranks; `poll` restarts it. Its leases and partitions are
        free at once.
        """
        managed = next(
            (managed for managed in self._processes.values() if managed.holds(worker_id)), None
        )
        if managed is not None and managed.process is not None and managed.is_running:
            log.warning("worker.killed", worker_id=worker_id)
            managed.is_killed = True
            managed.process.kill_group()

    def lacks_final_heartbeat(self, heartbeat: WorkerHeartbeat) -> bool:
        """Return whether a worker's newest heartbeat is of a process of this supervisor that exited
        without sending STOPPED.

        False where another instance uses the worker's name, or has fenced it.
        """
        managed = next(
            (managed for managed in self._processes.values() if managed.holds(heartbeat.worker_id)),
            None,
        )
        if (
            managed is None
            or managed.is_running
            or heartbeat.state is WorkerState.STOPPED
            or heartbeat.host != socket.gethostname()
        ):
            return False
        ended_in_order = (
            managed.process is not None and managed.process.poll() in CODES_WITH_GOODBYE
        )
        return not ended_in_order and heartbeat.pid in managed.pids_without_goodbye

    def stop(self, *, timeout_seconds: float, tick: Callable[[], None] = lambda: None) -> None:
        """Signal all workers to drain, wait, and kill the rest at the deadline."""
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
