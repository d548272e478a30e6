"""Checks that schemas evolve compatibly: every release and every writer of a run can read the
records of the current code, and the reverse. Publishes them on a run's log before its workers
start: workers may not publish schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import structlog

from relax_events.config import RunConfig
from relax_events.errors import CheckFailed, ConfigError, SchemaError
from relax_events.events.codec import REGISTRY_IDS, EventCodec, SchemaRegistry, read_registry_ids
from relax_events.events.compatibility import Incompatibility, compare, incompatibilities
from relax_events.events.schemas import (
    Release,
    Schema,
    current_release,
    get_full_name,
    read_releases,
    schema_fingerprint,
    version_key,
)
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.schema_registry import open_codec
from relax_events.session.broker_address import open_admin, require_run
from relax_events.topics import TopicPlan
from relax_events.topics.names import SCHEMAS

log = structlog.get_logger()


def check_releases(directory: Path) -> list[Incompatibility]:
    """Return the incompatibilities between the schemas in a folder and any of its releases.

    Raises:
        SchemaError: A file can't be parsed.
    """
    current = current_release(directory)
    return [
        problem
        for release in read_releases(directory)
        for problem in incompatibilities(release, current)
    ]


def check_run(config: RunConfig, directory: Path) -> list[Incompatibility]:
    """Return the incompatibilities between the schemas in a folder and the writers of a run.

    Args:
        config: The run, with the broker's address filled in.
        directory: Folder of .avsc files.
    Raises:
        BrokerUnavailable: No broker answered.
        ConfigError: The broker has no topics of this run.
    """
    current = current_release(directory)
    incompatibilities = []
    for fingerprint, schema in read_published_schemas(config):
        name = get_full_name(schema)
        if name in current.schemas:
            incompatibilities += compare(
                schema,
                current.schemas[name],
                old=f"the run's writer ({fingerprint})",
                new=current.version,
            )
        else:
            what = (
                f"the run has a writer of such records ({fingerprint}), {current.version} has no "
                "schema for them"
            )
            incompatibilities.append(
                Incompatibility(name, "", what, "read them with the release that wrote them")
            )
    return incompatibilities


def read_published_schemas(config: RunConfig) -> Iterator[tuple[str, Schema]]:
    """Read each schema that writers of a run have published, with its fingerprint.

    Raises:
        ConfigError: The broker has no topics of this run.
    """
    topic = TopicPlan.from_config(config).topic(SCHEMAS)
    with closing(open_admin(config, name="schemas")) as admin:
        require_run(config, admin.topics(topic))
    schemas: dict[str, Schema] = {}
    for fingerprint, text in _read_records(config, topic, EventCodec()):
        schema = {key: part for key, part in json.loads(text).items() if key != REGISTRY_IDS}
        schemas.setdefault(fingerprint, schema)
    yield from schemas.items()


def find_missing_schemas(config: RunConfig, admin: Admin) -> dict[bytes, bytes]:
    """Return the schemas of this release that are not on control.schemas, by fingerprint; all if
    the topic is still to be created.

    Args:
        config: The run, with the broker's address and the principal filled in.
        admin: Of its broker.
    """
    topic = TopicPlan.from_config(config).topic(SCHEMAS)
    codec, ids = open_codec(config.broker), dict[str, set[int]]()
    if topic in admin.topics(topic):
        for fingerprint, text in _read_records(config, topic, codec):
            ids.setdefault(fingerprint, set()).update(read_registry_ids(text))
    codec.frame()
    return {
        fingerprint: schema
        for fingerprint, schema in codec.published_form().items()
        if fingerprint.hex() not in ids
        or not ids[fingerprint.hex()].issuperset(read_registry_ids(schema))
    }


def publish_schemas(config: RunConfig, admin: Admin) -> int:
    """Publish the schemas that `find_missing_schemas` finds; return their number."""
    missing = find_missing_schemas(config, admin)
    topic = TopicPlan.from_config(config).topic(SCHEMAS)
    if missing:
        with closing(RecordProducer(_connect(config))) as producer:
            producer.write(
                ProducerRecord(topic, schema, key=fingerprint.hex())
                for fingerprint, schema in missing.items()
            )
    return len(missing)


def find_other_ids(config: RunConfig, admin: Admin, registry: SchemaRegistry) -> list[int]:
    """Return the schema ids on the log of a run under which a registry has another schema, or none;
    no ids where the run has no topics.

    Raises:
        BrokerError: Log or registry can't be read.
    """
    topic = TopicPlan.from_config(config).topic(SCHEMAS)
    if topic not in admin.topics(topic):
        return []
    owners: dict[int, str] = {}
    for fingerprint, text in _read_records(config, topic, EventCodec()):
        for schema_id in read_registry_ids(text):
            owners.setdefault(schema_id, fingerprint)
    return [
        schema_id
        for schema_id, fingerprint in sorted(owners.items())
        if _read_fingerprint(registry, schema_id) != fingerprint
    ]


def _read_fingerprint(registry: SchemaRegistry, schema_id: int) -> str:
    """Return the fingerprint of a registry's schema; empty for none, and for another kind."""
    try:
        text = registry.schema(schema_id)
        return EventCodec().learn(text).hex() if text else ""
    except SchemaError:
        return ""


def _read_records(config: RunConfig, topic: str, codec: EventCodec) -> Iterator[tuple[str, bytes]]:
    """Read the published schemas with their fingerprints, and let a codec learn them; invalid ones
    are logged and left out.
    """
    with closing(LogReader(_connect(config))) as reader:
        for record in reader.read_to_end([(topic, 0)]):
            if not record.value:
                continue
            try:
                codec.learn(record.value, key=record.key)
            except SchemaError as error:
                log.warning("record.decode_failed", location=record.location, error=str(error))
            else:
                yield record.key, record.value


def _connect(config: RunConfig) -> Connection:
    return Connection.from_config(config.broker, client_id=f"{config.run.id}.schemas")


def build_release(directory: Path, version: str) -> Release:
    """Return the schemas in a folder as the release that is to be added.

    Raises:
        ConfigError: The version is not above all that are released.
        CheckFailed: The schemas are incompatible with a release.
    """
    newest = max(
        (release.version for release in read_releases(directory)), key=version_key, default=""
    )
    if newest and version_key(version) <= version_key(newest):
        raise ConfigError(f"the version must be above {newest}, which is released, got {version}")
    version_key(version)
    if problems := check_releases(directory):
        first = problems[0]
        raise CheckFailed(
            f"{len(problems)} change(s) break a release, for example {first.schema} "
            f"{first.field}: {first.what}; {first.remedy}"
        )
    return Release(version, current_release(directory).schemas)


def find_unreleased(directory: Path) -> list[str]:
    """Return the events whose schemas are in no release as they stand, by full name."""
    released_fingerprints = {
        schema_fingerprint(schema)
        for release in read_releases(directory)
        for schema in release.schemas.values()
    }
    return sorted(
        name
        for name, schema in current_release(directory).schemas.items()
        if schema_fingerprint(schema) not in released_fingerprints
    )
