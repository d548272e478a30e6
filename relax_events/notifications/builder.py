"""Build the notifications of a run from its control log.

Reading the log again gives the same notifications in the same order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from relax_events.events.parts import Command
from relax_events.events.types import Event, RunCommanded, RunDescribed, TrainStepCommitted
from relax_events.projections.health import Intervention, RecoveryLevel

MAX_NOTIFICATIONS, WINDOW_MICROS = 10, 600 * 1_000_000


@dataclass(frozen=True, slots=True)
class Notification:
    """A message about a run.

    Attributes:
        key: The same whenever the log is read: no target gets a notification twice.
        kind: As Apprise has them.
        title: With the run's id.
        body: What happened, and why.
        at: When, in microseconds since the epoch.
    """

    key: str
    kind: Literal["info", "success", "warning", "failure"]
    title: str
    body: str
    at: int


class NotificationBuilder:
    """Feed it every control event, in log order. At most ten notices in ten minutes are given out;
    the end of the run always is.
    """

    def __init__(self, run_id: str, *, first_version: int = 0) -> None:
        self._run_id, self._first_version = run_id, first_version
        self._is_begun = False
        self._num_steps = self._num_held = 0
        self._restored_at = 0
        self._seen: set[str] = set()
        self._given: deque[int] = deque(maxlen=MAX_NOTIFICATIONS)

    def apply(self, event: Event) -> Notification | None:
        """Take in an event, and give the notice that is due."""
        notice = self._build(event)
        if notice is None or notice.key in self._seen:
            return None
        self._seen.add(notice.key)
        is_end = notice.key.startswith("ended/")
        if (
            not is_end
            and len(self._given) == MAX_NOTIFICATIONS
            and notice.at - self._given[0] < WINDOW_MICROS
        ):
            self._num_held += 1
            return None
        self._given.append(notice.at)
        held, self._num_held = self._num_held, 0
        return (
            replace(
                notice,
                body=f"{notice.body}\n({held} notices before this one were held back; see the log)",
            )
            if held
            else notice
        )

    def _build(self, event: Event) -> Notification | None:
        if isinstance(event, TrainStepCommitted):
            return self._build_for_step(event)
        if isinstance(event, RunCommanded):
            return self._build_for_command(event)
        if isinstance(event, RunDescribed) and not self._is_begun:
            self._is_begun = True
            return self._create(
                "begun",
                "info",
                "began",
                "Its controller is there, and its workers start.",
                at=event.described_at,
            )
        return None

    def _build_for_step(self, event: TrainStepCommitted) -> Notification | None:
        self._num_steps = event.policy_version - self._first_version
        if event.update_skipped:
            body = (
                f"Train step {event.train_step}: loss or gradient is not finite, and its update "
                "was skipped."
            )
            return self._create(
                f"skipped/{event.train_step}",
                "failure",
                "has a step that is not finite",
                body,
                at=event.committed_at,
            )
        restored, self._restored_at = self._restored_at, 0
        if not restored or event.committed_at <= restored:
            self._restored_at = restored
            return None
        body = f"Train step {event.train_step} is committed, the first one since the restore."
        return self._create(
            f"recovered/{restored}", "success", "has recovered", body, at=event.committed_at
        )

    def _build_for_command(self, event: RunCommanded) -> Notification | None:
        at, act = event.commanded_at, Intervention.from_command(event)
        if (
            act is not None and act.level is RecoveryLevel.PIPELINE_RESTART
        ):  # one command for each worker, and one notice
            self._restored_at = at
            return self._create(
                f"restored/{at}",
                "failure",
                "is restored",
                f"All its workers restart. {event.reason}",
                at=at,
            )
        if act is not None:
            return self._create(
                f"restarted/{act.worker_id}/{at}",
                "warning",
                f"has {act.worker_id} restarted",
                f"It {event.reason}.",
                at=at,
            )
        if event.role is None and event.command is Command.STOP:
            outcome = "has reached its goal" if event.succeeded else "ended before its goal"
            body = f"{event.reason}; {self._num_steps} train steps."
            return self._create(
                f"ended/{at}", "success" if event.succeeded else "failure", outcome, body, at=at
            )
        if event.role is None and event.command is Command.RESUME:
            return self._create(f"resumed/{at}", "info", "resumes", event.reason, at=at)
        return None

    def _create(
        self,
        key: str,
        kind: Literal["info", "success", "warning", "failure"],
        outcome: str,
        body: str,
        *,
        at: int,
    ) -> Notification:
        return Notification(key, kind, f"Run {self._run_id} {outcome}", body, at)
