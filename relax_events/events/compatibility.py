"""Compares two schemas of one event: lists their changed fields, and whether each can read the
other's records; if not, names the field, the reason and the remedy.

Whether a record is readable is decided by Apache's Avro library. This file finds the field, which
the library names only roughly. To compare them, a schema is flattened to a list of fields with
paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import avro.schema
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
from avro.errors import AvroException

from relax_events.errors import SchemaError
from relax_events.events.schemas import Release, Schema, get_full_name, without_logical_types

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
    differences = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            differences.append(Change(name, "", "removed"))
        elif name not in old:
            differences.append(Change(name, "", "added"))
        else:
            differences += _event_changes(old[name], new[name])
    return differences


def _event_changes(old: Schema, new: Schema) -> Iterator[Change]:
    name = get_full_name(new)
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


LOSES_DEFAULT = "give the field a default, and keep it"
SECOND_FIELD = "keep the field as it is and add another, with a default"
KEEP_SYMBOLS = "keep the enum's default, which stands in for symbols that a reader doesn't know"
KEEP_NAME = "keep the name"


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """One reason why records of one schema can't be read through another."""

    schema: str
    field: str
    what: str
    remedy: str


def incompatibilities(old: Release, new: Release) -> list[Incompatibility]:
    """Return everything that keeps two releases from reading each other's records, in both
    directions; new events are fine.
    """
    problems = []
    for name, schema in old.schemas.items():
        if name in new.schemas:
            problems += compare(schema, new.schemas[name], old=old.version, new=new.version)
        else:
            what = f"{old.version} wrote such records, {new.version} has no schema for them"
            problems.append(
                Incompatibility(
                    name, "", what, "keep the schema, even when nothing writes it any more"
                )
            )
    return problems


def compare(old_schema: Schema, new_schema: Schema, *, old: str, new: str) -> list[Incompatibility]:
    """Return what keeps readers and writers of two schemas of one event apart.

    Args:
        old_schema: The earlier one.
        new_schema: The later one.
        old: What the texts call the earlier one, a version for example.
        new: What the texts call the later one.
    """
    name = get_full_name(new_schema)
    earlier, later = _parse(old_schema), _parse(new_schema)
    problems = []
    for reader, writer, who in (
        (later, earlier, f"{new} can't read what {old} wrote"),
        (earlier, later, f"{old} can't read what {new} writes"),
    ):
        problems += [
            Incompatibility(name, field, f"{who}: {what}", remedy)
            for field, what, remedy in _reasons(reader, writer, "")
        ]
    return problems + [
        Incompatibility(name, field, what, SECOND_FIELD)
        for field, what in _other_meanings(old_schema, new_schema)
    ]


def is_readable(*, reader: Any, writer: Any) -> bool:
    """Return whether all that the writer's schema allows can be read through the reader's."""
    verdict = ReaderWriterCompatibilityChecker().get_compatibility(reader, writer)  # type: ignore[no-untyped-call]
    return bool(verdict.compatibility is SchemaCompatibilityType.compatible)


def _parse(schema: Schema) -> Any:
    try:
        return avro.schema.parse(json.dumps(without_logical_types(schema)))
    except AvroException as error:
        raise SchemaError(f"{get_full_name(schema)} is not an Avro schema: {error}") from None


def _reasons(reader: Any, writer: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Give field, reason and remedy of each field where reading fails, from the outside in."""
    if is_readable(reader=reader, writer=writer):
        return
    if reader.type == writer.type == "record" and reader.name == writer.name:
        yield from _field_reasons(reader, writer, path)
    elif reader.type == writer.type == "array":
        yield from _reasons(reader.items, writer.items, f"{path}[]")
    elif reader.type == writer.type == "map":
        yield from _reasons(reader.values, writer.values, f"{path}[]")
    elif reader.type == writer.type == "union":
        yield from _branch_reasons(reader, writer, path)
    elif reader.type == writer.type == "enum" and reader.name == writer.name:
        unknown = sorted(set(writer.symbols) - set(reader.symbols))
        yield path, f"symbol {', '.join(unknown)} is unknown and there is no default", KEEP_SYMBOLS
    elif (
        reader.type == writer.type
        and reader.type in ("record", "enum", "fixed")
        and reader.name != writer.name
    ):
        yield path, f"type {writer.fullname} can't be read as {reader.fullname}", KEEP_NAME
    else:
        yield path, f"{_text(writer)} can't be read as {_text(reader)}", SECOND_FIELD


def _field_reasons(reader: Any, writer: Any, path: str) -> Iterator[tuple[str, str, str]]:
    written = writer.fields_dict
    for field in reader.fields:
        nested = f"{path}.{field.name}".removeprefix(".")
        if field.name in written:
            yield from _reasons(field.type, written[field.name].type, nested)
        elif not field.has_default:
            yield nested, "the field is not in the record and has no default", LOSES_DEFAULT


def _branch_reasons(reader: Any, writer: Any, path: str) -> Iterator[tuple[str, str, str]]:
    named = {_text(branch): branch for branch in reader.schemas}
    for branch in writer.schemas:
        if _text(branch) in named:
            yield from _reasons(named[_text(branch)], branch, path)
        elif not is_readable(reader=reader, writer=branch):
            yield path, f"{_text(branch)} is not among {_text(reader)}", SECOND_FIELD


def _other_meanings(old: Schema, new: Schema) -> Iterator[tuple[str, str]]:
    """Give the fields whose bytes would be read as something else: Avro's rules don't look at
    logical types.
    """
    before = {row.path: row.logical_type for row in field_rows(old)}
    for row in field_rows(new):
        if before.get(row.path, row.logical_type) != row.logical_type:
            yield (
                row.path,
                (
                    f"the same bytes would mean {row.logical_type or 'a bare number'} instead of "
                    f"{before[row.path] or 'a bare number'}"
                ),
            )


def _text(schema: Any) -> str:
    """Write a type as people do."""
    if schema.type == "union":
        return " or ".join(_text(branch) for branch in schema.schemas)
    if schema.type == "array":
        return f"array of {_text(schema.items)}"
    if schema.type == "map":
        return f"map of {_text(schema.values)}"
    return (
        str(schema.fullname).rsplit(".", 1)[-1]
        if schema.type in ("record", "enum", "fixed")
        else str(schema.type)
    )
