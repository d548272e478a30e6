"""Records: read from the log, and to be produced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from relax_events.events.container import LoggedRecord

POLICY_VERSION_HEADER = "policy-version"
VERSION_PATTERN = re.compile("-?[0-9]{1,18}")
NUM_REMEMBERED_VERSIONS = 64
"""The records of a version come together, and each is asked for it several times."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record that was read from the log."""

    topic: str
    partition: int
    offset: int
    key: str
    value: bytes
    headers: Mapping[str, str]
    timestamp_ms: int

    @classmethod
    def from_message(cls, message: Any) -> Record:
        """Convert a client's message."""
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
    def location(self) -> str:
        """The record's location as `topic[partition]@offset`."""
        return f"{self.topic}[{self.partition}]@{self.offset}"

    @property
    def policy_version(self) -> int | None:
        """The policy version in the headers, readable without decoding the event; None when
        absent.
        """
        return _parse_version(self.headers.get(POLICY_VERSION_HEADER, ""))


@lru_cache(maxsize=NUM_REMEMBERED_VERSIONS)
def _parse_version(text: str) -> int | None:
    return int(text) if VERSION_PATTERN.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class ProducerRecord:
    """A record to be produced; partition -1 chooses the partition by key."""

    topic: str
    value: bytes | None
    key: str = ""
    partition: int = -1
    headers: Mapping[str, str] = field(default_factory=dict)


def to_logged_record(message: Any) -> LoggedRecord:
    """Convert a client's message without decoding it."""
    headers = tuple((name, value) for name, value in message.headers() or ())
    return LoggedRecord(
        message.offset(), message.timestamp()[1], message.key(), message.value(), headers
    )
