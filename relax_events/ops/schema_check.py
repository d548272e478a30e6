"""Checks that schemas evolve compatibly: every release and every writer of a run can read what the
current code writes, and the reverse.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import structlog

from relax_events.config import RunConfig
from relax_events.errors import CheckFailed, ConfigError, SchemaError
from relax_events.events.codec import REGISTRY_IDS, EventCodec
from relax_events.events.compatibility import Incompatibility, compare, incompatibilities
from relax_events.events.schemas import (
    Release,
    Schema,
    current_release,
    name_of,
    read_releases,
    schema_fingerprint,
    version_key,
)
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.session.broker_address import open_admin
from relax_events.topics import TopicPlan

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
    found = []
    for fingerprint, schema in read_published_schemas(config):
        name = name_of(schema)
        if name in current.schemas:
            found += compare(
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
            found.append(
                Incompatibility(name, "", what, "read them with the release that wrote them")
            )
    return found


def read_published_schemas(config: RunConfig) -> Iterator[tuple[str, Schema]]:
    """Read each schema that writers of a run have published, with its fingerprint; invalid ones are
    logged and left out.
    """
    topic = TopicPlan.from_config(config).topic("control.schemas")
    admin = open_admin(config, name="schemas")
    is_there = topic in admin.topics(topic)
    admin.close()
    if not is_there:
        raise ConfigError(
            f"the broker has no topics of a run {config.run.id!r}; see run.id and "
            "broker.bootstrap_servers"
        )
    codec, found = EventCodec(), dict[str, Schema]()
    reader = LogReader(Connection.from_config(config.broker, client_id=f"{config.run.id}.schemas"))
    try:
        for record in reader.read_to_end([(topic, 0)]):
            if not record.value:
                continue
            try:
                codec.learn(record.value, key=record.key)
            except SchemaError as error:
                log.warning("record.decode_failed", location=record.location, error=str(error))
            else:
                found.setdefault(
                    record.key,
                    {
                        name: part
                        for name, part in json.loads(record.value).items()
                        if name != REGISTRY_IDS
                    },
                )
    finally:
        reader.close()
    yield from found.items()


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
    known = {
        schema_fingerprint(schema)
        for release in read_releases(directory)
        for schema in release.schemas.values()
    }
    return sorted(
        name
        for name, schema in current_release(directory).schemas.items()
        if schema_fingerprint(schema) not in known
    )
