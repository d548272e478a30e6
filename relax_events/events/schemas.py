"""Loads `schemas/**/*.avsc`, the contract of the log, and names schemas by their CRC-64 fingerprint."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from relax_events.errors import SchemaError

Schema = dict[str, Any]
PACKAGED = Path(__file__).parent.parent / "schemas"
CHECKOUT = Path(__file__).parent.parent.parent / "schemas"


@cache
def schema_directory() -> Path:
    """Return the folder of the .avsc files: inside an installed package, or at the top of a checkout."""
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


@cache
def released_schemas() -> dict[str, Schema]:
    """Return every schema by full name, each complete in itself: the first use of a named type carries its definition."""
    files = {name_of(schema): schema for path in sorted(schema_directory().rglob("*.avsc")) for schema in [json.loads(path.read_text())]}
    if not files:
        raise SchemaError(f"no schema found in {schema_directory()}; the installation is incomplete")
    return {name: _inline(schema, dict(files), set()) for name, schema in files.items()}


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
    """Return the CRC-64-AVRO fingerprint of a schema as the eight little-endian bytes of single-object encoding."""
    number = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
    return bytes.fromhex(number)


def runtime_schema(schema: Schema) -> Schema:
    """Parse a schema for the codec: without logical types, since events hold times as integers.

    Raises:
        TypeError: It is no record's schema, but a bare type's or a union.
    """
    parsed = parse_schema(_without_logical_types(schema), named_schemas={})
    if not isinstance(parsed, dict):
        raise TypeError(f"the schema of an event must be a record's, got {parsed!r}")
    return parsed


def _without_logical_types(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_logical_types(value) for key, value in node.items() if key != "logicalType"}
    return [_without_logical_types(item) for item in node] if isinstance(node, list) else node
