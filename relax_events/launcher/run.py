"""One session of `relax run`: everything that a run needs, from the broker to the report; and its
part on another host.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import structlog

from relax_events.config import RunConfig
from relax_events.controller.scaling_bounds import require_rollout_capacity
from relax_events.errors import BrokerError, ConfigError, RelaxError, RunFailed
from relax_events.events.parts import Command, WorkerState, now_micros
from relax_events.events.types import Event, RunCommanded
from relax_events.history.runs.replay import resolve_parent
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.leases import read_share_group_size
from relax_events.kafka.schema_registry import open_codec
from relax_events.launcher.broker_checks import require_fitting_model
from relax_events.launcher.broker_keeper import BrokerKeeper
from relax_events.launcher.closing_report import ClosingReport
from relax_events.launcher.fork_client import ForkServer, StartInterrupted
from relax_events.launcher.managed_process import Progress
from relax_events.launcher.other_hosts import JOINED, SILENCE_SECONDS, OtherHosts
from relax_events.launcher.preparation import fetch_named
from relax_events.launcher.session_events import SessionEvents
from relax_events.launcher.supervisor import Supervisor
from relax_events.launcher.worker_processes import run_modules
from relax_events.ops.consumer_lag import read_slot_lag
from relax_events.ops.schemas import publish_schemas
from relax_events.ops.security import admin_connection, apply_security
from relax_events.ops.topic_apply import apply_topics
from relax_events.planning.derived import LEAST_DRAIN_SECONDS
from relax_events.plugins import PAGES, load_installed
from relax_events.projections.base import ProjectionGroup
from relax_events.projections.run_state import RUN_STATE_TOPICS, RunState
from relax_events.projections.scaling import ScaleState
from relax_events.reports.terminal import ProgressDisplay
from relax_events.runtime.control_follower import GATHER, ControlFollower
from relax_events.runtime.drain import Drain
from relax_events.secret_handling import write_private
from relax_events.session.broker_address import (
    OPERATOR,
    embedded_broker,
    open_admin,
    with_broker_address,
)
from relax_events.session.defaults import (
    RESOLVED_FILE,
    keep_commits,
    log_derived,
    resolve_defaults,
)
from relax_events.session.gpus import find_gpus
from relax_events.session.principals import apply_principal, remove_credentials
from relax_events.session.records import RunSessions, find_active
from relax_events.session.resume import (
    find_changes,
    find_template_changes,
    format_changes,
    known_settings,
    read_last_session,
    refuse_changes,
    refuse_new_topics,
)
from relax_events.telemetry.logs import configure_logs
from relax_events.topics import TopicPlan

log = structlog.get_logger()
TURN_SECONDS, AFTER_DRAIN_SECONDS = 0.5, 5.0
LAG_EVERY_SECONDS = 2.0
LAG_TIMEOUT_SECONDS = (
    2.0  # we also tend the broker: asking a dead broker must not keep us from starting it again
)


class RunSession:
    """One `relax run` from start to report. A run whose topics exist already is resumed."""

    def __init__(self, config: RunConfig, *, accepts_changes: bool = False) -> None:
        """Prepare a session; nothing is started yet.

        Args:
            config: The run file.
            accepts_changes: Resume a run also where its run file has changed in a way that changes
                what is trained.
        """
        self._config, self._accepts_changes = config, accepts_changes
        self._broker = embedded_broker(config)
        self._keeper: BrokerKeeper | None = None
        self._state, self._scaling = RunState(), ScaleState()
        self._lock = threading.Lock()
        self._projections = ProjectionGroup(self._state, self._scaling, lock=self._lock)
        self._drain = Drain(seconds=config.workers.drain_seconds or LEAST_DRAIN_SECONDS)
        self._workers_to_kill: list[str] = []
        self._lag: dict[str, dict[int, int]] = {}
        self._lag_read_at = 0.0
        self._started_at = now_micros()
        self._codec = open_codec(config.broker)

    def run(self) -> dict[str, Any] | None:
        """Run to the end and return the report; None where the goal was reached, and the broker did
        not answer the check of the log.

        Raises:
            RunFailed: The goal was not reached; the text names the reason.
            Interrupted: Likewise, by a signal.
            ConfigError: The run file has changed in a way that the run can't continue with, or that
                was not accepted.
            CheckFailed: The ledger found a broken promise.
        """
        started = time.monotonic()
        logs = self._config.run_directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        configure_logs(
            self._config.telemetry, path=logs / "run.log", role="run", run_id=self._config.run.id
        )
        self._drain.listen_to_signals()
        with ExitStack() as stack:
            self._sessions = stack.enter_context(RunSessions(self._config.run_directory))
            display = stack.enter_context(ProgressDisplay(self._config))
            threading.Thread(
                target=self._report_interrupt, args=(display,), name="interrupt", daemon=True
            ).start()
            starter = ForkServer.from_config(self._config)
            stack.callback(starter.close)
            self._drain.on_start(starter.interrupt)
            starter.prepare(run_modules(self._config))  # while the broker starts
            self._start_broker(stack, display)
            self._config = resolve_parent(self._config)
            self._resolve_settings(display)
            operator = open_admin(self._config, name="run")
            require_rollout_capacity(self._config, read_share_group_size(operator))
            apply_topics(self._config, operator)
            if self._config.broker.credentials or self._config.broker.username:
                publish_schemas(self._config, operator)  # which the roles' own users may not
            lag_connection = Connection.from_config(
                self._config.broker, client_id=f"{self._config.run.id}.lag"
            )
            admin = Admin(replace(lag_connection, request_timeout_seconds=LAG_TIMEOUT_SECONDS))
            stack.callback(admin.close)
            resolved = self._write_resolved()
            offer_pages(self._config, resolved, display, stack=stack)
            supervisor = Supervisor(self._config, resolved, starter)
            follower = self._follow(stack)
            self._codec.frame()
            require_fitting_model(self._config, follower.latest)
            self._events = stack.enter_context(
                closing(SessionEvents.open(self._config, self._codec))
            )
            self._resume(display)
            report = ClosingReport(
                self._config,
                self._sessions,
                self._drain,
                display,
                tend_broker=partial(self._try_to_tend_broker, display),
            )
            try:
                self._run_workers(supervisor, admin, display)
            except RelaxError as error:
                report.abort(error, time.monotonic() - started)
                raise
            follower.close()
            return report.finish(self._state.ended, time.monotonic() - started)

    def _run_workers(self, supervisor: Supervisor, admin: Admin, display: ProgressDisplay) -> None:
        """Run the workers of all hosts until the run ends, and stop them."""
        num_steps = self._progress().num_steps
        hosts = OtherHosts(self._config, display.print_line, num_steps=num_steps)
        try:
            if self._state.ended is None and not self._drain.requested:
                self._warn_of_other_sessions(display)
                with suppress(StartInterrupted):
                    supervisor.start(num_steps=num_steps)
                    self._watch(supervisor, hosts, admin, display)
        finally:
            hosts.drain()
            seconds = self._config.workers.drain_seconds + 2 * AFTER_DRAIN_SECONDS
            deadline = time.monotonic() + seconds
            self._stop(supervisor, tick=lambda: self._tend_drain(supervisor, admin, display))
            hosts.wait(deadline - time.monotonic())

    def _stop(self, supervisor: Supervisor, tick: Callable[[], None] = lambda: None) -> None:
        supervisor.stop(
            timeout_seconds=self._config.workers.drain_seconds + AFTER_DRAIN_SECONDS, tick=tick
        )
        self._send_goodbyes(supervisor)

    def _start_broker(self, stack: ExitStack, display: ProgressDisplay) -> None:
        """Start the embedded broker; create the run's users and ACLs on a secured one."""
        if self._broker is None:
            self._config = apply_principal(self._config, OPERATOR)
            return
        is_new = stack.enter_context(self._broker.in_use("relax run"))
        self._keeper = BrokerKeeper(self._broker)
        state = self._broker.state
        if state is not None and not state.runs_until_stopped:
            directory = shlex.quote(str(self._broker.directory))
            self._drain.exit_note = (
                "the last worker to drain stops the broker, else the next relax command; or: relax "
                f"broker stop --directory {directory}"
            )
        self._config = with_broker_address(self._config, self._broker)
        display.print_line(
            f"broker {'started' if is_new else 'found'} at {self._broker.bootstrap_servers}"
        )
        if self._config.broker.credentials is not None:
            apply_security(self._config, admin_connection(self._config))
            self._config = apply_principal(self._config, OPERATOR)

    def _resolve_settings(self, display: ProgressDisplay) -> None:
        """Fill in the keys that the run file leaves out, and refuse changes since the last session
        that were not accepted.
        """
        described = read_last_session(self._config)
        refuse_new_topics(self._config, described)
        earlier_config = known_settings(self._config, described)
        self._config = keep_commits(self._config, earlier_config)
        fetch_named(self._config, report=display.print_line)
        self._config, derived = resolve_defaults(
            self._config, earlier_config=earlier_config, has_broker=self._broker is not None
        )
        log_derived(derived)
        changes = []
        if described is not None:
            changes += find_changes(described, self._config)
            changes += find_template_changes(described, self._config)
        refuse_changes(self._config.run.id, changes, is_accepted=self._accepts_changes)
        if changes:
            display.print_line(
                f"changed in the run file since the last session:\n{format_changes(changes)}"
            )
        for one in derived:
            if one.is_warning:
                display.print_line(f"{one.key} = {one.value}, derived: {one.reason}")

    def _report_interrupt(self, display: ProgressDisplay) -> None:
        """Report the interrupt at once: draining lasts up to `workers.drain_seconds`."""
        self._drain.wait(threading.TIMEOUT_MAX)
        display.print_line("draining; press Ctrl-C again to stop at once")

    def _warn_of_other_sessions(self, display: ProgressDisplay) -> None:
        """Report other sessions of the run, which are harmless: their prompter and trainer are
        fenced.
        """
        for session in self._sessions.others:
            display.print_line(
                f"another relax run works on this run already (pid {session.pid} on "
                f"{session.host}); both share the work, and only the prompter and the trainer of "
                "this one issue and train"
            )

    def _write_resolved(self) -> Path:
        """Write the resolved run file, which the workers are started with."""
        path = self._config.run_directory / RESOLVED_FILE
        write_private(
            path,
            orjson.dumps(
                remove_credentials(self._config).model_dump(mode="json"),
                option=orjson.OPT_INDENT_2,
            ),
        )
        return path

    def _follow(self, stack: ExitStack) -> ControlFollower:
        connection = Connection.from_config(
            self._config.broker, client_id=f"{self._config.run.id}.progress"
        )
        follower = ControlFollower(
            connection,
            TopicPlan.from_config(self._config),
            self._codec,
            also=RUN_STATE_TOPICS,
            wait=GATHER,
        )
        stack.callback(follower.close)
        follower.start(self._apply)
        self._follower = follower
        return follower

    def _resume(self, display: ProgressDisplay) -> None:
        """Resume a run that an earlier session ended, unless it has reached its goal."""
        with self._lock:
            ended, num_steps = self._state.ended, self._state.num_steps
        if ended is None or num_steps >= self._config.num_train_steps:
            return
        display.print_line(f"resumed at step {num_steps}; it had ended: {ended.reason}")
        resume = RunCommanded(
            command=Command.RESUME,
            reason=f"relax run, towards {self._config.num_train_steps} steps",
        )
        self._events.write_command(resume)
        self._events.send_change("relax run", {"command": resume.command.value}, resume.reason)
        self._projections.apply(resume)

    def _apply(self, event: Event) -> None:
        self._projections.apply(event)
        if (
            isinstance(event, RunCommanded)
            and event.command is Command.RESTART
            and event.worker_id
            and event.commanded_at > self._started_at
        ):
            self._workers_to_kill.append(event.worker_id)

    def _watch(
        self, supervisor: Supervisor, hosts: OtherHosts, admin: Admin, display: ProgressDisplay
    ) -> None:
        """Supervise broker, workers and other hosts until the controller ends the run, or this
        process is stopped.
        """
        is_reported = not self._config.evaluation.datasets
        while self._state.ended is None and not self._drain.wait(TURN_SECONDS):
            self._tend_broker(display)
            self._reconcile(supervisor)
            self._tend_workers(supervisor, display)
            hosts.tend()
            if not is_reported and self._state.num_steps >= self._config.num_train_steps:
                is_reported = True
                display.print_line(
                    "all steps are trained; waiting for the evaluation of version "
                    f"{self._config.last_version}"
                )
            self._show(admin, display, supervisor)

    def _tend_workers(self, supervisor: Supervisor, display: ProgressDisplay) -> None:
        """Kill, restart and poll this host's workers once."""
        self._follower.check()
        while self._workers_to_kill:
            supervisor.kill(self._workers_to_kill.pop())
        self._restart_fenced(supervisor)
        self._poll_workers(supervisor, display)

    def _poll_workers(self, supervisor: Supervisor, display: ProgressDisplay) -> None:
        """Poll the workers. A worker that keeps failing ends the run, and the log records it,
        unless another session works on the run.
        """
        try:
            for text in supervisor.poll(self._progress()):
                display.print_line(text)
        except RelaxError as error:
            if not self._sessions.others:
                self._events.write_abort(str(error))
            raise

    def _progress(self) -> Progress:
        with self._lock:
            return Progress(self._state.num_steps, dict(self._state.workers))

    def _reconcile(self, supervisor: Supervisor) -> None:
        """Start and end elastic workers according to the log, and record exits on it; send STOPPED
        for a worker that could not.
        """
        with self._lock:
            elastic = list(self._scaling.workers.values())
        for worker, departure, reason in supervisor.reconcile(elastic):
            gone = worker.exit_command(departure, reason)
            with self._lock:
                heartbeat = self._state.workers.get(worker.worker_id)
                self._scaling.apply(gone)
            if heartbeat is not None and heartbeat.state is not WorkerState.STOPPED:
                self._events.send_goodbye(heartbeat)
            self._events.send_command(gone)

    def _send_goodbyes(self, supervisor: Supervisor) -> None:
        """Send STOPPED for own workers that exited without it, so that none counts as alive; not
        while another session uses their names.
        """
        with self._lock:
            owed = [
                heartbeat
                for heartbeat in self._state.workers.values()
                if supervisor.lacks_final_heartbeat(heartbeat)
            ]
        if owed and self._sessions.is_alone():
            self._events.send_goodbyes(owed)

    def _restart_fenced(self, supervisor: Supervisor) -> None:
        """Restart a fenced worker once no other instance does its work."""
        for worker_id, fencing in supervisor.fenced.items():
            with self._lock:
                heartbeat = self._state.workers.get(worker_id)
            if fencing.is_over(
                heartbeat,
                now=now_micros(),
                heartbeat_timeout_seconds=self._config.workers.heartbeat_timeout_seconds,
            ):
                supervisor.restart_fenced(worker_id)

    def _tend_broker(self, display: ProgressDisplay) -> None:
        """Restart the embedded broker when it has died; see `BrokerKeeper.tend`."""
        if self._keeper is not None and (line := self._keeper.tend(time.monotonic())) is not None:
            display.print_line(line)

    def _try_to_tend_broker(self, display: ProgressDisplay) -> None:
        """Likewise while the run ends: what it still does there ends with its own error."""
        try:
            self._tend_broker(display)
        except RelaxError as error:
            log.warning("broker.not_restarted", error=str(error))

    def _tend_drain(self, supervisor: Supervisor, admin: Admin, display: ProgressDisplay) -> None:
        self._try_to_tend_broker(display)
        self._show(admin, display, supervisor)

    def _show(self, admin: Admin, display: ProgressDisplay, supervisor: Supervisor) -> None:
        if time.monotonic() - self._lag_read_at > LAG_EVERY_SECONDS:
            self._lag_read_at = time.monotonic()
            try:
                self._lag = read_slot_lag(self._config, admin)
            except BrokerError as error:
                log.debug("consumer_lag.read_failed", error=str(error))
        with self._lock:
            display.update(self._state, lag=self._lag, alive=dict.fromkeys(supervisor.pids, True))


class JoinedSession(RunSession):
    """The part of another host in a session: its share of the workers, and nothing else."""

    def __init__(self, config: RunConfig, *, host: int, num_gpus: int, num_steps: int) -> None:
        """Prepare it; nothing is started yet.

        Args:
            config: The resolved run, as the first host has it.
            host: This machine, among those of `hosts.addresses`.
            num_gpus: Of the first host.
            num_steps: Committed train steps when the first host's session began.
        """
        super().__init__(config)
        self._host, self._num_gpus, self._num_steps = host, num_gpus, num_steps

    def drain(self) -> None:
        """Let the workers drain, and `run` return."""
        self._drain.start()

    def run(self) -> None:
        """Supervise this host's workers until the run ends or is drained.

        Raises:
            ConfigError: Something that the run file names is not on this host.
            RunFailed: A worker keeps failing, an earlier supervisor of the run does not end, or
                this host has not as many GPUs as the first.
        """
        address = self._config.hosts.addresses[self._host]
        folder = self._config.run_directory / "hosts" / address
        folder.mkdir(parents=True, exist_ok=True)
        configure_logs(
            self._config.telemetry,
            path=folder / "run.log",
            role="run",
            run_id=self._config.run.id,
        )
        self._drain.listen_to_signals()
        with ExitStack() as stack:
            self._wait_for_earlier_supervisor(folder)
            self._require_as_many_gpus(address)
            self._sessions = stack.enter_context(RunSessions(folder))
            display = stack.enter_context(
                ProgressDisplay(self._config, tty=False, stream=sys.stdout)
            )
            fetch_named(self._config, report=display.print_line)
            if not self._config.model.path.exists():
                raise ConfigError(
                    f"host {address} has no folder {self._config.model.path} (model.path); copy it "
                    "there"
                )
            self._config = apply_principal(self._config, OPERATOR)
            resolved = self._write_resolved()
            starter = ForkServer.from_config(self._config, held=self._sessions.lock)
            stack.callback(starter.close)
            self._drain.on_start(starter.interrupt)
            supervisor = Supervisor(self._config, resolved, starter, host=self._host)
            self._follow(stack)
            self._codec.frame()
            self._events = stack.enter_context(
                closing(SessionEvents.open(self._config, self._codec))
            )
            try:
                with suppress(StartInterrupted):
                    if self._state.ended is None and not self._drain.requested:
                        supervisor.start(num_steps=self._num_steps)
                        print(JOINED, flush=True)
                    while self._state.ended is None and not self._drain.wait(TURN_SECONDS):
                        self._tend_workers(supervisor, display)
            finally:
                self._stop(supervisor)

    def _require_as_many_gpus(self, address: str) -> None:
        """Refuse another number than the first host's: each host places all workers, by the
        devices of all.
        """
        if (num_gpus := len(find_gpus())) != self._num_gpus:
            raise RunFailed(
                f"host {address} has {num_gpus} GPUs, and the first host {self._num_gpus}; see "
                "nvidia-smi and CUDA_VISIBLE_DEVICES there"
            )

    def _wait_for_earlier_supervisor(self, folder: Path) -> None:
        """Wait until a supervisor whose connection was lost has noticed it and drained, and the
        workers of one that was killed have.
        """
        seconds = SILENCE_SECONDS + self._config.workers.drain_seconds + 2 * AFTER_DRAIN_SECONDS
        deadline = time.monotonic() + seconds
        while (earlier := find_active(folder)) and not self._drain.wait(TURN_SECONDS):
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"an earlier supervisor of this host (pid {earlier.pid}), or a worker of it, "
                    f"has not ended within {seconds:g} s; end it"
                )


def offer_pages(
    config: RunConfig, run_file: Path, display: ProgressDisplay, *, stack: ExitStack
) -> None:
    """Offer the pages of a run that packages bring, unless they are turned off.

    Args:
        config: The run.
        run_file: Its resolved run file.
        display: Shows their addresses, or that there is none.
        stack: Ends them.
    """
    if not config.telemetry.dashboard:
        return
    pages = load_installed(PAGES)
    for offer in pages:
        stack.enter_context(offer(config, run_file=run_file, show=display.show_address))
    if not pages:
        display.print_line(
            "this run has no page: no installed package offers one; reinstall relax-events, which "
            "brings relax_events.packages.dashboard"
        )
