"""Schema registry tests against a real Apicurio: ids, framing, evolution under FULL_TRANSITIVE, and
rejected schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from apicurio import serve_apicurio
from confluent_kafka.schema_registry import SchemaRegistryClient, record_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from event_samples import ended
from schema_changes import ALLOWED, FORBIDDEN, changed

from relax_events.config import BrokerConfig
from relax_events.errors import BrokerRefused, SchemaError
from relax_events.events.codec import EventCodec, UnknownFingerprint
from relax_events.events.schemas import current_release, schema_directory
from relax_events.kafka.schema_registry import RegistryClient, open_codec

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
SCHEMAS = current_release(schema_directory()).schemas
NAME = "relax.events.sample.PromptGroupEnded"
CONTEXT = SerializationContext("relax.test.control.prompt-group-outcomes", MessageField.VALUE)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerConfig]:
    with serve_apicurio(tmp_path_factory.mktemp("apicurio")) as url:
        yield BrokerConfig(schema_registry=url, request_timeout_seconds=20.0)


def framed_codec(config: BrokerConfig) -> EventCodec:
    """Return the codec of a process that found an empty log."""
    codec = open_codec(config)
    codec.frame()
    return codec


@pytest.fixture
def client(config: BrokerConfig) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": config.schema_registry}) as opened:
        yield opened


def test_every_event_has_one_schema_id_and_round_trips(
    config: BrokerConfig, client: SchemaRegistryClient
) -> None:
    first, second = framed_codec(config), framed_codec(config)
    assert set(client.get_subjects()) == set(SCHEMAS)
    assert first.encode(ended()) == second.encode(ended())
    assert second.decode(first.encode(ended())) == ended()
    schema_id = int.from_bytes(first.encode(ended())[1:5], "big")
    assert json.loads(client.get_schema(schema_id).schema_str or "") == SCHEMAS[NAME]


def test_confluent_serializer_and_codec_read_each_others_records(
    config: BrokerConfig, client: SchemaRegistryClient
) -> None:
    codec = framed_codec(config)
    read = AvroDeserializer(client)(codec.encode(ended()), CONTEXT)
    serialize = AvroSerializer(
        client,
        json.dumps(SCHEMAS[NAME]),
        conf={"subject.name.strategy": record_subject_name_strategy},
    )
    assert codec.decode(serialize(read, CONTEXT)) == ended()


def test_compatible_schema_gets_a_new_id_and_both_versions_are_readable(
    config: BrokerConfig, client: SchemaRegistryClient
) -> None:
    framed_codec(config)
    client.set_compatibility(NAME, "FULL_TRANSITIVE")
    newer = changed(ALLOWED["field with a default added"]).schemas[NAME]
    serialize = AvroSerializer(
        client, json.dumps(newer), conf={"subject.name.strategy": record_subject_name_strategy}
    )
    read = AvroDeserializer(client)(framed_codec(config).encode(ended()), CONTEXT)
    before = client.get_versions(NAME)
    data = serialize({**read, "judge": "x"}, CONTEXT)
    assert client.get_versions(NAME) == [*before, before[-1] + 1]
    assert framed_codec(config).decode(data) == ended()


def test_incompatible_schema_is_a_schema_error(
    config: BrokerConfig, client: SchemaRegistryClient
) -> None:
    framed_codec(config)
    client.set_compatibility(NAME, "FULL_TRANSITIVE")
    edit, *_ = FORBIDDEN["field added without a default"]
    registry = RegistryClient.from_config(config)
    with pytest.raises(SchemaError, match=f"registering {NAME}: HTTP 409") as caught:
        registry.register(NAME, json.dumps(changed(edit).schemas[NAME]))
    registry.close()
    assert caught.value.exit_code == 5


def test_unknown_schema_id_and_wrong_registry_address_raise_distinct_errors(
    config: BrokerConfig,
) -> None:
    with pytest.raises(
        UnknownFingerprint, match=r"schema id 99999 .* is neither on control\.schemas nor"
    ):
        framed_codec(config).decode(b"\0" + (99_999).to_bytes(4, "big") + b"body")
    with pytest.raises(BrokerRefused, match="Confluent's interface"):
        framed_codec(
            BrokerConfig(
                schema_registry=config.schema_registry.removesuffix("/ccompat/v7"),
                request_timeout_seconds=20.0,
            )
        )
