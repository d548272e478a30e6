"""Sends each notification of a run to each configured service (chat, mail, pager) by Apprise.

A notification is sent once, across restarts of the metrics role. Service URLs contain secrets: they
come from a file or the environment, and are never printed or logged.
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
from relax_events.secret_handling import hide
from relax_events.telemetry.delivery import DeliveryQueue
from relax_events.telemetry.trackers import DeliveryProgress

VARIABLE = "RELAX_NOTIFICATION_URLS"


class DeliveryError(Exception):
    """A service did not accept a message. Apprise gives no reason, or a reason with the URL."""


class AppriseTarget:
    """The service at one URL. `name` is the part of the URL that may be logged."""

    def __init__(self, url: str, *, number: int) -> None:
        """Parse the URL.

        Raises:
            ConfigError: Apprise does not support the URL, or is not installed; the error names the
                URL by its number, not its content.
        """
        try:
            import apprise
        except ImportError:
            raise ConfigError(
                "notifications need the package apprise; install relax-events[notifications], or "
                "remove the notification URLs"
            ) from None
        logging.getLogger("apprise").disabled = True  # it logs URLs
        hide(url)
        self.name = f"{url.partition('://')[0]} {number}"
        self._target: Any = apprise.Apprise()
        if not self._target.add(url):
            raise ConfigError(
                f"notification URL number {number} is not supported by Apprise; see its list of "
                "services"
            )

    def send(self, *, title: str, body: str, kind: str) -> None:
        """Send a message; Apprise waits 4 s for a connection and 4 s for a response.

        Raises:
            DeliveryError: The service is unavailable, or rejected the message.
        """
        if not self._target.notify(title=title, body=body, notify_type=kind):
            raise DeliveryError(f"{self.name} did not accept the message")


def notification_urls(config: TelemetryConfig) -> list[str]:
    """Return the URLs, which are separated by white space; an empty list without file and variable.

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

    def __init__(self, target: AppriseTarget, progress: DeliveryProgress) -> None:
        self._target, self._progress = target, progress

    def send(self, notification: Notification) -> None:
        """Send a notification, unless it was sent before or is too old.

        Raises:
            DeliveryError: The service did not accept it.
        """
        is_too_old = now_micros() - notification.at > MAX_AGE_MICROS
        if is_too_old or self._progress.get_note(notification.key):
            return
        self._target.send(title=notification.title, body=notification.body, kind=notification.kind)
        self._progress.set_note(notification.key, "sent")


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
