"""A record as it lies on the log, and one that is to be written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_events.events.container import LoggedRecord

POLICY_VERSION_HEADER = "policy-version"
VERSION_PATTERN = re.compile("-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Record:
    """A record that was read."""

    topic: str
    partition: int
    offset: int
    key: str
    value: bytes
    headers: Mapping[str, str]
    timestamp_ms: int
    is_damaged: bool = False
    """Whether its record batch fails its checksum: the value is empty then, key and headers are as
    read, and may be wrong."""

    @classmethod
    def of(cls, message: Any) -> Record:
        """Take over a client's message."""
        headers = {
            name: (value or b"").decode("utf-8", "replace")
            for name, value in message.headers() or ()
        }
        key = (message.key() or b"").decode("utf-8", "replace")
        return cls(
            message.topic(),
            message.partition(),
            message.offset(),
            key,
            message.value() or b"",
            headers,
            message.timestamp()[1],
        )

    @property
    def place(self) -> str:
        """Name the record's position as people write it."""
        return f"{self.topic}[{self.partition}]@{self.offset}"

    @property
    def policy_version(self) -> int | None:
        """Return the version in the headers, readable without decoding the event; None where there
        is none.
        """
        text = self.headers.get(POLICY_VERSION_HEADER, "")
        return int(text) if VERSION_PATTERN.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class OutRecord:
    """A record to be written; partition -1 leaves the choice to the key."""

    topic: str
    value: bytes | None
    key: str = ""
    partition: int = -1
    headers: Mapping[str, str] = field(default_factory=dict)


def logged(message: Any) -> LoggedRecord:
    """Take over a client's message, byte for byte."""
    headers = tuple((name, value) for name, value in message.headers() or ())
    return LoggedRecord(
        message.offset(), message.timestamp()[1], message.key(), message.value(), headers
    )
