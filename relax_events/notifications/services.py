"""Sends texts to chats, mail and pagers through Apprise. URLs contain secrets: they come from a
file or the environment, and are never shown.

Sends each notification of a run once to each configured service, across restarts of the metrics
role.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_events.config import RunConfig, TelemetryConfig
from relax_events.errors import ConfigError
from relax_events.events.parts import now_micros
from relax_events.notifications.builder import Notification
from relax_events.telemetry.delivery import DeliveryQueue
from relax_events.telemetry.logs import hide
from relax_events.telemetry.trackers import DeliveryProgress

VARIABLE = "RELAX_NOTIFICATION_URLS"


class DeliveryError(Exception):
    """A service did not accept a text. Apprise gives no reason, or one that contains the URL."""


class AppriseTarget:
    """One service URL. `name` is the part that may be shown."""

    def __init__(self, url: str, *, number: int) -> None:
        """Parse the URL.

        Raises:
            ConfigError: Apprise does not support the URL, or is not installed; the text gives the
                URL's number, not its content.
        """
        try:
            import apprise
        except ImportError:
            raise ConfigError(
                "notices need apprise; pip install 'relax-events[notifications]', or name no URLs"
            ) from None
        logging.getLogger("apprise").disabled = True  # it logs URLs
        hide(url)
        self.name = f"{url.partition('://')[0]} {number}"
        self._target: Any = apprise.Apprise()
        if not self._target.add(url):
            raise ConfigError(
                f"notice URL number {number} is none that Apprise knows; see its list of services"
            )

    def send(self, *, title: str, body: str, kind: str) -> None:
        """Send a text; Apprise waits 4 s for a connection and 4 s for a response.

        Raises:
            NotDelivered: The service is unavailable, or refused the text.
        """
        if not self._target.notify(title=title, body=body, notify_type=kind):
            raise DeliveryError(f"{self.name} did not take it")


def notification_urls(config: TelemetryConfig) -> list[str]:
    """Return the URLs, one a line or between blanks; none where neither file nor variable is given.

    Raises:
        ConfigError: The file can't be read.
    """
    if config.notification_urls_file is None:
        return os.environ.get(VARIABLE, "").split()
    try:
        return Path(config.notification_urls_file).read_text().split()
    except OSError as error:
        raise ConfigError(
            f"telemetry.notification_urls_file = {str(config.notification_urls_file)!r} "
            "can't be read: "
            f"{error.strerror}"
        ) from None


def open_targets(config: TelemetryConfig) -> list[AppriseTarget]:
    """Open all services; raises as `notification_urls` and `AppriseTarget`."""
    return [
        AppriseTarget(url, number=number)
        for number, url in enumerate(notification_urls(config), start=1)
    ]


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
