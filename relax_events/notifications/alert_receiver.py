"""Forward alerts from Alertmanager's webhook through Apprise.

The receiver stores nothing: Alertmanager repeats alerts that a service did not accept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http.server import ThreadingHTTPServer
from typing import Any, Protocol

import orjson
import structlog

from relax_events.errors import EnvironmentProblem
from relax_events.http.server import TextHandler
from relax_events.notifications.services import DeliveryError

log = structlog.get_logger()
MAX_BYTES = 1_000_000
LENGTH = re.compile("[0-9]{1,18}")
KINDS = {"critical": "failure", "warning": "warning", "info": "info"}
RESOLVED = "resolved"


class Target(Protocol):
    """A recipient of alerts."""

    name: str

    def send(self, *, title: str, body: str, kind: str) -> None:
        """Send a message, or raise `DeliveryError`."""


def parse_alerts(posted: bytes) -> dict[str, str]:
    """Parse an alert group that Alertmanager posted into title, body and kind.

    Raises:
        ValueError: The body is not an alert group; the text says what is missing.
    Source: Alertmanager's webhook, version 4 (prometheus.io/docs/alerting/latest/configuration).
    """
    try:
        return _build_message(orjson.loads(posted))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the body is not an alert group of Alertmanager: {type(error).__name__}: {error}"
        ) from None


def _build_message(group: Mapping[str, Any]) -> dict[str, str]:
    alerts = [(alert["status"], alert["labels"], alert["annotations"]) for alert in group["alerts"]]
    name = ", ".join(sorted({labels["alertname"] for _, labels, _ in alerts}))
    firing = [labels for status, labels, _ in alerts if status != RESOLVED]
    kind = min(
        (KINDS.get(labels.get("severity", ""), "warning") for labels in firing),
        key=list(KINDS.values()).index,
        default="success",
    )
    title = f"{name}: {RESOLVED if group['status'] == RESOLVED else f'{len(firing)} firing'}"
    return {
        "title": title,
        "body": "\n".join(_format_alert(*alert) for alert in alerts),
        "kind": kind,
    }


def _format_alert(status: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    text = annotations.get("summary") or ", ".join(
        f"{name}={value}" for name, value in sorted(labels.items())
    )
    if status == RESOLVED:
        return f"{RESOLVED}: {text}"
    return f"{text} See {annotations['runbook']}" if "runbook" in annotations else text


class AlertReceiver(ThreadingHTTPServer):
    """Responds 200 once all recipients accepted an alert, 502 if one did not, 400 to an invalid
    body. `GET` returns 200.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], targets: Sequence[Target]) -> None:
        """Start listening.

        Raises:
            EnvironmentProblem: The address is in use, or belongs to another machine.
        """
        self.targets = targets
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise EnvironmentProblem(
                f"can't listen on {address[0]}:{address[1]}: {error.strerror}; set another "
                "--host or --port"
            ) from None

    def forward(self, posted: bytes) -> tuple[int, str]:
        """Send an alert group to all recipients; return the response's status and text."""
        try:
            message = parse_alerts(posted)
        except ValueError as error:
            log.warning("alert.rejected", error=str(error))
            return 400, str(error)
        missed = [target.name for target in self.targets if not self._is_sent(target, message)]
        log.info(
            "alert.forwarded", title=message["title"], num_targets=len(self.targets), missed=missed
        )
        return (502, f"not accepted by {', '.join(missed)}") if missed else (200, "sent")

    def _is_sent(self, target: Target, message: Mapping[str, str]) -> bool:
        """Send a message to a recipient; return whether it was accepted."""
        try:
            target.send(title=message["title"], body=message["body"], kind=message["kind"])
        except DeliveryError:
            return False
        return True


class _Handler(TextHandler):
    server: AlertReceiver

    def do_GET(self) -> None:  # noqa: N802 as http.server calls it
        self._respond(200, "ok")

    def do_POST(self) -> None:  # noqa: N802 likewise
        header = self.headers.get("Content-Length", "")
        length = int(header) if LENGTH.fullmatch(header) else 0
        if not 0 < length <= MAX_BYTES:
            self._respond(
                413 if length > MAX_BYTES else 400,
                f"the body must have 1 to {MAX_BYTES} bytes, got {length}",
            )
            return
        self._respond(*self.server.forward(self.rfile.read(length)))

    def _respond(self, status: int, text: str) -> None:
        self.respond(status, f"{text}\n".encode())
