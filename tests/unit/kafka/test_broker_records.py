"""Decoding of a record's key and headers never raises, whatever bytes a foreign producer wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relax_events.errors import CorruptRecord
from relax_events.kafka.records import Record
from relax_events.runtime.sample_input import next_offsets
from relax_events.staleness import IssuedGroup


def record(
    offset: int = 0, *, topic: str = "t", partition: int = 0, headers: dict[str, str] | None = None
) -> Record:
    return Record(topic, partition, offset, "k", b"v", headers or {}, 0)


class Message:
    """A client's message whose parts may be absent or foreign bytes."""

    def __init__(self, **parts: Any) -> None:
        self._parts = {
            "topic": "t",
            "partition": 1,
            "offset": 2,
            "key": None,
            "value": None,
            "headers": None,
            "timestamp": (2, 5),
        } | parts

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: self._parts[name]


def test_record_of_a_message_without_key_value_and_headers_is_empty() -> None:
    assert Record.from_message(Message()) == Record("t", 1, 2, "", b"", {}, 5)
    foreign = Record.from_message(Message(key=b"\xff", headers=[("a", None), ("b", b"\xfe")]))
    assert (foreign.key, foreign.headers) == ("\ufffd", {"a": "", "b": "\ufffd"})


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0", 0),
        ("-1", -1),
        ("123", 123),
        ("", None),
        ("x", None),
        ("1.5", None),
        ("--5", None),
        ("\u00b2", None),
        ("9" * 5000, None),
    ],
)
def test_policy_version_is_read_off_the_header_or_is_none(text: str, version: int | None) -> None:
    assert record(headers={"policy-version": text}).policy_version == version


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1-2-3",
        "000001-0002",
        "000001-0002-0-0",
        "000001-0002-00",
        "00000\u00b2-0002-0",
        "9" * 5000 + "-0000-0",
    ],
)
def test_invalid_prompt_group_id_is_a_corrupt_record(text: str) -> None:
    with pytest.raises(
        CorruptRecord, match="is not a prompt group id; an example is 000012-0003-0"
    ):
        IssuedGroup.parse(text)


def test_next_offsets_follow_the_last_record_of_each_partition() -> None:
    offsets = next_offsets([record(4), record(9, partition=1), record(5), record(2, topic="u")])
    assert {(offset.topic, offset.partition, offset.offset) for offset in offsets} == {
        ("t", 0, 6),
        ("t", 1, 10),
        ("u", 0, 3),
    }
