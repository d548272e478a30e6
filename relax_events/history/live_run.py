"""Follows a running run by its control log alone: for commands in another shell, or on another
machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import structlog

from relax_events.config import RunConfig
from relax_events.errors import BrokerError
from relax_events.events.parts import Command, WorkerState, now_micros
from relax_events.events.types import Event, RunCommanded, WorkerHeartbeat
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.schema_registry import open_codec
from relax_events.projections.base import STOPPED_BY
from relax_events.projections.run_state import MAX_KEPT, RUN_STATE_TOPICS, RunState
from relax_events.projections.run_status import RunStatus, decide_status, find_live_workers
from relax_events.runtime.control_follower import ControlFollower
from relax_events.session.change_audit import build_change
from relax_events.topics import TopicPlan
from relax_events.topics.names import AUDIT, COMMANDS

log = structlog.get_logger()


class RunFollower(AbstractContextManager["RunFollower"]):
    """Follows a run while it is entered. `state` is folded from the log; read it under `lock`."""

    def __init__(self, config: RunConfig, *, name: str) -> None:
        """Read nothing yet.

        Args:
            config: The run, with the broker's address and the principal filled in.
            name: Distinguishes clients in the broker's log.
        """
        self.config, self.state = config, RunState()
        self.connection = Connection.from_config(config.broker, client_id=f"{config.run.id}.{name}")
        self._codec = open_codec(config.broker)
        self.lock = threading.Condition()
        self._follower: ControlFollower | None = None

    def __enter__(self) -> Self:
        self._follower = ControlFollower(
            self.connection,
            TopicPlan.from_config(self.config),
            self._codec,
            also=RUN_STATE_TOPICS,
            num_versions=MAX_KEPT,
        )
        self._follower.start(self._apply)
        self._codec.frame()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._follower is not None:
            self._follower.close()

    def _apply(self, event: Event) -> None:
        with self.lock:
            self.state.apply(event)
            self.lock.notify_all()

    def wait_for(self, condition: Callable[[], bool], *, timeout_seconds: float) -> bool:
        """Wait until the log makes the condition true, and return whether it did in time; the
        condition is evaluated under the lock.
        """
        with self.lock:
            return self.lock.wait_for(condition, timeout_seconds)

    def send(self, command: RunCommanded) -> None:
        """Write a command, and wait until the broker has acknowledged it.

        Raises:
            BrokerError: The broker did not acknowledge it.
        """
        plan = TopicPlan.from_config(self.config)
        change = build_change(
            "relax runs stop", {"command": command.command.value}, answer=command.reason
        )
        with closing(RecordProducer(self.connection)) as producer:
            value = self._codec.encode(command)
            producer.write([ProducerRecord(plan.topic(COMMANDS), value)])
            try:
                producer.write([ProducerRecord(plan.topic(AUDIT), self._codec.encode(change))])
            except BrokerError as error:  # a run of an earlier release has no such topic
                log.warning("change.not_recorded", error=str(error))

    def alive(self) -> dict[str, WorkerHeartbeat]:
        """Return the newest heartbeat of each live worker; hold the lock."""
        return find_live_workers(self.state, self.config.workers, now=now_micros())

    @property
    def status(self) -> RunStatus:
        """The run's status now; hold the lock."""
        return decide_status(self.state, self.config.workers, now=now_micros())


@dataclass(frozen=True, slots=True)
class StopResult:
    """The result of stopping a run.

    Attributes:
        status: The run's status before: only a running one is stopped.
        drained: Workers that have drained and sent STOPPED.
        not_drained: Workers that had not by the deadline.
        seconds: How long it took.
    """

    run_id: str
    status: RunStatus
    num_steps: int
    drained: list[str]
    not_drained: list[str]
    seconds: float

    @property
    def text(self) -> str:
        """The result as text."""
        if self.status is RunStatus.ENDED:
            return f"run {self.run_id} has ended already, at step {self.num_steps}"
        if self.status is RunStatus.INTERRUPTED:
            return f"no worker of run {self.run_id} is alive; its last step is {self.num_steps}"
        done = (
            f"run {self.run_id} was stopped at step {self.num_steps}: {len(self.drained)} "
            f"workers drained within {self.seconds:.0f} s"
        )
        return f"{done}; {', '.join(self.not_drained)} did not" if self.not_drained else done


def stop_run(config: RunConfig, *, timeout_seconds: float) -> StopResult:
    """Command all workers of a run to drain, wherever they run, and wait for it; the same `relax
    run` resumes the run.

    Args:
        config: The run, with the broker's address and the principal filled in.
        timeout_seconds: How long to wait for the workers.
    Raises:
        BrokerError: The log can't be read or written.
    """
    started = time.monotonic()
    with RunFollower(config, name="stop") as watch:
        with watch.lock:
            status, alive = watch.status, set(watch.alive())
        if status is RunStatus.RUNNING:
            watch.send(
                RunCommanded(
                    command=Command.STOP,
                    reason="stopped by relax runs stop; the same relax run resumes it",
                    arguments={STOPPED_BY: "relax runs stop"},
                )
            )
            watch.wait_for(lambda: not _not_stopped(watch, alive), timeout_seconds=timeout_seconds)
        with watch.lock:
            left = _not_stopped(watch, alive) if status is RunStatus.RUNNING else set[str]()
            return StopResult(
                config.run.id,
                status,
                watch.state.num_steps,
                sorted(alive - left),
                sorted(left),
                time.monotonic() - started,
            )


def _not_stopped(watch: RunFollower, workers: set[str]) -> set[str]:
    return {name for name in workers if watch.state.workers[name].state is not WorkerState.STOPPED}
