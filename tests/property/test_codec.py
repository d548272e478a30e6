"""Events survive encoding, also as another Avro library decodes them; invalid bytes are rejected;
foreign schemas are resolved to ours.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import resource
import types
import typing
from contextlib import suppress
from enum import StrEnum
from typing import Any

import avro.io
import avro.schema
import numpy as np
import pytest
from event_samples import ended, rolled_out
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from relax_events.errors import CorruptRecord, SchemaError
from relax_events.events.codec import HEADER_BYTES, MAGIC, EventCodec, UnknownFingerprint
from relax_events.events.foreign_schemas import require_bounded
from relax_events.events.parts import Array, Modality, ObjectRef, Outcome, StoredArray
from relax_events.events.sample_columns import RECORD_KINDS, split_samples
from relax_events.events.schemas import Schema
from relax_events.events.tensors import DTYPES, pack, unpack
from relax_events.events.types import PromptGroupEnded, SampleColumns, SampleRolledOut
from tests.schema_changes import END_VALUES, encode_by

CODEC = EventCodec()
EVENTS = RECORD_KINDS
SHA256 = st.binary(min_size=32, max_size=32)
PLAIN = {
    str: st.text(max_size=8),
    int: st.integers(-(2**31), 2**31 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: SHA256,
}
ARRAYS = arrays.arrays(
    st.sampled_from(list(DTYPES.values())),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
REFERENCES = st.builds(
    ObjectRef, uri=st.text(max_size=8), digest=SHA256, num_bytes=st.integers(0, 2**40)
)
SHAPES = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
STORED = st.builds(
    StoredArray, dtype=st.sampled_from(list(DTYPES)), shape=SHAPES, reference=REFERENCES
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Make values for a dataclass field's annotation."""
    if kind == Array:
        return ARRAYS | STORED
    if kind in PLAIN:
        return PLAIN[kind]
    if typing.get_origin(kind) is list:
        return st.lists(values_of(typing.get_args(kind)[0]), max_size=2)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(st.text(max_size=4), values_of(typing.get_args(kind)[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    if dataclasses.is_dataclass(kind):
        return instances_of(kind)
    arms = [arm for arm in typing.get_args(kind) if arm is not types.NoneType]
    return st.none() | values_of(Array if set(arms) == set(typing.get_args(Array)) else arms[0])


def instances_of(cls: Any) -> st.SearchStrategy[Any]:
    """Make instances of a dataclass with every field set."""
    hints = typing.get_type_hints(cls)
    return st.deferred(
        lambda: st.builds(
            cls, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(cls)}
        )
    )


def same(left: Any, right: Any) -> bool:
    """Compare events, arrays included: equal types, shapes and bytes."""
    if isinstance(left, np.ndarray):
        return bool(
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, field.name), getattr(right, field.name))
            for field in dataclasses.fields(left)
        )
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def schema_of(name: str) -> Schema:
    return copy.deepcopy(
        next(schema for schema in CODEC.schemas.values() if schema["name"] == name)
    )


@pytest.mark.parametrize("cls", EVENTS)
@given(data=st.data())
@settings(max_examples=40)
def test_event_round_trips_unchanged(cls: type, data: st.DataObject) -> None:
    event = data.draw(instances_of(cls))
    encoded = CODEC.encode(event)
    assert encoded[:2] == MAGIC
    assert CODEC.event_name(encoded) == cls.__name__
    assert same(CODEC.decode(encoded), event)


@pytest.mark.parametrize("cls", EVENTS)
@given(data=st.data())
@settings(max_examples=15)
def test_another_library_reads_the_same_values(cls: type, data: st.DataObject) -> None:
    event = data.draw(instances_of(cls))
    encoded = CODEC.encode(event)
    schema = json.dumps(without_logical_types(CODEC.schemas[encoded[2:HEADER_BYTES]]))
    decoder = avro.io.BinaryDecoder(io.BytesIO(encoded[HEADER_BYTES:]))
    assert matches(avro.io.DatumReader(avro.schema.parse(schema)).read(decoder), event)


def without_logical_types(node: Any) -> Any:
    if isinstance(node, list):
        return [without_logical_types(item) for item in node]
    return (
        {key: without_logical_types(value) for key, value in node.items() if key != "logicalType"}
        if isinstance(node, dict)
        else node
    )


def matches(plain: Any, value: Any) -> bool:
    """Compare what the other library read with our event."""
    if isinstance(value, np.ndarray):
        return bool(
            plain["dtype"] == value.dtype.str
            and plain["shape"] == list(value.shape)
            and plain["data"] == value.tobytes()
        )
    if isinstance(value, StoredArray):
        return (
            plain["dtype"] == value.dtype
            and plain["shape"] == list(value.shape)
            and plain["data"] is None
            and matches(plain["reference"], value.reference)
        )
    if dataclasses.is_dataclass(value):
        return plain.keys() == {field.name for field in dataclasses.fields(value)} and all(
            matches(plain[name], getattr(value, name)) for name in plain
        )
    if isinstance(value, list):
        return len(plain) == len(value) and all(map(matches, plain, value))
    return bool(plain == value)


@given(ARRAYS)
def test_decoded_arrays_are_read_only_views(array: np.ndarray[Any, Any]) -> None:
    record = {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": array.tobytes(),
        "reference": None,
    }
    view = unpack(record)
    assert isinstance(view, np.ndarray)
    assert not view.flags.writeable
    base: Any = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert base.base is record["data"]


@given(
    arrays.arrays(
        st.sampled_from([">i4", ">f8", ">u2"]).map(np.dtype),
        arrays.array_shapes(max_side=4),
        elements={"allow_nan": False},
    )
)
def test_big_endian_arrays_are_written_little_endian(array: np.ndarray[Any, Any]) -> None:
    back = unpack(pack(array) | {"shape": list(array.shape)})
    assert isinstance(back, np.ndarray)
    assert back.dtype.str[0] == "<"
    np.testing.assert_array_equal(back, array)


def test_strided_array_is_written_in_c_order() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T[::2]
    assert same(unpack(pack(array)), np.ascontiguousarray(array))


@pytest.mark.parametrize("dtype", ["complex64", "O", "U3", "datetime64[s]"])
def test_arrays_of_other_types_are_refused(dtype: str) -> None:
    with pytest.raises(TypeError, match=r"arrays of .* can't be packed; use one of"):
        pack(np.zeros(2, dtype))


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "text"),
    [
        ("<i4", [1_000_000_000], b"1234", r"<i4 and shape \[1000000000\] can't have 4 bytes"),
        ("<i4", [-1, -1], b"1234", r"shape \[-1, -1\] can't have 4 bytes"),
        ("<i4", [2**40, 2**40], b"", "can't have 0 bytes"),
        ("<i4", [1], b"123", "can't have 3 bytes"),
        ("<c8", [1], b"12345678", "packed tensor has dtype '<c8'; known are"),
        ("<i4", [1], None, "packed tensor has neither data nor reference"),
    ],
)
def test_tensor_whose_parts_disagree_is_corrupt(
    dtype: str, shape: list[int], data: bytes | None, text: str
) -> None:
    with pytest.raises(CorruptRecord, match=text):
        unpack({"dtype": dtype, "shape": shape, "data": data, "reference": None})


def test_poisoned_tensor_inside_an_event_is_corrupt() -> None:
    encoded = CODEC.encode(rolled_out(tokens=np.zeros(7, np.int32)))
    shape = b"\x02\x0e\x00"  # one block of one long, 7
    assert encoded.count(b"<i4" + shape) == 1
    huge = encoded.replace(b"<i4" + shape, b"<i4\x02\x80\xa8\xd6\xb9\x07\x00")  # 10 ** 9
    with pytest.raises(CorruptRecord, match=r"shape \[1000000000\] can't have 28 bytes"):
        CODEC.decode(huge)


@given(cut=st.integers(0, 400))
def test_cut_off_record_is_corrupt(cut: int) -> None:
    encoded = CODEC.encode(rolled_out())
    with pytest.raises(CorruptRecord):
        CODEC.decode(encoded[: min(cut, len(encoded) - 1)])


@given(data=st.data())
@settings(max_examples=400)
def test_altered_record_is_corrupt_or_another_event(data: st.DataObject) -> None:
    """Any bytes decode to an event or raise CorruptRecord, nothing else, and never allocate a
    gigabyte."""
    encoded = bytearray(CODEC.encode(rolled_out()))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(HEADER_BYTES, len(encoded) - 1))] = data.draw(
            st.integers(0, 255)
        )
    with suppress(CorruptRecord):
        assert isinstance(CODEC.decode(bytes(encoded)), SampleColumns)


@given(body=st.binary(max_size=60), cls=st.sampled_from(EVENTS))
@settings(max_examples=300)
def test_any_bytes_behind_a_good_header_are_corrupt_or_an_event(body: bytes, cls: type) -> None:
    header = next(
        MAGIC + fingerprint
        for fingerprint, schema in CODEC.schemas.items()
        if schema["name"] == cls.__name__
    )
    with suppress(CorruptRecord):
        assert isinstance(CODEC.decode(header + body), cls)


@pytest.mark.parametrize("data", [None, b"", b"\xc3\x01", b"\xc3\x02" + bytes(20), b"\x00" * 30])
def test_bytes_without_the_marker_are_corrupt(data: bytes | None) -> None:
    with pytest.raises(
        CorruptRecord,
        match=rf"record of {len(data or b'')} bytes doesn't begin with Avro's single-object marker",
    ):
        CODEC.decode(data)


def test_unknown_fingerprint_error_names_the_schemas_topic() -> None:
    with pytest.raises(
        UnknownFingerprint,
        match=r"schema 0102030405060708 is unknown; its writer has not published it on control\.schemas",
    ):
        CODEC.decode(MAGIC + bytes(range(1, 9)) + b"body")
    assert CODEC.event_name(MAGIC + bytes(8)) == "unknown"


def test_bytes_behind_the_event_are_corrupt() -> None:
    with pytest.raises(CorruptRecord, match="record has 3 bytes after its event"):
        CODEC.decode(CODEC.encode(ended()) + b"abc")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt_group_id": None}, "PromptGroupEnded can't be encoded"),
        ({"prompt_group_id": "\ud800"}, "surrogates not allowed"),
        ({"train_step": "seven"}, "PromptGroupEnded can't be encoded"),
        ({"train_step": 2**63}, "PromptGroupEnded can't be encoded"),
        ({"outcome": "gone"}, "PromptGroupEnded can't be encoded"),
        ({"mean_reward": "high"}, "PromptGroupEnded can't be encoded"),
    ],
)
def test_event_with_a_value_of_another_type_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        CODEC.encode(dataclasses.replace(ended(), **changes))


def test_record_of_a_newer_writer_is_read_without_its_new_field() -> None:
    codec, schema = EventCodec(), schema_of("PromptGroupEnded")
    schema["fields"].insert(0, {"name": "judge", "type": "string", "doc": "New."})
    assert codec.decode(encode_by(schema, END_VALUES | {"judge": "x"}, codec)) == ended()


def test_record_of_an_older_writer_gets_the_default_of_a_field_that_it_lacks() -> None:
    codec, schema = EventCodec(), schema_of("PromptGroupEnded")
    schema["fields"] = [
        field for field in schema["fields"] if field["name"] not in ("reason", "mean_reward")
    ]
    event = codec.decode(encode_by(schema, END_VALUES, codec))
    assert event == ended(reason="")


def test_symbol_of_a_newer_writer_is_read_as_the_default() -> None:
    codec, schema = EventCodec(), schema_of("PromptGroupEnded")
    outcome = next(field for field in schema["fields"] if field["name"] == "outcome")["type"]
    outcome["symbols"].append("postponed")
    event = codec.decode(encode_by(schema, END_VALUES | {"outcome": "postponed"}, codec))
    assert isinstance(event, PromptGroupEnded)
    assert event.outcome is Outcome.FAILED


def test_record_that_lacks_a_field_without_default_is_corrupt() -> None:
    codec, schema = EventCodec(), schema_of("PromptGroupEnded")
    schema["fields"] = [field for field in schema["fields"] if field["name"] != "train_step"]
    with pytest.raises(CorruptRecord, match="train_step"):
        codec.decode(encode_by(schema, END_VALUES, codec))


def test_codec_learns_schemas_published_by_another_codec() -> None:
    codec = EventCodec()
    published = CODEC.published_form()
    assert {codec.learn(schema) for schema in published.values()} == published.keys()
    assert len(published) == len(EVENTS)


def test_schema_of_an_unknown_event_is_learned_but_not_decoded() -> None:
    codec = EventCodec()
    fingerprint = codec.learn(
        '{"type": "record", "name": "Other", "namespace": "of.others", "fields": []}'
    )
    with pytest.raises(UnknownFingerprint):
        codec.decode(MAGIC + fingerprint)


@given(
    st.binary(max_size=20)
    | st.recursive(
        st.none()
        | st.integers()
        | st.text(max_size=4)
        | st.sampled_from(["record", "string", "relax.events.sample"]),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["type", "name", "namespace", "fields", "items"]), inner
            )
        ),
        max_leaves=8,
    ).map(json.dumps)
)
@settings(max_examples=300)
def test_learning_an_arbitrary_schema_raises_only_schema_error(schema: bytes | str) -> None:
    with suppress(SchemaError):
        assert len(EMPTY.learn(schema)) == 8


EMPTY = EventCodec()


@pytest.mark.parametrize("schema", [b"{", "[]", '"string"', '{"type": "record"}', b"\xff"])
def test_non_record_schema_error_says_it_is_no_avro_record_schema(schema: bytes | str) -> None:
    with pytest.raises(SchemaError, match=r"^published schema is not an Avro record schema: "):
        CODEC.learn(schema)


def test_content_parts_and_infinite_values_round_trip() -> None:
    event = rolled_out(temperature=math.inf)
    (decoded,) = split_samples(CODEC.decode(CODEC.encode(event)))
    assert isinstance(decoded, SampleRolledOut)
    assert decoded.messages[0].parts[0].kind is Modality.TEXT
    assert decoded.messages[0].text == "say hi"
    assert decoded.temperature == math.inf


def with_field(kind: Any, *, name: str = "WorkerHeartbeat") -> bytes:
    schema = schema_of(name)
    schema["fields"].insert(0, {"name": "added", "type": kind})
    return json.dumps(schema).encode()


RECURSIVE = {"type": "record", "name": "R", "fields": [{"name": "next", "type": ["null", "R"]}]}
MUTUAL = {
    "type": "record",
    "name": "A",
    "fields": [{"name": "b", "type": ["null", {"type": "array", "items": "A"}]}],
}
NOTHING = {"type": "record", "name": "E", "fields": [{"name": "nothing", "type": "null"}]}
DEEP: Any = "int"
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("published", "text"),
    [
        (b"[" * 20_000, "nested 20000 deep"),
        (b"[" * 100_000, "has 100000 bytes"),
        (
            b'{"type": "record", "name": "X", "namespace": "a", "doc": "'
            + b"x" * 70_000
            + b'", "fields": []}',
            "has 7.* bytes",
        ),
        (with_field(RECURSIVE), r"R, which contains itself"),
        (with_field(MUTUAL), r"A, which contains itself"),
        (
            with_field({"type": "array", "items": "null"}),
            'array of "null", whose items .* can hold any number of',
        ),
        (with_field({"type": "array", "items": NOTHING}), "can hold any number of"),
        (
            with_field({"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}}),
            "can hold any number of",
        ),
        *(
            (with_field({"type": "array", "items": kind}), "can hold any number of")
            for kind in ("boolean", "float", "double")
        ),
        (with_field([NOTHING, {"type": "array", "items": "E"}]), "can hold any number of"),
        (
            with_field({"type": "fixed", "name": "F", "size": 2**40}),
            "fixed type F of 1099511627776 bytes",
        ),
        (with_field(DEEP), "nested 2.. deep"),
    ],
)
def test_schema_with_records_that_decode_to_unbounded_size_is_rejected(
    published: bytes, text: str
) -> None:
    with pytest.raises(SchemaError, match=text):
        EventCodec().learn(published)


@pytest.mark.parametrize("schema", CODEC.schemas.values(), ids=lambda schema: str(schema["name"]))
def test_schemas_of_the_project_have_bounded_decoding_cost(schema: Schema) -> None:
    require_bounded(schema)


def test_brackets_in_strings_do_not_count_as_nesting_depth() -> None:
    published = json.dumps({**schema_of("WorkerHeartbeat"), "doc": '[{\\"[' * 500}).encode()
    assert EventCodec().learn(published)


PRIMITIVES = st.sampled_from(
    ["null", "boolean", "int", "long", "float", "double", "bytes", "string"]
)
NUMBERS = iter(range(10**9))


def named(kind: str, **rest: Any) -> dict[str, Any]:
    return {"type": kind, "name": f"N{next(NUMBERS)}", **rest}


KINDS = st.recursive(
    PRIMITIVES,
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items}),
        inner.map(lambda values: {"type": "map", "values": values}),
        st.lists(
            inner.filter(lambda kind: isinstance(kind, str)), min_size=1, max_size=3, unique=True
        ),
        st.lists(inner, max_size=3).map(
            lambda kinds: named(
                "record", fields=[{"name": f"f{n}", "type": kind} for n, kind in enumerate(kinds)]
            )
        ),
        st.integers(0, 9).map(lambda size: named("fixed", size=size)),
    ),
    max_leaves=8,
)


@given(
    kind=KINDS,
    body=st.one_of(
        st.binary(max_size=200),
        st.sampled_from([b"\x02", b"\xff" * 8 + b"\x7f", b"\x80" * 9 + b"\x01"]).map(
            lambda one: one * 30
        ),
    ),
)
@settings(max_examples=300)
def test_decoding_cost_of_any_accepted_schema_is_bounded(kind: Any, body: bytes) -> None:
    codec = EventCodec()
    try:
        fingerprint = codec.learn(with_field(kind))
    except SchemaError:
        return
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with suppress(CorruptRecord):
        codec.decode(b"\xc3\x01" + fingerprint + body)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_utime - began < 5.0
    )  # thousands of times what 300 bytes take


def test_schema_under_the_key_of_another_is_refused() -> None:
    schema = schema_of("PromptGroupEnded")
    fingerprint = EventCodec().learn(json.dumps(schema))
    assert EventCodec().learn(json.dumps(schema), key=fingerprint.hex()) == fingerprint
    for key in ("", "0011223344556677", "k" * 10_000):
        with pytest.raises(SchemaError, match="and stands under the key") as caught:
            EventCodec().learn(json.dumps(schema), key=key)
        assert len(str(caught.value)) < 250
