"""Publishes this release's schemas on a run's log before its workers start, which may not."""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.errors import SchemaError
from relax_events.events.codec import EventCodec, read_registry_ids
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.schema_registry import open_codec
from relax_events.topics import TopicPlan


def find_missing_schemas(config: RunConfig, admin: Admin) -> dict[bytes, bytes]:
    """Return the schemas of this release that are not on control.schemas, by fingerprint; all if
    the topic is still to be created.

    Args:
        config: The run, with the broker's address and the principal filled in.
        admin: Of its broker.
    """
    topic = TopicPlan.from_config(config).topic("control.schemas")
    ids = _read_published(config, topic) if topic in admin.topics(topic) else {}
    return {
        fingerprint: schema
        for fingerprint, schema in open_codec(config.broker).published_form().items()
        if fingerprint.hex() not in ids
        or not ids[fingerprint.hex()].issuperset(read_registry_ids(schema))
    }


def publish_schemas(config: RunConfig, admin: Admin) -> int:
    """Publish what `find_missing_schemas` finds; return the number of schemas."""
    missing, topic = (
        find_missing_schemas(config, admin),
        TopicPlan.from_config(config).topic("control.schemas"),
    )
    if missing:
        producer = RecordProducer(_connection(config))
        try:
            producer.write(
                ProducerRecord(topic, schema, key=fingerprint.hex())
                for fingerprint, schema in missing.items()
            )
        finally:
            producer.close()
    return len(missing)


def _read_published(config: RunConfig, topic: str) -> dict[str, set[int]]:
    """Return the fingerprints of the published schemas with their ids at the registry."""
    codec, reader = EventCodec(), LogReader(_connection(config))
    found: dict[str, set[int]] = {}
    try:
        for record in reader.read_to_end([(topic, 0)]):
            try:
                codec.learn(record.value or b"", key=record.key)
            except SchemaError:
                continue  # its readers report it
            found.setdefault(record.key, set()).update(read_registry_ids(record.value))
    finally:
        reader.close()
    return found


def _connection(config: RunConfig) -> Connection:
    return Connection.from_config(config.broker, client_id=f"{config.run.id}.schemas")
