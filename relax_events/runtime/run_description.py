"""Writes the resolved run file to the log and reads it back, so that a run can be replayed and
forked without its file. `ParentRun` is the parent of a replay or a fork, as its log describes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog
from pydantic import ValidationError

from relax_events import __version__
from relax_events.config import RunConfig
from relax_events.config.algorithm_spec import FromLog
from relax_events.config.devices import HostsConfig
from relax_events.config.hub_names import PREFIX
from relax_events.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    CorruptRecord,
    SchemaError,
)
from relax_events.events.codec import EventCodec
from relax_events.events.types import Event, RunDescribed, TrainStepCommitted
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.topics import TopicPlan
from relax_events.topics.names import COMMANDS, SCHEMAS, TRAIN_STEPS

LOCATION_KEYS = {
    "broker": {"bootstrap_servers", "client", "embedded_password_file"},
    "hosts": set(HostsConfig.model_fields),
}
"""Keys that say where a run is, and nothing of what it trains."""
SHAPE_KEYS = (
    "partitions_per_version",
    "queue_partitions",
    "replication_factor",
    "prompt_queue",
    "lease_seconds",
    "compression",
)
"""The described keys of the broker table: they define the topics, and hold no address and no
secret."""


def build_run_description(
    config: RunConfig,
    *,
    from_version: int | None = None,
    store_marker: str = "",
    chat_template: str = "",
    topic_ids: Mapping[str, str] | None = None,
) -> RunDescribed:
    """Return the description of a run for the log. Its folders are absolute, because its readers
    have other working directories.

    Args:
        config: The resolved run file.
        from_version: The newest policy version, from which these settings apply; None before the
            first.
        store_marker: Value of the object store's marker.
        chat_template: Text of the template that prompts are rendered by.
        topic_ids: Kafka's ids of the run's topics, by name.
    """
    tree = config.model_dump(mode="json")
    tree["broker"] = {key: tree["broker"][key] for key in SHAPE_KEYS}
    del tree["hosts"]
    path_keys = (
        ("run", "directory"),
        ("model", "path"),
        ("critic", "model_path"),
        ("teacher", "model_path"),
        ("judge", "model_path"),
    )
    for section, key in path_keys:
        tree[section][key] = _resolve(tree[section][key])
    for teacher in tree["teachers"].values():
        teacher["model_path"] = _resolve(teacher["model_path"])
    return RunDescribed(
        run_id=config.run.id,
        config=orjson.dumps(tree, option=orjson.OPT_SORT_KEYS).decode(),
        config_digest=digest_config(config),
        package_version=__version__,
        parent_run=config.parent.run or None,
        parent_version=config.parent.from_version if config.parent.run else None,
        from_version=from_version,
        store_marker=store_marker,
        chat_template=chat_template,
        topic_ids=dict(topic_ids or {}),
    )


def _resolve(path: str | None) -> str | None:
    """Return a folder as readers elsewhere know it: absolute, or by its name on the hub."""
    return path if path is None or path.startswith(PREFIX) else str(Path(path).resolve())


def digest_config(config: RunConfig) -> str:
    """Return the SHA-256 of a resolved run file, hexadecimal, without the broker's address and
    client settings.
    """
    tree = config.model_dump(mode="json", exclude=LOCATION_KEYS)
    return hashlib.sha256(orjson.dumps(tree, option=orjson.OPT_SORT_KEYS)).hexdigest()


def is_recorded(described: RunDescribed, history: Iterable[Event]) -> bool:
    """Return whether the newest description on the log has the same content."""
    newest = next(
        (event for event in reversed(list(history)) if isinstance(event, RunDescribed)), None
    )
    return newest is not None and _content(newest) == _content(described)


def _content(described: RunDescribed) -> tuple[Any, ...]:
    return (
        described.run_id,
        described.config,
        described.package_version,
        described.store_marker,
        described.chat_template,
        described.topic_ids,
    )


def read_described_config(
    described: RunDescribed, *, run_id: str, reader_config: RunConfig | None = None
) -> RunConfig:
    """Return the configuration of a description; its broker table has no address.

    Descriptions are untrusted: code that they name by path is not run, except the algorithm that
    the reader's own run file names.

    Args:
        described: The description on the log.
        run_id: The run whose log it is. Records that were imported under a new id contain the
            original one.
        reader_config: The reader's run file.
    Raises:
        ConfigError: It was written by a release whose keys this one does not know.
    """
    try:
        tree = orjson.loads(described.config)
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"the log's description of run {described.run_id} is not JSON: {error}; name a "
            "run file of your own"
        ) from None
    try:
        config = RunConfig.model_validate(
            tree,
            context=FromLog(
                reader_config.algorithm.name
                if reader_config and not reader_config.algorithm.is_unread
                else ""
            ),
        )
        return config if described.run_id == run_id else _moved(config, run_id)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(
            f"the log's description of run {described.run_id} does not fit this release at {key}: "
            f"{error.errors()[0]['msg']}; it was written by {described.package_version}, this is "
            f"{__version__}"
        ) from None


def _moved(config: RunConfig, run_id: str) -> RunConfig:
    """Return an imported run's configuration, whose references to the original run's store resolve
    to its own store.
    """
    objects = config.objects.model_copy(
        update={"uri_aliases": (*config.objects.uri_aliases, config.objects_uri)}
    )
    return config.model_copy(
        update={"run": config.run.model_copy(update={"id": run_id}), "objects": objects}
    )


def read_description(reader: LogReader, run_id: str) -> RunDescribed | None:
    """Return the newest description on a run's log, or None. The run's topics must exist."""
    codec, newest = read_codec(reader, run_id), None
    for record in _whole(reader, TopicPlan.build_topic_name(run_id, COMMANDS)):
        with suppress(CorruptRecord, SchemaError):
            event = codec.decode(record.value)
            newest = event if isinstance(event, RunDescribed) else newest
    return newest


def read_codec(reader: LogReader, run_id: str) -> EventCodec:
    """Return a codec with the schemas that the writers of a run have published."""
    codec = EventCodec()
    for record in _whole(reader, TopicPlan.build_topic_name(run_id, SCHEMAS)):
        if record.value:
            try:
                codec.learn(record.value, key=record.key)
            except SchemaError as error:
                log.warning("record.decode_failed", location=record.location, error=str(error))
    return codec


def _whole(reader: LogReader, topic: str) -> Iterator[Record]:
    return reader.stream({(topic, 0): reader.watermarks(topic, 0)})


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ParentRun:
    """A run as its log describes it."""

    config: RunConfig
    plan: TopicPlan
    connection: Connection
    given_uri: str = ""

    @property
    def objects_uri(self) -> str:
        """URI of its object store: given by the run that starts from it, else read from the
        log.
        """
        return self.given_uri or self.config.objects_uri

    @classmethod
    def read(
        cls, connection: Connection, run_id: str, *, child_config: RunConfig | None = None
    ) -> ParentRun:
        """Read a run's description.

        Args:
            connection: To the cluster.
            run_id: The run.
            child_config: Configuration of the run that starts from it, if it has a run file; see
                `read_described_config`.

        Raises:
            ConfigError: There is no such run, or its log holds no description of it.
        """
        reader = LogReader(connection)
        try:
            described = read_description(reader, run_id)
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            raise ConfigError(
                f"parent.run = {run_id!r} is not a run on {connection.bootstrap_servers}: "
                f"{error}; see relax runs show"
            ) from error
        finally:
            reader.close()
        if described is None:
            raise ConfigError(
                f"the log of run {run_id!r} holds no description of the run, like logs of earlier "
                "releases; start it again with this release: relax run RUN_FILE"
            )
        config = read_described_config(described, run_id=run_id, reader_config=child_config)
        return cls(
            config,
            TopicPlan.from_config(config),
            connection,
            child_config.parent.objects_uri if child_config else "",
        )

    def codec(self) -> EventCodec:
        """Return a codec with the schemas of the run's writers."""
        with closing(LogReader(self.connection)) as reader:
            return read_codec(reader, self.plan.run_id)

    def events(self, entity: str) -> Iterator[Event]:
        """Yield the committed events of a control topic up to its current end."""
        codec = self.codec()
        for record in self._records(entity):
            try:
                yield codec.decode(record.value)
            except (CorruptRecord, SchemaError) as error:
                log.warning("record.decode_failed", location=record.location, error=str(error))

    def steps(self) -> Iterator[TrainStepCommitted]:
        """Yield the train steps that the run has committed so far."""
        return (
            event for event in self.events(TRAIN_STEPS) if isinstance(event, TrainStepCommitted)
        )

    def _records(self, entity: str) -> Iterator[Record]:
        reader, topic_partition = LogReader(self.connection), (self.plan.topic(entity), 0)
        try:
            yield from reader.stream({topic_partition: reader.watermarks(*topic_partition)})
        finally:
            reader.close()
