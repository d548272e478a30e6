"""Records of a few bytes that would become many objects in each reader of their topic."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from relax_events.events.codec import MAGIC
from relax_events.events.schemas import (
    Schema,
    current_schemas,
    inline_types,
    schema_fingerprint,
)

SEGMENT = b"\x00\x00\x00"
"""A version segment: policy version 0, no token, no kept cache."""
EMPTY = b"\x00"
"""The number 0, an empty list or an empty map."""


@dataclass(frozen=True, slots=True)
class RecordAttack:
    """A record and the schema that its writer publishes. `name` describes its content."""

    name: str
    schema_json: str
    record: bytes


def amplifying_records(num_bytes: int) -> Iterator[RecordAttack]:
    """Make records whose bytes are nearly all items of one list: the first field of the writer's
    schema. They end behind it.

    Args:
        num_bytes: Of each record, roughly.
    """
    segments, lists = avro_list(SEGMENT, num_bytes), avro_list(EMPTY, num_bytes)
    yield _record("version segments", "SamplesRolledOut", "version_segments", _one(segments))
    yield _record("zeros", "SamplesRolledOut", "path_lengths", _one(lists))
    yield _record("empty media lists", "SamplesRolledOut", "path_media", _one(lists))
    yield _record("missing arrays", "SamplesRolledOut", "topk_ids", lists)
    yield _record("empty completions", "PromptGroupIssued", "completions", lists)
    yield _record("empty components", "SamplesScored", "components", lists)
    message = b"\x02\x00" + lists + b"\x00"  # one message, without a role
    yield _record(
        "content parts of defaults",
        "SamplesRolledOut",
        "messages",
        message,
        left_out=("text", "media"),
    )


def _one(item: bytes) -> bytes:
    """Return an Avro list of one item."""
    return _long(1) + item + b"\x00"


def avro_list(item: bytes, num_bytes: int) -> bytes:
    """Return an Avro list of so many bytes of equal items."""
    num_items = num_bytes // len(item)
    return _long(num_items) + item * num_items + b"\x00"


def _record(
    name: str, event: str, field: str, content: bytes, *, left_out: tuple[str, ...] = ()
) -> RecordAttack:
    """Write a record that has one field of an event alone, whose items leave some of their own
    fields to defaults.
    """
    schemas = current_schemas()
    schema = next(one for one in schemas.values() if one["name"] == event)
    chosen = next(one for one in schema["fields"] if one["name"] == field)
    forged = copy.deepcopy(schema | {"fields": [inline_types(chosen, schemas, set())]})
    _leave_out(forged, left_out)
    return RecordAttack(name, json.dumps(forged), MAGIC + schema_fingerprint(forged) + content)


def _leave_out(node: Any, names: tuple[str, ...]) -> None:
    """Remove the fields of these names from every record within a type."""
    for branch in node if isinstance(node, list) else ():
        _leave_out(branch, names)
    if isinstance(node, dict):
        fields: list[Schema] = node.get("fields", [])
        fields[:] = [one for one in fields if one["name"] not in names]
        for inner in (*(one["type"] for one in fields), node.get("items"), node.get("type")):
            _leave_out(inner, names)


def _long(value: int) -> bytes:
    """Return a number of zero or more as Avro writes it."""
    rest, parts = value << 1, bytearray()
    while rest > 0x7F:
        parts.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*parts, rest])
