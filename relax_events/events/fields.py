"""A schema as a flat list of fields, nested ones by their path: what people read, and what two
schemas are compared by.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from relax_events.events.schemas import Schema, name_of

NESTED = {"array": "items", "map": "values"}


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field. `path` is like `version_segments[].num_tokens`; `default` is JSON, None where
    there is none.
    """

    path: str
    type: str
    logical_type: str
    default: str | None
    doc: str


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two schemas of an event; `field` is empty where the event itself
    differs.
    """

    schema: str
    field: str
    what: str


def field_rows(schema: Schema) -> list[FieldRow]:
    """Return every field of a record, depth first; a type's own fields follow its first use."""
    return list(_rows(schema, ""))


def type_text(node: Any) -> str:
    """Write a type as people do: `array of TopicOffset`, `null or string`."""
    if isinstance(node, list):
        return " or ".join(type_text(branch) for branch in node)
    if not isinstance(node, dict):
        return str(node).rsplit(".", 1)[-1]
    if node["type"] in NESTED:
        return f"{node['type']} of {type_text(node[NESTED[node['type']]])}"
    if node["type"] == "enum":
        return f"{node['name']} ({', '.join(node['symbols'])}; else {node.get('default', 'none')})"
    if node["type"] == "fixed":
        return f"{node['name']} ({node['size']} bytes)"
    return str(node.get("name", node["type"]))


def changes(old: dict[str, Schema], new: dict[str, Schema]) -> list[Change]:
    """Return how two sets of schemas differ, by event and field, in a stable order."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            found.append(Change(name, "", "removed"))
        elif name not in old:
            found.append(Change(name, "", "added"))
        else:
            found += _event_changes(old[name], new[name])
    return found


def _event_changes(old: Schema, new: Schema) -> Iterator[Change]:
    name = name_of(new)
    if old.get("doc") != new.get("doc"):
        yield Change(name, "", "doc changed")
    before, after = ({row.path: row for row in field_rows(schema)} for schema in (old, new))
    if before.keys() == after.keys() and list(before) != list(after):
        yield Change(name, "", "fields in another order")
    for path in [*after, *(path for path in before if path not in after)]:
        if path not in after:
            yield Change(name, path, "removed")
        elif path not in before:
            default = after[path].default
            yield Change(
                name,
                path,
                (
                    f"added, {after[path].type}, "
                    f"{'no default' if default is None else f'default {default}'}"
                ),
            )
        else:
            yield from (
                Change(name, path, what) for what in _field_changes(before[path], after[path])
            )


def _field_changes(old: FieldRow, new: FieldRow) -> Iterator[str]:
    for what, before, after in (
        ("type", old.type, new.type),
        ("logical type", old.logical_type, new.logical_type),
        ("default", old.default, new.default),
    ):
        if before != after:
            yield f"{what} {before or 'none'} -> {after or 'none'}"
    if old.doc != new.doc:
        yield "doc changed"


def _rows(record: Schema, prefix: str) -> Iterator[FieldRow]:
    for field in record["fields"]:
        kind = field["type"]
        logical = str(kind.get("logicalType", "")) if isinstance(kind, dict) else ""
        default = json.dumps(field["default"]) if "default" in field else None
        yield FieldRow(
            prefix + field["name"], type_text(kind), logical, default, field.get("doc", "")
        )
        for nested, mark in _records_in(kind, ""):
            yield from _rows(nested, f"{prefix}{field['name']}{mark}.")


def _records_in(node: Any, mark: str) -> Iterator[tuple[Schema, str]]:
    """Give the records defined inside a type, with the marks that lead to them."""
    if isinstance(node, list):
        for branch in node:
            yield from _records_in(branch, mark)
    elif isinstance(node, dict) and node["type"] in NESTED:
        yield from _records_in(node[NESTED[node["type"]]], f"{mark}[]")
    elif isinstance(node, dict) and node["type"] == "record":
        yield node, mark
