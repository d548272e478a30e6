"""Sends each notification of a run once to each configured service, across restarts of the metrics
role.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from relax_events.config import RunConfig
from relax_events.events.parts import now_micros
from relax_events.notifications.builder import Notification
from relax_events.notifications.services import AppriseTarget, open_targets
from relax_events.telemetry.delivery import DeliveryQueue
from relax_events.telemetry.trackers import DeliveryProgress

MAX_AGE_MICROS = 3600 * 1_000_000
"""Older notifications are not sent, so that enabling them for an old run does not send its
history."""


class Notifier:
    """Sends notifications to one service."""

    def __init__(self, target: AppriseTarget, memory: DeliveryProgress) -> None:
        self._target, self._memory = target, memory

    def send(self, notice: Notification) -> None:
        """Send a notification, unless it was sent before or is too old; raises as the service."""
        if self._memory.get_note(notice.key) or now_micros() - notice.at > MAX_AGE_MICROS:
            return
        self._target.send(title=notice.title, body=notice.body, kind=notice.kind)
        self._memory.set_note(notice.key, "sent")


def open_notifiers(
    config: RunConfig, *, failed: Callable[[str], None]
) -> list[DeliveryQueue[Notification]]:
    """Open the delivery queues of all configured services; raises as `open_targets`."""
    folder: Path = config.run_directory / "notices"
    targets = open_targets(config.telemetry)
    return [
        DeliveryQueue(
            target.name,
            Notifier(target, DeliveryProgress(folder / f"{target.name}.json")).send,
            failed=failed,
        )
        for target in targets
    ]
