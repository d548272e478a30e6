"""Possible schemas of the next release: changes that the contract allows, and changes that it
forbids.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import fastavro

from relax_events.events.codec import HEADER_BYTES, MAGIC, EventCodec
from relax_events.events.schemas import Release, Schema, current_release, schema_directory

Edit = Callable[[dict[str, Schema]], None]


def field(record: Schema, name: str) -> Schema:
    """Return a field of a record."""
    found: Schema = next(found for found in record["fields"] if found["name"] == name)
    return found


def event(schemas: dict[str, Schema], name: str) -> Schema:
    """Return an event by its short name."""
    return next(schema for schema in schemas.values() if schema["name"] == name)


def ended(schemas: dict[str, Schema]) -> Schema:
    """Return the event that most changes are tried on: it has an enum, an optional, defaults and a
    time."""
    return event(schemas, "PromptGroupEnded")


def changed(edit: Edit, version: str = "current") -> Release:
    """Return today's schemas after a change."""
    schemas = copy.deepcopy(current_release(schema_directory()).schemas)
    edit(schemas)
    return Release(version, schemas)


def added(schemas: dict[str, Schema], **default: Any) -> None:
    """Add a field, with a default or without."""
    ended(schemas)["fields"].insert(2, {"name": "judge", "type": "string", "doc": "New."} | default)


def added_inside(schemas: dict[str, Schema], **default: Any) -> None:
    """Add a field to a type inside of an event."""
    segments = field(event(schemas, "SamplesRolledOut"), "version_segments")["type"]["items"]
    segments["items"]["fields"].append(
        {"name": "seconds", "type": "double", "doc": "New."} | default
    )


def removed(schemas: dict[str, Schema], name: str) -> None:
    """Remove a field."""
    ended(schemas)["fields"].remove(field(ended(schemas), name))


def retyped(schemas: dict[str, Schema], name: str, kind: Any) -> None:
    """Give a field another type."""
    field(ended(schemas), name)["type"] = kind


def gone(schemas: dict[str, Schema]) -> None:
    """Drop the event."""
    del schemas["relax.events.sample.PromptGroupEnded"]


def without_enum_default(schemas: dict[str, Schema]) -> None:
    """Add a symbol, and take away what older readers read instead of it."""
    outcome = field(ended(schemas), "outcome")["type"]
    outcome["symbols"].append("postponed")
    del outcome["default"]


ALLOWED: dict[str, Edit] = {
    "field with a default added": lambda schemas: added(schemas, default="absent"),
    "field with a default added to a nested type": lambda schemas: added_inside(
        schemas, default=0.5
    ),
    "field with a default removed": lambda schemas: removed(schemas, "reason"),
    "optional field removed": lambda schemas: removed(schemas, "mean_reward"),
    "symbol added to an enum with a default": lambda schemas: field(ended(schemas), "outcome")[
        "type"
    ]["symbols"].append("postponed"),
    "order of the fields changed": lambda schemas: ended(schemas)["fields"].reverse(),
    "doc changed": lambda schemas: field(ended(schemas), "row").update(
        doc="Says it in other words."
    ),
    "default changed": lambda schemas: field(ended(schemas), "reason").update(default="unknown"),
}
ONE_WAY: dict[str, Edit] = {
    "int promoted to long": lambda schemas: retyped(schemas, "attempt", "long"),
    "branch added to a union": lambda schemas: retyped(
        schemas, "mean_reward", ["null", "double", "string"]
    ),
    "made optional": lambda schemas: retyped(schemas, "row", ["null", "long"]),
}
"""The new readers cope, the old ones don't: they are refused."""

FORBIDDEN: dict[str, tuple[Edit, str, str, str]] = {
    "field renamed": (
        lambda schemas: field(ended(schemas), "row").update(name="line"),
        "line",
        "current can't read what 0.1.0 wrote: the field is not in the record and has no default",
        "default",
    ),
    "field added without a default": (
        added,
        "judge",
        "current can't read what 0.1.0 wrote: the field is not in the record and has no default",
        "give the field a default",
    ),
    "field added without a default to a nested type": (
        added_inside,
        "version_segments[][].seconds",
        "current can't read what 0.1.0 wrote: the field is not in the record and has no default",
        "give the field a default",
    ),
    "field without a default removed": (
        lambda schemas: removed(schemas, "row"),
        "row",
        "0.1.0 can't read what current writes: the field is not in the record and has no default",
        "keep it",
    ),
    "type narrowed": (
        lambda schemas: retyped(schemas, "row", "int"),
        "row",
        "current can't read what 0.1.0 wrote: long can't be read as int",
        "add another",
    ),
    "type promoted": (
        ONE_WAY["int promoted to long"],
        "attempt",
        "0.1.0 can't read what current writes: long can't be read as int",
        "add another",
    ),
    "union widened": (
        ONE_WAY["branch added to a union"],
        "mean_reward",
        "0.1.0 can't read what current writes: string is not among null or double",
        "add another",
    ),
    "no longer optional": (
        lambda schemas: retyped(schemas, "mean_reward", "double"),
        "mean_reward",
        "current can't read what 0.1.0 wrote: null or double can't be read as double",
        "add another",
    ),
    "time in another unit": (
        lambda schemas: field(ended(schemas), "ended_at")["type"].update(
            logicalType="timestamp-millis"
        ),
        "ended_at",
        "the same bytes would mean timestamp-millis instead of timestamp-micros",
        "add another",
    ),
    "nested type renamed": (
        lambda schemas: field(ended(schemas), "outcome")["type"].update(name="End"),
        "outcome",
        (
            "current can't read what 0.1.0 wrote: type relax.events.types.Outcome can't be read "
            "as relax.events.types.End"
        ),
        "keep the name",
    ),
    "event gone": (
        gone,
        "",
        "0.1.0 wrote such records, current has no schema for them",
        "keep the schema",
    ),
}


END_VALUES = {
    "prompt_group_id": "000000-0000-0",
    "train_step": 0,
    "group_index": 0,
    "attempt": 0,
    "row": 7,
    "outcome": "failed",
    "reason": "because",
    "policy_version": 0,
    "trainer_version": 0,
    "mean_reward": None,
    "ended_at": 1,
}
"""What `event_samples.ended` says, as the fields of its record."""


def encode_by(schema: Schema, values: dict[str, Any], codec: EventCodec) -> bytes:
    """Encode as another release would, after its schema was learned."""
    fingerprint = codec.learn(json.dumps(schema))
    body = io.BytesIO()
    fastavro.schemaless_writer(body, fastavro.parse_schema(schema), values)
    return MAGIC + fingerprint + body.getvalue()


def end_by_newer_release(**values: Any) -> tuple[bytes, bytes, bytes]:
    """Return the end of a prompt group as a release writes it whose schema has a field more: the
    schema, its fingerprint and the record's value."""
    schemas = {schema["name"]: schema for schema in EventCodec().schemas.values()}
    newer = copy.deepcopy(schemas["PromptGroupEnded"])
    added({"PromptGroupEnded": newer}, default="")
    value = encode_by(newer, END_VALUES | {"judge": "x"} | values, EventCodec())
    return json.dumps(newer).encode(), value[len(MAGIC) : HEADER_BYTES], value
