"""The schemas are a contract: documented, in step with the dataclasses, readable by another Avro
library, named by CRC-64."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import struct
import types
import typing
from enum import StrEnum
from itertools import pairwise
from typing import Any

import avro.schema
import pytest

from relax_events.events import parts
from relax_events.events import types as event_types
from relax_events.events.parts import Array, Column
from relax_events.events.sample_columns import RECORD_KINDS
from relax_events.events.schemas import (
    Schema,
    current_schemas,
    event_schemas,
    get_full_name,
    schema_directory,
    schema_fingerprint,
)
from relax_events.events.types import Sample, SampleColumns

SCHEMAS = current_schemas()
MODULES = (parts, event_types)
CLASSES = {
    cls.__name__: cls
    for module in MODULES
    for cls in vars(module).values()
    if isinstance(cls, type) and cls.__module__ == module.__name__
} | {cls.__name__: cls for cls in RECORD_KINDS}
SAMPLES = {cls.__name__.replace("Sample", "Samples"): cls for cls in typing.get_args(Sample)}
"""What a sample of a record is, by the record's event."""
PLAIN = {str: "string", float: "double", bool: "boolean", bytes: "Sha256"}
LENGTHS_TEXT = "int32 [num_samples]: tokens of each sample."
EMPTY_64 = 0xC15D213AA4D7A795


def crc64_avro(text: bytes) -> bytes:
    """Compute the fingerprint as the Avro specification writes it down, bit by bit."""
    crc = EMPTY_64
    for byte in text:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (EMPTY_64 if crc & 1 else 0)
    return struct.pack("<Q", crc)


def files() -> list[Schema]:
    return [json.loads(path.read_text()) for path in sorted(schema_directory().rglob("*.avsc"))]


def named(node: Any) -> list[Schema]:
    """Find every definition of a record, enum or fixed inside a schema."""
    if isinstance(node, list):
        return [found for item in node for found in named(item)]
    if not isinstance(node, dict):
        return []
    own = [node] if node.get("type") in ("record", "enum", "fixed") else []
    return own + [
        found for key in ("type", "items", "values", "fields") for found in named(node.get(key))
    ]


def canonical(node: Any) -> str:
    """Write the Parsing Canonical Form as the specification has it, for schemas whose names are
    full wherever they are used.

    The other library's own form can't be used here: it leaves `{"type": "long"}` and repeats the
    definition of a fixed.
    """
    if isinstance(node, str):
        return f'"{node}"'
    if isinstance(node, list):
        return f"[{','.join(map(canonical, node))}]"
    kind = node["type"]
    if kind == "array" or kind == "map":
        inner = "items" if kind == "array" else "values"
        return f'{{"type":"{kind}","{inner}":{canonical(node[inner])}}}'
    if kind not in ("record", "enum", "fixed"):
        return canonical(kind)
    rest = {
        "record": lambda: f'"fields":[{",".join(field_form(field) for field in node["fields"])}]',
        "enum": lambda: f'"symbols":{json.dumps(node["symbols"], separators=(",", ":"))}',
        "fixed": lambda: f'"size":{node["size"]}',
    }[kind]()
    return f'{{"name":"{get_full_name(node)}","type":"{kind}",{rest}}}'


def field_form(field: Schema) -> str:
    return f'{{"name":"{field["name"]}","type":{canonical(field["type"])}}}'


def expected_type(kind: Any) -> Any:
    """Return the Avro type that a dataclass field's annotation stands for; integers may be int or
    long."""
    if kind == Array:
        return "PackedTensor"
    arms = (
        [arm for arm in typing.get_args(kind) if arm is not types.NoneType]
        if isinstance(kind, types.UnionType)
        else []
    )
    if arms and len(arms) < len(typing.get_args(kind)):
        return [
            "null",
            expected_type(Array if set(arms) == set(typing.get_args(Array)) else arms[0]),
        ]
    if typing.get_origin(kind) is list:
        return {"type": "array", "items": expected_type(typing.get_args(kind)[0])}
    if typing.get_origin(kind) is dict:
        return {"type": "map", "values": expected_type(typing.get_args(kind)[1])}
    return "integer" if kind is int else PLAIN.get(kind, getattr(kind, "__name__", kind))


def plain_type(node: Any) -> Any:
    """Reduce a schema's type to the form of `expected_type`."""
    if isinstance(node, list):
        return [plain_type(branch) for branch in node]
    if isinstance(node, dict) and node["type"] in ("array", "map"):
        inner = "items" if node["type"] == "array" else "values"
        return {"type": node["type"], inner: plain_type(node[inner])}
    if isinstance(node, dict):
        return plain_type(
            node["name"] if node["type"] in ("record", "enum", "fixed") else node["type"]
        )
    short = node.rsplit(".", 1)[-1]
    return "integer" if node in ("int", "long") else short


def test_every_event_has_a_schema() -> None:
    assert {cls.__name__ for cls in RECORD_KINDS} == {
        schema["name"] for schema in event_schemas(SCHEMAS).values()
    }


@pytest.mark.parametrize("schema", files(), ids=lambda schema: schema["name"])
def test_every_schema_and_field_is_documented(schema: Schema) -> None:
    for definition in named(schema):
        assert definition["doc"].strip().endswith("."), definition["name"]
        for field in definition.get("fields", ()):
            assert field["doc"].strip(), f"{definition['name']}.{field['name']}"


@pytest.mark.parametrize(
    "schema",
    [schema for schema in SCHEMAS.values() if schema["type"] == "record"],
    ids=lambda schema: schema["name"],
)
def test_dataclass_fields_match_the_schema(schema: Schema) -> None:
    if schema["name"] == "PackedTensor":
        return  # an array in Python; `pack` makes its fields
    cls = CLASSES[schema["name"]]
    hints = typing.get_type_hints(cls)
    assert [field.name for field in dataclasses.fields(cls)] == [
        field["name"] for field in schema["fields"]
    ]
    for field in schema["fields"]:
        assert plain_type(field["type"]) == expected_type(hints[field["name"]]), field["name"]


@pytest.mark.parametrize(
    "schema",
    [found for schema in SCHEMAS.values() for found in named(schema) if found["type"] == "enum"],
    ids=lambda schema: schema["name"],
)
def test_enum_members_match_the_schema_and_include_its_default(schema: Schema) -> None:
    cls = CLASSES[schema["name"]]
    assert issubclass(cls, StrEnum)
    assert [member.value for member in cls] == schema["symbols"]
    assert schema["default"] in schema["symbols"]


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=lambda schema: schema["name"])
def test_schema_is_self_contained_for_another_avro_library(schema: Schema) -> None:
    parsed = avro.schema.parse(json.dumps(schema))
    assert parsed.fullname == get_full_name(schema)  # type: ignore[attr-defined]


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=lambda schema: schema["name"])
def test_fingerprint_follows_the_avro_specification(schema: Schema) -> None:
    assert schema_fingerprint(schema) == crc64_avro(canonical(schema).encode())


def test_fingerprint_agrees_with_a_known_value() -> None:
    """The specification's test vector, and the other library on a schema where its canonical form
    is correct."""
    assert crc64_avro(b'"int"') == struct.pack("<Q", 0x7275D51A3F395C8F)
    schema = SCHEMAS["relax.events.types.MediaRef"]
    assert schema_fingerprint(schema) == avro.schema.parse(json.dumps(schema)).fingerprint(
        "CRC-64-AVRO"
    )


@pytest.mark.parametrize(
    "schema",
    [schema for schema in SCHEMAS.values() if schema["type"] == "record"],
    ids=lambda schema: schema["name"],
)
def test_dataclass_defaults_match_the_schema(schema: Schema) -> None:
    if schema["name"] not in CLASSES:
        return
    by_name = {field.name: field for field in dataclasses.fields(CLASSES[schema["name"]])}
    for field in schema["fields"]:
        if "default" in field:
            own = by_name[field["name"]]
            value = (
                own.default if own.default_factory is dataclasses.MISSING else own.default_factory()
            )
            assert value == field["default"], field["name"]


def field_texts(cls: type) -> dict[str, str]:
    """Read the text under each field of a dataclass and of those that it extends."""
    texts = {}
    for base in reversed(cls.__mro__[:-1]):
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def column_text(text: str, column: Column | None, field: Schema) -> str:
    """Say of a field in columns what its text says of one sample."""
    if column is None:
        return text
    said = text[0].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text
    empty = {Column.EACH: "Empty", Column.PACKED: "Null"}.get(column)
    begin = {
        Column.EACH: "For each sample:",
        Column.PACKED: "float64 [num_samples]:",
        Column.TOKENS: "Of all samples, one after the other:",
    }[column]
    if empty is None or "default" not in field:
        return f"{begin} {said}"
    return f"{begin} {said} {empty} if all have {json.dumps(default_of(field))}."


def default_of(field: Schema) -> Any:
    """Return what each sample has where a column is left out: the empty value of its type."""
    if field["default"] is None:
        return 0.0
    items = field["type"]["items"]
    empty = {"array": [], "map": {}, "string": ""}
    return None if isinstance(items, list) else empty[items if items == "string" else items["type"]]


@pytest.mark.parametrize(
    "schema",
    [schema for schema in SCHEMAS.values() if schema["type"] == "record"],
    ids=lambda schema: schema["name"],
)
def test_texts_of_the_fields_in_python_are_those_of_the_schema(schema: Schema) -> None:
    name = schema["name"]
    if name == "PackedTensor":
        return  # an array in Python
    texts = {field["name"]: field["doc"] for field in schema["fields"]}
    if name not in SAMPLES:
        assert field_texts(CLASSES[name]) == texts
        return
    sample = SAMPLES[name]
    hints = typing.get_type_hints(sample, include_extras=True)
    expected = field_texts(SampleColumns) | {"lengths": LENGTHS_TEXT}
    fields = {field["name"]: field for field in schema["fields"]}
    for field, text in field_texts(sample).items():
        if field != "key":
            column = next(iter(getattr(hints[field], "__metadata__", ())), None)
            expected[field] = column_text(text, column, fields[field])
    assert texts == {field: expected[field] for field in texts}


def test_column_that_is_left_out_stands_for_the_empty_value_of_its_type() -> None:
    """So readers of other languages need no defaults but the schema's."""
    for name, sample in SAMPLES.items():
        fields = {
            field["name"]: field for field in SCHEMAS[f"relax.events.sample.{name}"]["fields"]
        }
        hints = typing.get_type_hints(sample, include_extras=True)
        for field in dataclasses.fields(sample):
            column = next(iter(getattr(hints[field.name], "__metadata__", ())), None)
            if column in (Column.EACH, Column.PACKED) and "default" in fields[field.name]:
                factory = field.default_factory
                value = field.default if factory is dataclasses.MISSING else factory()
                assert value == default_of(fields[field.name]), field.name
