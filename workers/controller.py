"""The controller: watches the control log, ends the run at its goal or when it can't be reached, and has hung workers restarted.

Its state is the control log; a controller that is killed starts again and knows all that it knew.
"""

from __future__ import annotations

import queue

import structlog

from relax_events.config import RunConfig
from relax_events.control.run_state import FOLLOWED, RunState
from relax_events.events.types import Command, Event, RunCommanded, WorkerState, now_micros
from relax_events.pipeline.worker import Worker
from workers.opening import open_worker

log = structlog.get_logger()
IDLE_SECONDS = 0.5


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until the run has ended."""
    with open_worker("controller", config, index=index, follow=FOLLOWED, linger_ms=0) as worker:
        ControllerLoop(worker).run()


class ControllerLoop:
    """Waits for control events, or for half a second to look for workers that fell silent."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._config = worker, worker.config
        self._state = RunState()
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._restarted: dict[str, int] = {}

    def run(self) -> None:
        """Watch until the drain starts."""
        worker = self._worker
        worker.drain.on_start(lambda: self._inbox.put(None))
        worker.follow(self._inbox.put)
        while not worker.drain.requested:
            self._take()
            self._judge()
            self._look_for_hung()
            worker.tick(working=False)

    def _take(self) -> None:
        try:
            event = self._inbox.get(timeout=IDLE_SECONDS)
            while True:
                if event is not None:
                    self._state.note(event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _judge(self) -> None:
        """End the run when it has reached its goal, or when nothing but failures come."""
        run, state = self._config.run, self._state
        if state.ended is not None:
            return
        if state.num_steps >= run.num_steps:
            self._command(Command.STOP, reason=f"all {run.num_steps} train steps are committed", succeeded=True)
        elif state.failed_in_a_row >= run.max_failed_groups:
            failed = f"{state.failed_in_a_row} prompt groups failed in a row (run.max_failed_groups)"
            self._command(Command.STOP, reason=f"{failed}; the last one: {state.last_failure}")

    def _look_for_hung(self) -> None:
        """Have a worker restarted that breathes no more: its work loop owes a beat every `workers.beat_seconds`."""
        limit = now_micros() - int(self._config.workers.hung_seconds * 1e6)
        if self._worker.beats.started_at > limit:
            return  # old beats may be of an earlier session; everyone gets the time to beat again
        for worker_id, beat in self._state.workers.items():
            hung = beat.beat_at < limit and beat.state not in (WorkerState.STOPPED, WorkerState.STARTING)
            if hung and self._restarted.get(worker_id) != beat.beat_at:
                self._restarted[worker_id] = beat.beat_at
                self._command(Command.RESTART, role=beat.role, worker_id=worker_id, reason=f"no beat for {self._config.workers.hung_seconds:g} s")

    def _command(self, command: Command, *, reason: str, role: str | None = None, worker_id: str | None = None, succeeded: bool = False) -> None:
        event = RunCommanded(command=command, role=role, worker_id=worker_id, reason=reason, succeeded=succeeded)
        self._worker.producer.write([self._worker.outbound("control.commands", event)])
        if command is Command.STOP:
            self._state.ended = event
        log.info("run.commanded", command=command, addressed_to=worker_id or role or "all", reason=reason, succeeded=succeeded)
