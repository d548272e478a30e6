"""Schemas that others have published: what may be compiled of them, since a schema decides what a
record of a few bytes costs its reader.

Refused are texts that are too large or too deep, types that contain themselves (records of them
overflow the decoder's stack), and arrays of items whose lack the decoder doesn't notice (a few
bytes would stand for any number of them).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from relax_events.errors import SchemaError
from relax_events.events.schemas import Schema

MAX_SCHEMA_BYTES = 64 * 1024
MAX_DEPTH = 64
"""Of brackets in the text; our own deepest schema has 16."""
MAX_FIXED_BYTES = 1024**2
UNCHECKED, UNCHECKED_TYPES = 0, ("null", "boolean", "float", "double")
"""Besides fixed types: fastavro (1.13) reads these, or nothing, behind the end of a record without
an error, so an array of them never ends."""
OPENING, CLOSING, QUOTE, ESCAPE = b"[{", b"]}", ord('"'), ord("\\")


def read_published(schema_json: bytes | str) -> Any:
    """Parse the text of a published schema.

    Raises:
        SchemaError: It is too large, nested too deeply, or no JSON.
    """
    text = schema_json.encode() if isinstance(schema_json, str) else bytes(schema_json)
    if len(text) > MAX_SCHEMA_BYTES:
        raise SchemaError(
            f"published schema has {len(text)} bytes; an event's schema has at most "
            f"{MAX_SCHEMA_BYTES}"
        )
    if (depth := _depth(text)) > MAX_DEPTH:
        raise SchemaError(
            f"published schema is nested {depth} deep; an event's schema at most {MAX_DEPTH}"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"published schema is not an Avro record schema: {error}") from error


def require_bounded(schema: Schema) -> None:
    """Check that decoding by a schema costs no more than the bytes that are decoded.

    Args:
        schema: As `parse_schema` accepts it.
    Raises:
        SchemaError: A type contains itself, an array or map has items without bytes, or a fixed
            type is too large; the text names it.
    """
    _least_bytes(schema, named={}, enclosing=(), namespace="")


def _depth(text: bytes) -> int:
    """Return how deep brackets are nested, without parsing."""
    depth = deepest = 0
    is_text = is_escaped = False
    for byte in text:
        if is_text:
            is_text = is_escaped or byte != QUOTE
            is_escaped = byte == ESCAPE and not is_escaped
        elif byte == QUOTE:
            is_text = True
        elif byte in OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif byte in CLOSING:
            depth -= 1
    return deepest


def _least_bytes(
    node: Any, *, named: dict[str, int], enclosing: tuple[str, ...], namespace: str
) -> int:
    """Return the least number of bytes that decoding a value of a type finds missing at the end of
    a record, having checked the type.
    """
    if isinstance(node, list):
        for branch in node:
            _least_bytes(branch, named=named, enclosing=enclosing, namespace=namespace)
        return 1
    if isinstance(node, str):
        return _named_least(node, named=named, enclosing=enclosing, namespace=namespace)
    kind = node["type"]
    if kind in ("array", "map"):
        items = node["items" if kind == "array" else "values"]
        if (
            not _least_bytes(items, named=named, enclosing=enclosing, namespace=namespace)
            and kind == "array"
        ):
            raise SchemaError(
                f"published schema has an array of {json.dumps(items)[:80]}, whose items a record "
                "of a few bytes can hold any number of"
            )
        return 1
    if kind in ("record", "error"):
        return _record_least(node, named=named, enclosing=enclosing, namespace=namespace)
    if kind in ("fixed", "enum"):
        size = int(node["size"]) if kind == "fixed" else 1
        if size > MAX_FIXED_BYTES:
            raise SchemaError(
                f"published schema has the fixed type {node['name']} of {size} bytes; at "
                f"most {MAX_FIXED_BYTES} may be"
            )
        least = UNCHECKED if kind == "fixed" else 1
        named[next(_full_names(node["name"], node.get("namespace", namespace)))] = least
        return least
    return _least_bytes(kind, named=named, enclosing=enclosing, namespace=namespace)


def _record_least(
    node: Schema, *, named: dict[str, int], enclosing: tuple[str, ...], namespace: str
) -> int:
    inner = node.get("namespace", namespace)
    name = next(_full_names(node["name"], inner))
    fields = [
        _least_bytes(field["type"], named=named, enclosing=(*enclosing, name), namespace=inner)
        for field in node["fields"]
    ]
    named[name] = sum(fields)
    return sum(fields)


def _named_least(
    name: str, *, named: dict[str, int], enclosing: tuple[str, ...], namespace: str
) -> int:
    for full in _full_names(name, namespace):
        if full in enclosing:
            raise SchemaError(
                f"published schema has the type {full}, which contains itself; records of it "
                "would have no depth that is known before"
            )
        if full in named:
            return named[full]
    return UNCHECKED if name in UNCHECKED_TYPES else 1


def _full_names(name: str, namespace: str) -> Iterator[str]:
    """Return the schemas that a name may refer to, the likeliest first."""
    if "." not in name and namespace:
        yield f"{namespace}.{name}"
    yield name
