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
        key: Identifies the notification, the same each time the log is read: no service gets a
            notification twice.
        kind: Apprise's notification type.
        title: One line, which includes the run's id.
        body: The event and its reason.
        at: Time of the event, in microseconds since the epoch.
    """

    key: str
    kind: Literal["info", "success", "warning", "failure"]
    title: str
    body: str
    at: int


class NotificationBuilder:
    """Builds notifications from the control events, which must be applied in log order.

    At most ten notifications per ten minutes are returned, but the run's end is always reported.
    """

    def __init__(self, run_id: str, *, first_version: int = 0) -> None:
        self._run_id, self._first_version = run_id, first_version
        self._has_begun = False
        self._num_steps = self._num_suppressed = 0
        self._restored_at = 0
        self._seen: set[str] = set()
        self._sent_at: deque[int] = deque(maxlen=MAX_NOTIFICATIONS)

    def apply(self, event: Event) -> Notification | None:
        """Apply an event, and return the notification that it causes, if any."""
        notification = self._build(event)
        if notification is None or notification.key in self._seen:
            return None
        self._seen.add(notification.key)
        is_end = notification.key.startswith("ended/")
        if (
            not is_end
            and len(self._sent_at) == MAX_NOTIFICATIONS
            and notification.at - self._sent_at[0] < WINDOW_MICROS
        ):
            self._num_suppressed += 1
            return None
        self._sent_at.append(notification.at)
        num_suppressed, self._num_suppressed = self._num_suppressed, 0
        if not num_suppressed:
            return notification
        return replace(
            notification,
            body=f"{notification.body}\n({num_suppressed} earlier notifications were not sent; see "
            "the log)",
        )

    def _build(self, event: Event) -> Notification | None:
        if isinstance(event, TrainStepCommitted):
            return self._build_for_step(event)
        if isinstance(event, RunCommanded):
            return self._build_for_command(event)
        if isinstance(event, RunDescribed) and not self._has_begun:
            self._has_begun = True
            return self._create(
                "begun",
                "info",
                "began",
                "Its controller is running, and its workers start.",
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
                "skipped a non-finite train step",
                body,
                at=event.committed_at,
            )
        restored_at, self._restored_at = self._restored_at, 0
        if not restored_at or event.committed_at <= restored_at:
            self._restored_at = restored_at
            return None
        body = f"Train step {event.train_step} is committed, the first one since the restore."
        return self._create(
            f"recovered/{restored_at}", "success", "has recovered", body, at=event.committed_at
        )

    def _build_for_command(self, event: RunCommanded) -> Notification | None:
        at, intervention = event.commanded_at, Intervention.from_command(event)
        if (
            intervention is not None and intervention.level is RecoveryLevel.PIPELINE_RESTART
        ):  # one command per worker, but one notification in all
            self._restored_at = at
            return self._create(
                f"restored/{at}",
                "failure",
                "is restored",
                f"All its workers restart. {event.reason}",
                at=at,
            )
        if intervention is not None:
            return self._create(
                f"restarted/{intervention.worker_id}/{at}",
                "warning",
                f"has {intervention.worker_id} restarted",
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
