"""With a schema registry, records use Confluent's wire format: its serializer reads ours, ours
reads its, and every error names a remedy.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, record_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from event_samples import ended, rolled_out
from registry_server import FIRST_ID, Registry, serve_registry

from relax_events.config import BrokerConfig
from relax_events.errors import (
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    CorruptRecord,
    SchemaError,
)
from relax_events.events.codec import (
    CONFLUENT_HEADER_BYTES,
    EventCodec,
    RegistryConflict,
    UnknownFingerprint,
)
from relax_events.events.schemas import current_release, schema_directory
from relax_events.kafka.schema_registry import RegistryClient, open_codec, read_registry_login
from relax_events.secret_handling import redact

SCHEMAS = current_release(schema_directory()).schemas
NAME = "relax.events.sample.PromptGroupEnded"
CONTEXT = SerializationContext("relax.test.control.prompt-group-outcomes", MessageField.VALUE)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serve_registry() as served:
        yield served


def config_of(registry: Registry, **more: Any) -> BrokerConfig:
    return BrokerConfig(schema_registry=registry.url, request_timeout_seconds=60.0, **more)


def framed_codec(registry: Registry, log: Iterable[bytes | str] = ()) -> EventCodec:
    """Return the codec of a process that has read these records of control.schemas."""
    codec = open_codec(config_of(registry))
    for schema in log:
        codec.learn(schema)
    codec.frame()
    return codec


def as_plain(event: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(event), "outcome": event.outcome.value}


def test_every_event_is_registered_once_under_its_record_name(registry: Registry) -> None:
    codec = framed_codec(registry)
    assert set(registry.subjects) == set(SCHEMAS)
    registered = {
        name: json.loads(registry.schemas[ids[0] - FIRST_ID])
        for name, ids in registry.subjects.items()
    }
    assert registered == SCHEMAS
    before = sum(registry.calls.values())
    for _ in range(3):
        codec.decode(codec.encode(ended()))
    assert sum(registry.calls.values()) == before == len(SCHEMAS)
    framed_codec(registry)
    assert [len(ids) for ids in registry.subjects.values()] == [1] * len(SCHEMAS)


def test_record_starts_with_a_zero_byte_and_the_schema_id(registry: Registry) -> None:
    framed, single = framed_codec(registry).encode(ended()), EventCodec().encode(ended())
    assert framed[:5] == b"\0" + registry.subjects[NAME][0].to_bytes(4, "big")
    assert framed[5:] == single[10:]


def test_confluent_deserializer_reads_records_of_the_codec(registry: Registry) -> None:
    with SchemaRegistryClient({"url": registry.url}) as client:
        read = AvroDeserializer(client)(framed_codec(registry).encode(ended()), CONTEXT)
    ended_at = read.pop("ended_at")
    assert round(ended_at.timestamp() * 1_000_000) == ended().ended_at
    assert read == {name: value for name, value in as_plain(ended()).items() if name != "ended_at"}


def test_codec_reads_records_of_the_confluent_serializer(registry: Registry) -> None:
    """An unknown producer's schema: fewer fields and an additional one, registered by the
    serializer and published nowhere else."""
    schema = json.loads(json.dumps(SCHEMAS[NAME]))
    schema["fields"] = [field for field in schema["fields"] if field["name"] != "mean_reward"]
    schema["fields"].append({"name": "judge", "type": "string", "default": ""})
    with SchemaRegistryClient({"url": registry.url}) as client:
        serializer = AvroSerializer(
            client, json.dumps(schema), conf={"subject.name.strategy": record_subject_name_strategy}
        )
        data = serializer({**as_plain(ended()), "judge": "x"}, CONTEXT)
    codec = framed_codec(registry)
    asked = registry.calls.copy()
    assert data is not None
    assert [codec.decode(data), codec.decode(data)] == [ended(), ended()]
    assert sum((registry.calls - asked).values()) == 1
    assert codec.event_name(data) == "PromptGroupEnded"


def test_both_record_framings_are_readable_with_and_without_registry(registry: Registry) -> None:
    """The ids are on control.schemas, so a reader of the log does not need the registry."""
    framed, plain = framed_codec(registry), EventCodec()
    for schema in framed.published_form().values():
        plain.learn(schema)
    for codec in (framed, plain):
        assert (
            codec.decode(framed.encode(ended())) == codec.decode(plain.encode(ended())) == ended()
        )
    before = registry.calls.total()
    again = EventCodec()
    for schema in plain.published_form().values():
        again.learn(schema)
    assert again.decode(framed.encode(ended())) == ended()
    assert registry.calls.total() == before


def test_ids_on_the_log_win_over_a_replaced_registry(registry: Registry) -> None:
    """Another registry gives the same ids to other schemas: three foreign subjects came first."""
    first = framed_codec(registry)
    log, data = list(first.published_form().values()), first.encode(ended())
    with serve_registry() as replaced:
        client = RegistryClient(replaced.url, timeout_seconds=5.0)
        for number in range(3):
            foreign = {"type": "record", "name": f"Foreign{number}", "fields": []}
            client.register(f"foreign-{number}", json.dumps(foreign))
        client.close()
        replaced.calls.clear()
        codec = framed_codec(replaced, log)
        assert codec.decode(data) == ended()
        assert codec.encode(ended()) == data
        assert replaced.calls.total() == 0


def test_process_starts_from_the_ids_on_the_log_while_the_registry_is_away(
    registry: Registry,
) -> None:
    first = framed_codec(registry)
    registry.broken = True
    codec = framed_codec(registry, first.published_form().values())
    assert codec.encode(ended()) == first.encode(ended())
    with pytest.raises(BrokerUnavailable, match=r"registering .*: HTTP 500"):
        framed_codec(registry)


def test_registry_that_gives_an_id_of_the_log_to_another_schema_is_refused(
    registry: Registry,
) -> None:
    """A new release has a schema that the log lacks, and the registry is another one."""
    first = framed_codec(registry)
    missing = min(registry.subjects, key=lambda name: registry.subjects[name])
    log = [
        schema
        for schema in first.published_form().values()
        if json.loads(schema)["name"] != missing.rpartition(".")[2]
    ]
    with serve_registry() as replaced:
        client = RegistryClient(replaced.url, timeout_seconds=5.0)
        client.register("foreign", json.dumps({"type": "record", "name": "F", "fields": []}))
        client.close()
        with pytest.raises(
            SchemaError,
            match=rf"schema id {FIRST_ID + 1} stands for \w+ \(\w+\) and for "
            rf"{missing.rpartition('.')[2]} \(\w+\); a run keeps to one schema registry: point",
        ):
            framed_codec(replaced, log)


def test_first_claim_of_an_id_on_the_log_wins_also_over_the_registry(registry: Registry) -> None:
    """Only the operator may write control.schemas on a secured broker."""
    codec, scored = framed_codec(registry), SCHEMAS["relax.events.sample.SamplesScored"]
    client = RegistryClient(registry.url, timeout_seconds=5.0)
    changed = dict(SCHEMAS[NAME])
    changed["fields"] = [*changed["fields"], {"name": "judge", "type": "string", "default": ""}]
    schema_id = client.register("of.others", json.dumps(changed))
    client.close()
    data = b"\0" + schema_id.to_bytes(4, "big") + b"body"
    with pytest.raises(CorruptRecord):
        codec.decode(data)  # the registry resolves an id that the log lacks
    assert codec.event_name(data) == "PromptGroupEnded"
    codec.learn(json.dumps(scored | {"registry_schema_ids": [schema_id]}))
    assert codec.event_name(data) == "SamplesScored"
    with pytest.raises(SchemaError, match=r"stands for SamplesScored .* and for PromptGroupEnded"):
        codec.learn(json.dumps(changed | {"registry_schema_ids": [schema_id]}))


def test_claim_of_another_process_on_an_id_that_this_one_writes_with_is_a_conflict(
    registry: Registry,
) -> None:
    """Two processes of two registries start on an empty log at the same time."""
    codec = framed_codec(registry)
    theirs = SCHEMAS["relax.events.sample.SamplesScored"] | {
        "registry_schema_ids": registry.subjects[NAME]
    }
    with pytest.raises(RegistryConflict, match="a run keeps to one schema registry"):
        codec.learn(json.dumps(theirs))
    first = framed_codec(registry)
    for schema in first.published_form().values():
        first.learn(schema)
    with pytest.raises(SchemaError, match="a run keeps to one schema registry") as later:
        first.learn(json.dumps(theirs))
    assert not isinstance(later.value, RegistryConflict), "the log has its own claim before"


def test_schema_with_two_ids_is_published_with_both() -> None:
    codec, text = EventCodec(), json.dumps(SCHEMAS[NAME] | {"registry_schema_ids": [11]})
    codec.learn(text)
    codec.learn(text.replace("[11]", "[12]"))
    published = [json.loads(schema) for schema in codec.published_form().values()]
    assert [
        schema["registry_schema_ids"]
        for schema in published
        if schema["name"] == "PromptGroupEnded"
    ] == [[11, 12]]
    with pytest.raises(
        SchemaError,
        match=r"schema id 11 stands for .* and for .*; a run keeps to one schema registry",
    ):
        codec.learn(
            json.dumps(SCHEMAS["relax.events.sample.SamplesScored"] | {"registry_schema_ids": [11]})
        )


def test_unknown_schema_id_error_names_the_places_searched(registry: Registry) -> None:
    with pytest.raises(
        UnknownFingerprint,
        match=r"record of 9 bytes names schema id 999 .*; set broker\.schema_registry to look there",
    ):
        EventCodec().decode(b"\0\0\0\x03\xe7body")
    with pytest.raises(
        UnknownFingerprint,
        match=r"schema id 999 .* is neither on control\.schemas nor at broker\.schema_registry",
    ):
        open_codec(config_of(registry)).decode(b"\0\0\0\x03\xe7body")


@pytest.mark.parametrize("data", [b"\0", b"\0\0\0\0\0body", b"\0\0\0\1"])
def test_bytes_that_only_begin_like_a_framed_record_are_corrupt(
    registry: Registry, data: bytes
) -> None:
    with pytest.raises(
        CorruptRecord,
        match="doesn't begin with Avro's single-object marker or with a registry's schema id",
    ):
        open_codec(config_of(registry)).decode(data)


def test_cut_off_framed_record_is_corrupt(registry: Registry) -> None:
    codec = framed_codec(registry)
    encoded = codec.encode(rolled_out())
    for end in (CONFLUENT_HEADER_BYTES, len(encoded) // 2, len(encoded) - 1):
        with pytest.raises(CorruptRecord):
            codec.decode(encoded[:end])


def test_incompatible_schema_at_the_registry_is_a_schema_error(registry: Registry) -> None:
    other = SCHEMAS[NAME] | {"fields": [{"name": "judge", "type": "string"}]}
    registry.answer("POST", f"/subjects/{NAME}/versions", {"schema": json.dumps(other)})
    with pytest.raises(
        SchemaError,
        match=rf"registering {NAME}: HTTP 409, .* incompatible.*; `relax schemas --check`",
    ) as caught:
        framed_codec(registry)
    assert caught.value.exit_code == 5


def test_registry_that_does_not_answer_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(
            BrokerUnavailable,
            match=rf"schema registry http://127\.0\.0\.1:{port}, registering .*; see that it runs",
        ) as caught:
            open_codec(
                BrokerConfig(
                    schema_registry=f"http://127.0.0.1:{port}", request_timeout_seconds=0.6
                )
            ).frame()
    assert caught.value.exit_code == 3
    with pytest.raises(BrokerUnavailable, match="ConnectError"):
        open_codec(
            BrokerConfig(schema_registry=f"http://127.0.0.1:{port}", request_timeout_seconds=0.6)
        ).frame()


def test_registry_with_internal_error_is_unavailable(registry: Registry) -> None:
    registry.broken = True
    with pytest.raises(
        BrokerUnavailable, match="HTTP 500, store failure; the registry failed internally"
    ):
        framed_codec(registry)


def test_address_without_the_confluent_api_is_rejected(registry: Registry) -> None:
    with pytest.raises(
        BrokerRefused,
        match=r"HTTP 404.*is broker\.schema_registry the address of Confluent's interface",
    ) as caught:
        open_codec(
            BrokerConfig(schema_registry=f"{registry.url}/apis", request_timeout_seconds=3.0)
        ).frame()
    assert caught.value.exit_code == 4


def test_login_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = tmp_path / "login"
    login.write_text("reader:s3cret\n")
    with serve_registry(login="reader:s3cret") as guarded:
        with pytest.raises(
            BrokerRefused,
            match=r"HTTP 401, Unauthorized; put user:password .* broker\.schema_registry_login_file",
        ):
            framed_codec(guarded)
        monkeypatch.setenv("SCHEMA_REGISTRY_LOGIN", "reader:wrong")
        with pytest.raises(BrokerRefused, match="HTTP 401") as caught:
            framed_codec(guarded)
        assert "wrong" not in str(caught.value)
        assert (
            RegistryClient.from_config(
                config_of(guarded, schema_registry_login_file=login)
            ).count_subjects()
            == 0
        )
        monkeypatch.setenv("SCHEMA_REGISTRY_LOGIN", "reader:s3cret")
        assert RegistryClient.from_config(config_of(guarded)).count_subjects() == 0


def test_error_for_an_unusable_registry_login_does_not_reveal_it(tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text("s3cret")
    with pytest.raises(
        ConfigError, match=r"the login in .*login must be user:password; it has no colon$"
    ) as caught:
        read_registry_login(login)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(
        ConfigError,
        match=r"broker\.schema_registry_login_file .*absent can't be read: No such file",
    ):
        read_registry_login(tmp_path / "absent")


def test_password_of_a_login_is_in_no_log_event(tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text("reader:s3cret-of-the-registry")
    assert read_registry_login(login) == "reader:s3cret-of-the-registry"
    assert redact("Basic reader:s3cret-of-the-registry") == "Basic reader:(hidden)"


@pytest.mark.parametrize(
    "url", ["registry:8081", "ftp://registry", "http://user:s3cret@registry", "http://a b"]
)
def test_registry_address_with_login_or_unknown_scheme_is_rejected(url: str) -> None:
    with pytest.raises(
        ValueError, match=r"must be http\(s\)://host:port/path without a login"
    ) as caught:
        BrokerConfig(schema_registry=url)
    assert "s3cret" not in caught.value.errors()[0]["msg"]  # type: ignore[attr-defined]
