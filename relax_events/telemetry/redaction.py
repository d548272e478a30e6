"""Keeps secrets out of logs: code that reads a secret registers it here, and log events hide it
from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

HIDDEN = "(hidden)"
MIN_LENGTH = 6
"""Hiding shorter ones would damage ordinary text and protect nothing."""
_lock = threading.Lock()
_secrets: set[str] = set()


def hide(secret: str) -> None:
    """Register a secret to be hidden in all log events of this process."""
    if len(secret) >= MIN_LENGTH:
        with _lock:
            _secrets.add(secret)


def redacted(text: str) -> str:
    """Return a text without registered secrets."""
    with _lock:
        found = [secret for secret in _secrets if secret in text]
    for secret in sorted(found, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def redact_event(_: Any, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Redact a log event, as a structlog processor; values that are neither text nor numbers are
    checked as text.
    """
    return {name: _redacted_value(value) for name, value in event.items()}


def _redacted_value(value: Any) -> Any:
    if isinstance(value, bool | int | float) or value is None:
        return value
    text = value if isinstance(value, str) else str(value)
    shown = redacted(text)
    return value if shown == text else shown
