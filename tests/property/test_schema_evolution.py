"""Old and new schemas read each other's records: generated data of every event, written with one
and read through the other.

The expected values are computed here from the two schemas as the Avro specification says, not by
the library that reads.
"""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_changes import ALLOWED, ONE_WAY, changed

from relax_events.events.codec import MAGIC, EventCodec
from relax_events.events.conversion import record_writer
from relax_events.events.schemas import (
    Release,
    Schema,
    current_release,
    read_releases,
    runtime_schema,
    schema_directory,
    schema_fingerprint,
)
from relax_events.events.tensors import DTYPES

CURRENT = current_release(schema_directory())
RELEASES = read_releases(schema_directory())
PAIRS = [
    pytest.param(release, name, id=f"{release.version} {name.rsplit('.', 1)[-1]}")
    for release in RELEASES
    for name in release.schemas
]
PRIMITIVES: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False, width=32),
    "double": st.floats(allow_nan=False),
    "string": st.text(max_size=6),
    "bytes": st.binary(max_size=6),
}
TENSORS = st.integers(0, 3).flatmap(
    lambda length: st.sampled_from(list(DTYPES)).flatmap(
        lambda dtype: st.binary(
            min_size=length * DTYPES[dtype].itemsize, max_size=length * DTYPES[dtype].itemsize
        ).map(lambda data: {"dtype": dtype, "shape": [length], "data": data, "reference": None})
    )
)


class Names:
    """The named types of a schema, gathered on the way through it: their second use is a bare
    name."""

    def __init__(self, schema: Schema) -> None:
        self._found: dict[str, Schema] = {}
        self._gather(schema)

    def _gather(self, node: Any) -> None:
        if isinstance(node, list):
            for branch in node:
                self._gather(branch)
        elif isinstance(node, dict):
            if "namespace" in node:
                self._found[f"{node['namespace']}.{node['name']}"] = node
            for key in ("type", "items", "values", "fields"):
                self._gather(node.get(key))

    def resolve(self, node: Any) -> Any:
        """Return the definition of a type; logical types are their base."""
        while (
            isinstance(node, dict)
            and node["type"] in (*PRIMITIVES, "record")
            and "name" not in node
        ):
            node = node["type"]
        return self._found.get(node, node) if isinstance(node, str) else node


def values_of(node: Any, names: Names) -> st.SearchStrategy[Any]:
    """Make values that a schema allows, tensors among them whole."""
    node = names.resolve(node)
    if isinstance(node, list):
        return st.one_of([values_of(branch, names) for branch in node])
    if isinstance(node, str):
        return PRIMITIVES[node]
    if node["type"] == "array":
        return st.lists(values_of(node["items"], names), max_size=2)
    if node["type"] == "map":
        return st.dictionaries(st.text(max_size=3), values_of(node["values"], names), max_size=2)
    if node["type"] == "enum":
        return st.sampled_from(node["symbols"])
    if node["type"] == "fixed":
        return st.binary(min_size=node["size"], max_size=node["size"])
    if node["name"] == "PackedTensor":
        return TENSORS
    return st.fixed_dictionaries(
        {field["name"]: values_of(field["type"], names) for field in node["fields"]}
    )


def expected(value: Any, reader: Any, names: Names) -> Any:
    """Work out what a reader gets: its fields, its defaults for what the writer lacks, its enum
    default for strange symbols."""
    reader = names.resolve(reader)
    if isinstance(reader, list):
        branch = next(
            branch for branch in reader if (names.resolve(branch) == "null") == (value is None)
        )
        return expected(value, branch, names)
    if isinstance(reader, str) or reader["type"] == "fixed":
        return value
    if reader["type"] == "array":
        return [expected(item, reader["items"], names) for item in value]
    if reader["type"] == "map":
        return {key: expected(item, reader["values"], names) for key, item in value.items()}
    if reader["type"] == "enum":
        return value if value in reader["symbols"] else reader["default"]
    return {
        field["name"]: expected(value[field["name"]], field["type"], names)
        if field["name"] in value
        else field["default"]
        for field in reader["fields"]
    }


def listed(value: Any) -> Any:
    """Make tuples, such as an array's shape, into lists; leave out the names of the branches of
    unions.
    """
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return listed(value[1])
    return [listed(item) for item in value] if isinstance(value, list | tuple) else value


@cache
def parsed(text: str) -> Schema:
    return runtime_schema(json.loads(text))


def encode(schema: Schema, value: Any) -> bytes:
    body = io.BytesIO()
    fastavro.schemaless_writer(body, parsed(json.dumps(schema)), value)
    return body.getvalue()


def read_through(writer: Schema, reader: Schema, body: bytes) -> Any:
    return fastavro.schemaless_reader(
        io.BytesIO(body), parsed(json.dumps(writer)), parsed(json.dumps(reader))
    )


def check_reading(data: st.DataObject, writer: Schema, reader: Schema) -> None:
    value = data.draw(values_of(writer, Names(writer)))
    assert read_through(writer, reader, encode(writer, value)) == expected(
        value, reader, Names(reader)
    )


@pytest.mark.parametrize(("release", "name"), PAIRS)
@given(data=st.data())
@settings(max_examples=12)
def test_released_and_current_schemas_read_each_others_records(
    release: Release, name: str, data: st.DataObject
) -> None:
    check_reading(data, release.schemas[name], CURRENT.schemas[name])
    check_reading(data, CURRENT.schemas[name], release.schemas[name])


@pytest.mark.parametrize(("release", "name"), PAIRS)
@given(data=st.data())
@settings(max_examples=6)
def test_record_of_a_past_release_decodes_to_the_current_event(
    release: Release, name: str, data: st.DataObject
) -> None:
    """The same through the codec, which is what workers read by: the event holds what the current
    schema makes of the record."""
    codec, schema = EventCodec(), release.schemas[name]
    fingerprint = codec.learn(json.dumps(schema))
    value = data.draw(values_of(schema, Names(schema)))
    event = codec.decode(MAGIC + fingerprint + encode(schema, value))
    plain = listed(record_writer(type(event))(event))
    assert plain == expected(value, CURRENT.schemas[name], Names(CURRENT.schemas[name]))
    assert fingerprint == schema_fingerprint(schema)


@pytest.mark.parametrize("change", ALLOWED)
@given(data=st.data())
@settings(max_examples=25)
def test_allowed_change_is_read_both_ways(change: str, data: st.DataObject) -> None:
    evolved = changed(ALLOWED[change])
    for name in ("relax.events.sample.PromptGroupEnded", "relax.events.sample.SamplesRolledOut"):
        if evolved.schemas[name] != CURRENT.schemas[name]:
            check_reading(data, CURRENT.schemas[name], evolved.schemas[name])
            check_reading(data, evolved.schemas[name], CURRENT.schemas[name])


@pytest.mark.parametrize("change", ONE_WAY)
@given(data=st.data())
@settings(max_examples=25)
def test_one_way_change_is_read_by_the_new_reader(change: str, data: st.DataObject) -> None:
    name = "relax.events.sample.PromptGroupEnded"
    check_reading(data, CURRENT.schemas[name], changed(ONE_WAY[change]).schemas[name])


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ("int promoted to long", {"attempt": 2**40}),
        ("branch added to a union", {"mean_reward": "high"}),
        ("made optional", {"row": None}),
    ],
)
@given(data=st.data())
@settings(max_examples=5)
def test_one_way_change_is_not_read_by_the_old_reader(
    change: str, values: dict[str, Any], data: st.DataObject
) -> None:
    """Why the checker refuses these: the old reader fails, on every record or on those that use the
    change."""
    name = "relax.events.sample.PromptGroupEnded"
    evolved = changed(ONE_WAY[change]).schemas[name]
    value = data.draw(values_of(evolved, Names(evolved))) | values
    with pytest.raises(fastavro.read.SchemaResolutionError):
        read_through(evolved, CURRENT.schemas[name], encode(evolved, value))
