"""Bounds of what a server may send, and of how long it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import orjson

from relax_events.errors import EpisodeFailed

MAX_DEPTH = 100
"""Of nested JSON; orjson writes at most 254 levels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBounds:
    """The bounds of one server's messages.

    Attributes:
        max_reply_bytes: Of the texts that the policy reads, as JSON.
        max_item_bytes: Of one media file.
        open_seconds: Deadline of a connection and its first request.
        request_seconds: Deadline of each further request.
    """

    max_reply_bytes: int
    max_item_bytes: int
    open_seconds: float
    request_seconds: float

    @classmethod
    def of(cls, setup: Mapping[str, Any]) -> Self:
        """Return the bounds in the section `environment`."""
        return cls(
            max_reply_bytes=setup["max_reply_bytes"],
            max_item_bytes=setup["max_item_bytes"],
            open_seconds=setup["start_seconds"],
            request_seconds=setup["timeout_seconds"],
        )

    @property
    def max_message_bytes(self) -> int:
        """Of one message: texts with their escapes, and an image in base64."""
        return 2 * self.max_reply_bytes + 2 * self.max_item_bytes

    def describe(self) -> str:
        """Return the bound of a message and its keys, for errors."""
        return (
            f"{self.max_message_bytes} bytes (2 * {self.max_reply_bytes} of text + "
            "2 * model.media.max_item_bytes)"
        )


def read_object(text: str | bytes, *, source: str) -> dict[str, Any]:
    """Return a message of a server.

    Args:
        text: The message.
        source: The server, for the error.
    Raises:
        EpisodeFailed: It is no JSON object, or nested too deeply.
    """
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise EpisodeFailed(f"{source} sent what is no JSON: {error}") from None
    if not isinstance(message, dict):
        raise EpisodeFailed(f"{source} sent a {type(message).__name__} and no JSON object")
    check_depth(message, source=source)
    return message


def check_depth(value: Any, *, source: str) -> None:
    """Refuse a value of a server that is nested too deeply.

    Raises:
        EpisodeFailed: It has more than `MAX_DEPTH` levels.
    """
    level, waiting = 0, [value]
    while waiting:
        if level > MAX_DEPTH:
            raise EpisodeFailed(
                f"{source} sent JSON of more than {MAX_DEPTH} levels, which is refused"
            )
        inner: list[Any] = []
        for part in waiting:
            if isinstance(part, dict):
                inner += part.values()
            elif isinstance(part, list):
                inner += part
        level, waiting = level + 1, inner
