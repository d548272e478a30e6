"""Loads `schemas/**/*.avsc`, the contract of the log, and names schemas by their CRC-64
fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastavro.schema import (
    SchemaParseException,
    UnknownType,
    fingerprint,
    parse_schema,
    to_parsing_canonical_form,
)

from relax_events.errors import SchemaError

Schema = dict[str, Any]
TYPES_NAMESPACE = "relax.events.types"
PACKAGED = Path(__file__).parent.parent / "schemas"
CHECKOUT = Path(__file__).parent.parent.parent / "schemas"


@cache
def schema_directory() -> Path:
    """Return the folder of the .avsc files: inside an installed package, or at the top of a
    checkout.
    """
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


@cache
def current_schemas() -> dict[str, Schema]:
    """Return every schema of this code by full name, each complete in itself: the first use of a
    named type carries its definition.
    """
    return read_schemas(schema_directory())


def read_schemas(directory: Path) -> dict[str, Schema]:
    """Return every schema of a folder of .avsc files by full name, each complete in itself.

    Raises:
        SchemaError: There is none, or a file is not an Avro schema with a name; the text names the
            file.
    """
    files: dict[str, Schema] = {}
    for path in sorted(directory.rglob("*.avsc")):
        try:
            schema = json.loads(path.read_text())
            files[name_of(schema)] = schema
        except (ValueError, KeyError, TypeError) as error:
            raise SchemaError(
                f"{path} is not an Avro schema with a name and a namespace: "
                f"{type(error).__name__} {error}"
            ) from None
    if not files:
        raise SchemaError(f"no schema found in {directory}; it should hold .avsc files")
    inlined: dict[str, Schema] = {
        name: _inline(schema, dict(files), set()) for name, schema in files.items()
    }
    for name, schema in inlined.items():
        _require_avro(name, schema)
    return inlined


def _require_avro(name: str, schema: Schema) -> None:
    try:
        parse_schema(schema, named_schemas={})
        if schema["type"] == "record":
            iter(schema["fields"])  # the parser takes a record without any
    except (SchemaParseException, UnknownType, ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"{name} is not an Avro schema: {type(error).__name__} {error}") from None


def event_schemas(schemas: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return those that stand on the log by themselves: records outside the namespace of the shared
    types.
    """
    return {
        name: schema
        for name, schema in schemas.items()
        if schema["type"] == "record" and schema["namespace"] != TYPES_NAMESPACE
    }


def name_of(schema: Schema) -> str:
    """Return the full name of a named schema."""
    return f"{schema['namespace']}.{schema['name']}"


def _inline(node: Any, known: dict[str, Schema], seen: set[str]) -> Any:
    if isinstance(node, str):
        return _inline(known[node], known, seen) if node in known and node not in seen else node
    if isinstance(node, list):
        return [_inline(branch, known, seen) for branch in node]
    if "name" in node and "namespace" in node:
        seen.add(name_of(node))
    inlined = dict(node)
    for key in ("type", "items", "values"):
        if key in node:
            inlined[key] = _inline(node[key], known, seen)
    if "fields" in node:
        inlined["fields"] = [_inline(field, known, seen) for field in node["fields"]]
    return inlined


def schema_fingerprint(schema: Schema) -> bytes:
    """Return the CRC-64-AVRO fingerprint of a schema as the eight little-endian bytes of
    single-object encoding.
    """
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))


def runtime_schema(schema: Schema) -> Schema:
    """Parse a schema for the codec: without logical types, since events hold times as integers.

    Raises:
        TypeError: It is no record's schema, but a bare type's or a union.
    """
    parsed = parse_schema(without_logical_types(schema), named_schemas={})
    if not isinstance(parsed, dict):
        raise TypeError(f"the schema of an event must be a record's, got {parsed!r}")
    return parsed


def without_logical_types(node: Any) -> Any:
    """Return a schema, or a part of one, without its logical types: what is on the wire."""
    if isinstance(node, dict):
        return {
            key: without_logical_types(value) for key, value in node.items() if key != "logicalType"
        }
    return [without_logical_types(item) for item in node] if isinstance(node, list) else node
