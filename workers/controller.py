"""The controller: watches the control log, ends the run at its goal or when it can't be reached, and has hung workers restarted.

Its state is the control log; a controller that is killed starts again and knows all that it knew.
"""

from __future__ import annotations

import queue
import time

import structlog

from relax_events.broker.backlog import queue_backlog
from relax_events.config import RunConfig
from relax_events.control.run_metrics import RunMetrics
from relax_events.control.run_state import FOLLOWED, RunState, is_silent
from relax_events.control.topics.purger import Purger
from relax_events.control.topics.retention import RetentionKeeper
from relax_events.errors import BrokerError
from relax_events.events.parts import Command, now_micros
from relax_events.events.types import Event, RunCommanded
from relax_events.pipeline.control import ControlFollower
from relax_events.pipeline.description import describe, is_told
from relax_events.pipeline.failpoints import failpoint
from relax_events.pipeline.source_run import SourceRun
from relax_events.pipeline.worker import Worker
from workers.opening import open_store, open_worker

log = structlog.get_logger()
IDLE_SECONDS = 0.5
QUEUE_SECONDS, QUEUE_RETRY_SECONDS = 5.0, 60.0  # brokers before 4.2 don't know the question, and log that


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until the run has ended."""
    with open_worker("controller", config, index=index, follow=FOLLOWED, linger_ms=0) as worker:
        ControllerLoop(worker).run()


class ControllerLoop:
    """Waits for control events, or for half a second to look for workers that fell silent."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._config = worker, worker.config
        self._state = RunState()
        self._metrics = RunMetrics(self._config, self._state)
        worker.metrics.registry.register(self._metrics)
        self._look_at_queue_after = 0.0
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._restarted: dict[str, int] = {}
        self._purger = Purger(self._config, worker.connection, open_store(self._config), worker.codec)
        self._retention = RetentionKeeper(self._purger, self._config)
        self._all_trained_at = 0.0
        self._leader: RunState | None = None
        self._leader_follower: ControlFollower | None = None

    def run(self) -> None:
        """Watch until the drain starts."""
        worker = self._worker
        worker.drain.on_start(lambda: self._inbox.put(None))
        self._describe()
        if self._config.is_replay and self._config.source.follow:
            self._follow_leader()
        worker.follow(self._inbox.put)
        while not worker.drain.requested:
            self._take()
            self._judge()
            self._look_for_hung()
            self._look_at_queue()
            for entity, count in self._retention.tend().items():
                worker.metrics.purged(entity, count)
            worker.tick(working=False)
        self._purger.close()
        if self._leader_follower is not None:
            self._leader_follower.close()

    def _describe(self) -> None:
        """Tell the log what this run is, unless it knows."""
        described = describe(self._config)
        if not is_told(described, self._worker.control.history):
            self._worker.producer.write([self._worker.outbound("control.commands", described)])

    def _follow_leader(self) -> None:
        """Watch the run whose steps our trainer follows: when it has ended, so shall we, once all is trained."""
        source = SourceRun.read(self._worker.connection, self._config.source.run)
        self._leader = RunState()
        self._leader_follower = ControlFollower(self._worker.connection, source.plan, source.codec())
        self._leader_follower.start(self._leader.note)

    def _take(self) -> None:
        try:
            event = self._inbox.get(timeout=IDLE_SECONDS)
            while True:
                if event is not None:
                    self._state.note(event)
                    self._retention.note(event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _judge(self) -> None:
        """End the run when it has reached its goal, or when nothing but failures come."""
        run, state, num_steps = self._config.run, self._state, self._config.num_train_steps
        if state.ended is not None:
            return
        if state.num_steps >= num_steps and self._is_evaluated():
            self._command(Command.STOP, reason=f"all {num_steps} train steps are committed", succeeded=True)
        elif self._leader is not None and self._leader.ended is not None and state.policy_version >= self._leader.policy_version:
            done = f"all {state.num_steps} train steps of run {self._config.source.run} are trained"
            self._command(Command.STOP, reason=f"{done}; it had ended: {self._leader.ended.reason}", succeeded=True)
        elif state.failed_in_a_row >= run.max_failed_groups:
            failed = f"{state.failed_in_a_row} prompt groups failed in a row (run.max_failed_groups)"
            self._command(Command.STOP, reason=f"{failed}; the last one: {state.last_failure}")

    def _is_evaluated(self) -> bool:
        """Tell whether the last version was evaluated on everything, or has had its time."""
        evaluation, version = self._config.evaluation, self._config.last_version
        missing = [dataset.name for dataset in evaluation.datasets if (version, dataset.name) not in self._state.evaluations]
        if not missing:
            return True
        self._all_trained_at = self._all_trained_at or time.monotonic()
        if time.monotonic() - self._all_trained_at < evaluation.final_seconds:
            return False
        log.warning("evaluation.overdue", policy_version=version, missing=missing, seconds=evaluation.final_seconds)
        return True

    def _look_for_hung(self) -> None:
        """Have a worker restarted that breathes no more: its work loop owes a beat every `workers.beat_seconds`."""
        limit = now_micros() - int(self._config.workers.hung_seconds * 1e6)
        if self._worker.beats.started_at > limit:
            return  # old beats may be of an earlier session; everyone gets the time to beat again
        for worker_id, beat in self._state.workers.items():
            if is_silent(beat, seconds=self._config.workers.hung_seconds) and self._restarted.get(worker_id) != beat.beat_at:
                self._restarted[worker_id] = beat.beat_at
                self._command(Command.RESTART, role=beat.role, worker_id=worker_id, reason=f"no beat for {self._config.workers.hung_seconds:g} s")

    def _look_at_queue(self) -> None:
        """Ask from time to time how many prompt groups wait; where the broker does not tell, nothing is told."""
        if self._config.broker.lease != "share_group" or self._config.is_replay or time.monotonic() < self._look_at_queue_after:
            return
        self._look_at_queue_after = time.monotonic() + QUEUE_SECONDS
        try:
            self._metrics.num_queued = queue_backlog(self._worker.connection, self._worker.plan.consumer_group("rollout"))
        except BrokerError as error:
            log.info("queue.unknown", error=str(error))
            self._metrics.num_queued = None
            self._look_at_queue_after = time.monotonic() + QUEUE_RETRY_SECONDS

    def _command(self, command: Command, *, reason: str, role: str | None = None, worker_id: str | None = None, succeeded: bool = False) -> None:
        event = RunCommanded(command=command, role=role, worker_id=worker_id, reason=reason, succeeded=succeeded)
        failpoint("controller.before_command")
        self._worker.producer.write([self._worker.outbound("control.commands", event)])
        failpoint("controller.after_command")
        if command is Command.STOP:
            self._state.ended = event
        log.info("run.commanded", command=command, addressed_to=worker_id or role or "all", reason=reason, succeeded=succeeded)
