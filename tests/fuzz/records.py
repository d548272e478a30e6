"""Data from the log: schemas, events, headers, references, descriptions."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
from hypothesis import strategies as st

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, CorruptRecord, ObjectError, PoisonSample, SchemaError
from relax_events.events.codec import HEADER_BYTES, MAGIC, EventCodec
from relax_events.events.parts import ObjectRef, StoredArray
from relax_events.events.sample_columns import join_samples, split_samples
from relax_events.events.types import Event, RunDescribed, SampleRolledOut
from relax_events.kafka.records import Record
from relax_events.objects.claim_check import check_out
from relax_events.objects.store import AllowedRoots, ObjectStore
from relax_events.ops.dead_letters import parse_dead_letter
from relax_events.ops.topic_tail import to_json
from relax_events.runtime.run_description import read_described_config
from relax_events.runtime.validation import (
    check_ended,
    check_issued,
    check_ready,
    check_samples,
)
from relax_events.staleness import IssuedGroup
from relax_events.topics.plan import allowed_outcomes
from tests import event_samples
from tests.fuzz.inputs import TEXTS, as_json, documents, json_bytes, mutated
from tests.fuzz.target import SCRATCH, Target

CODEC = EventCodec()
RUN = {"run": {"id": "fuzzed"}, "model": {"path": "model"}, "data": {"source": "jsonl:rows"}}
EVENTS: list[Event] = [
    event_samples.issued(),
    event_samples.rolled_out(),
    event_samples.scored(),
    event_samples.evaluated(),
    event_samples.ended(),
    event_samples.ready(),
    *join_samples([event_samples.rolled_out(index=index) for index in (0, 1)]),
    *join_samples([event_samples.scored(index=index) for index in (0, 1)]),
    *join_samples([event_samples.evaluated(index=index) for index in (0, 1)]),
    *join_samples([event_samples.ready(index=index) for index in (0, 1)]),
    event_samples.rolled_out(
        tokens=StoredArray("<i4", (4,), ObjectRef("file:///a/b", bytes(32), 16))
    ),
]
BODIES = [CODEC.encode(event)[HEADER_BYTES:] for event in EVENTS]
SCHEMAS = list(CODEC.schemas.values())
KINDS = (
    "null",
    "boolean",
    "int",
    "long",
    "float",
    "double",
    "bytes",
    "string",
    "array",
    "map",
    "record",
    "enum",
    "fixed",
    "union",
)
TYPES = [
    *KINDS,
    {"type": "array", "items": "null"},
    {"type": "array", "items": {"type": "array", "items": "long"}},
    {"type": "map", "values": "null"},
    {"type": "fixed", "name": "F", "size": 0},
    {"type": "fixed", "name": "G", "size": 2**40},
    {"type": "enum", "name": "E", "symbols": ["A"]},
    {"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]},
    {"type": "record", "name": "Z", "fields": []},
    {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 9},
    {"type": "long", "logicalType": "timestamp-micros"},
    {"type": "string", "logicalType": "uuid"},
    {"type": "int", "logicalType": "date"},
    ["null", "long"],
    [],
]


def _schema_inputs() -> st.SearchStrategy[bytes]:
    bodies = mutated(BODIES) | st.binary(max_size=200)
    return st.builds(
        lambda schema, body: as_json({"schema": schema, "body": base64.b64encode(body).decode()}),
        documents(SCHEMAS, odd=TYPES),
        bodies,
    )


def learn_and_decode(data: bytes) -> None:
    """Learn a schema as any writer may publish it, and decode a record by it."""
    try:
        given = json.loads(data)
        schema, body = json.dumps(given["schema"]), base64.b64decode(given["body"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    codec = EventCodec()
    with suppress(SchemaError, CorruptRecord):
        fingerprint = codec.learn(schema)
        codec.decode(MAGIC + fingerprint + body)


def learn(data: bytes) -> None:
    """Learn a text."""
    with suppress(SchemaError):
        assert len(CODEC.learn(data)) == 8


def decode(data: bytes) -> None:
    """Decode a record, and do with the event what each of its readers does first."""
    with suppress(SchemaError, CorruptRecord, PoisonSample, ObjectError):
        decoded = CODEC.decode(data)
        orjson.dumps(to_json(decoded))
        may_end = partial(check_ended, allowed=allowed_outcomes("prompt.end-requests"))
        checks: dict[str, Any] = {
            "SampleRolledOut": lambda event: check_samples([event]),
            "SampleReady": lambda event: check_ready([event]),
            "PromptGroupIssued": check_issued,
            "PromptGroupEnded": may_end,
        }
        for event in split_samples(decoded):
            AllowedRoots(("file:///a/",)).check(event)
            check = checks.get(type(event).__name__)
            if check is not None:
                check(event)


def _header_inputs() -> st.SearchStrategy[bytes]:
    names = [
        "policy-version",
        "origin-partition",
        "origin-offset",
        "origin-topic",
        "error-class",
        "resolves",
        "traceparent",
    ]
    values = st.binary(max_size=20) | st.sampled_from(
        [
            b"7",
            b"-1",
            b"9" * 18,
            b"9" * 5000,
            "\u0663".encode(),
            b"\xff",
            b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01",
        ]
    )
    headers = st.lists(
        st.tuples(st.sampled_from(names), values.map(lambda value: value.hex())), max_size=6
    )
    return st.builds(
        lambda found, key: as_json({"headers": found, "key": key}),
        headers,
        st.sampled_from(["", "00", "ff"]),
    )


def read_headers(data: bytes) -> None:
    """Read a record's headers as workers and the dead letters' commands do."""
    try:
        tree = json.loads(data)
        headers = [(str(name), bytes.fromhex(value)) for name, value in tree["headers"]]
        key = bytes.fromhex(tree["key"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    message = SimpleNamespace(
        headers=lambda: headers,
        key=lambda: key,
        value=lambda: b"",
        topic=lambda: "t",
        partition=lambda: 0,
        offset=lambda: 0,
        timestamp=lambda: (1, 1),
    )
    record = Record.from_message(message)
    assert record.policy_version is None or abs(record.policy_version) < 10**18
    parse_dead_letter("reward", record)


def reference(data: bytes) -> None:
    """Resolve a reference: every accepted one is in the store's folder."""
    uri = data.decode(errors="surrogateescape")
    store, roots = _local_store()
    if roots._contains(uri):
        _require_inside(Path(uri.removeprefix("file://")))
    with suppress(ObjectError):
        key = store.key(uri)
        _require_inside(STORE / key)
        store.num_bytes(key)


STORE = SCRATCH / "store" / "of-a-run"
REFERENCES = [
    f"file://{STORE}/sha256/ab/{'ab' * 32}",
    f"file://{STORE}/weights/000001/model.safetensors",
    f"file://{STORE}/../x",
    f"file://{STORE}/%2e%2e/x",
    f"file://{STORE}//x",
]


def _local_store() -> tuple[ObjectStore, AllowedRoots]:
    STORE.mkdir(parents=True, exist_ok=True)
    store = ObjectStore.open(f"file://{STORE}", waits=False)
    return store, AllowedRoots.for_store(store.uri(""))


def _require_inside(path: Path) -> None:
    assert path.resolve().is_relative_to(STORE.resolve()), f"{path} lies outside"


ARRAY = np.arange(4, dtype="<i4")


def claim(data: bytes) -> None:
    """Fetch an array whose dtype, shape and digest are another's word."""
    store = ObjectStore.open("memory://", waits=False)
    put = store.put(ARRAY.tobytes())
    try:
        tree = json.loads(data)
        shape = tuple(int(size) for size in tree["shape"])
        claimed = ObjectRef(put.uri + str(tree["uri"])[:100], put.digest, int(tree["num_bytes"]))
        stored = StoredArray(str(tree["dtype"]), shape, claimed)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return
    with suppress(ObjectError, CorruptRecord):
        (event,) = split_samples(CODEC.decode(_encoded(event_samples.rolled_out(tokens=stored))))
        assert isinstance(event, SampleRolledOut)
        check_out(event, store)


def _encoded(event: Event) -> bytes:
    try:
        return CODEC.encode(event)
    except TypeError as error:
        raise CorruptRecord(str(error)) from None


CLAIM = {"uri": "", "num_bytes": 16, "dtype": "<i4", "shape": [4]}
DTYPES = [
    "<i8",
    "|u1",
    "|O",
    "O",
    "U4",
    "datetime64[s]",
    "(1000000,1000000)i4",
    "i4,i4",
    "<f2",
    "V0",
    "|S0",
    "<c8",
]


def described(data: bytes) -> None:
    """Read the run file that a log holds."""
    text = data.decode(errors="replace")
    with suppress(ConfigError):
        read_described_config(
            RunDescribed(run_id="fuzzed", config=text, config_digest="", package_version="0"),
            run_id="other",
        )


def _tree() -> Any:
    return RunConfig.model_validate(RUN).model_dump(mode="json")


def group_id(data: bytes) -> None:
    """Read a prompt group's id."""
    with suppress(CorruptRecord):
        issued = IssuedGroup.parse(data.decode(errors="replace"))
        assert issued.slot.train_step >= 0


TARGETS = [
    Target("schema-and-record", _schema_inputs(), learn_and_decode),
    Target("schema", json_bytes(SCHEMAS, odd=TYPES), learn),
    Target(
        "record",
        mutated(
            [CODEC.encode(event) for event in EVENTS]
            + [MAGIC + fingerprint for fingerprint in CODEC.schemas]
        ),
        decode,
    ),
    Target("headers", _header_inputs(), read_headers),
    Target("reference", mutated([uri.encode() for uri in REFERENCES]), reference),
    Target("claim-check", documents([CLAIM], odd=DTYPES).map(as_json), claim),
    Target("run-description", json_bytes([_tree()], odd=TEXTS), described),
    Target("prompt-group-id", mutated([b"000012-0003-0", b"1000000-10000-12"]), group_id),
]
