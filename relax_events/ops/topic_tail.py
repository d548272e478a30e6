"""Follows the decoded records of one topic, from a start that the user names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from relax_events.config import RunSection
from relax_events.errors import ConfigError, CorruptRecord, SchemaError
from relax_events.events.parts import StoredArray
from relax_events.history.run_log import RunLog
from relax_events.kafka.admin import Admin
from relax_events.kafka.records import Record
from relax_events.ops.offset_reset import find_version_offsets, parse_time_ms
from relax_events.topics.names import SAMPLE_TOPICS, SCHEMAS
from relax_events.topics.partitions import TopicPartition

FORMS = "beginning, end, an offset, version:V or a time like 2026-01-31T12:00:00Z"
MAX_LISTED = 16


@dataclass(frozen=True, slots=True)
class TailedRecord:
    """A record with its content: `event` is its event's name and `fields` the content, or `error`
    is the reason why it can't be read.
    """

    record: Record
    event: str
    fields: dict[str, Any]
    error: str = ""


def find_partitions(
    run: RunSection, admin: Admin, entity: str, *, partition: int | None
) -> list[TopicPartition]:
    """Return the partitions of a topic of the run.

    Args:
        run: The run.
        admin: Of its broker.
        entity: For example `rollout.samples`, or a topic's full name.
        partition: Only this one.
    Raises:
        ConfigError: The run has no such topic or partition; the text lists the run's topics.
    """
    prefix = f"relax.{run.id}."
    topic_states = admin.topics(prefix)
    name = entity if entity.startswith(prefix) else prefix + entity
    if name not in topic_states:
        raise ConfigError(
            f"run {run.id} has no topic {entity!r}; it has "
            f"{', '.join(topic.removeprefix(prefix) for topic in sorted(topic_states))}"
        )
    count = topic_states[name].num_partitions
    if partition is not None and not 0 <= partition < count:
        raise ConfigError(f"topic {name} has partitions 0 to {count - 1}, got {partition}")
    return [(name, number) for number in (range(count) if partition is None else [partition])]


def find_start_offsets(
    log: RunLog, admin: Admin, topic_partitions: list[TopicPartition], text: str
) -> dict[TopicPartition, int]:
    """Return the start offset of each partition.

    Args:
        log: The run's log.
        admin: Of its broker.
        topic_partitions: The partitions.
        text: One of `FORMS`.
    Raises:
        ConfigError: The text has no such form, or the topic is not ordered by version.
    """
    begins, ends = admin.beginning_offsets(topic_partitions), admin.end_offsets(topic_partitions)
    if text in ("beginning", "end"):
        return begins if text == "beginning" else ends
    if text.startswith("version:"):
        return _version_starts(log, topic_partitions, text, ends)
    if text.isdecimal():
        offsets = dict.fromkeys(topic_partitions, int(text))
    else:
        try:
            offsets = admin.offsets_at(topic_partitions, timestamp_ms=parse_time_ms(text))
        except ConfigError:
            raise ConfigError(f"--from {text!r} is no start; give {FORMS}") from None
    return {
        topic_partition: min(max(offset, begins[topic_partition]), ends[topic_partition])
        for topic_partition, offset in offsets.items()
    }


def _version_starts(
    log: RunLog,
    topic_partitions: list[TopicPartition],
    text: str,
    ends: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    version = text.removeprefix("version:")
    if not version.isdecimal():
        raise ConfigError(f"--from {text!r} names no version; give {FORMS}")
    if log.plan.parse_entity(topic_partitions[0][0]) not in SAMPLE_TOPICS:
        raise ConfigError(
            f"topic {topic_partitions[0][0]} is not ordered by version; topics ordered by version: "
            f"{', '.join(SAMPLE_TOPICS)}"
        )
    published = [record.event for record in log.versions.values()]
    return find_version_offsets(
        log.plan, published, topic_partitions, version=int(version), ends=ends
    )


def tail(
    log: RunLog,
    starts: Mapping[TopicPartition, int],
    *,
    stops: Mapping[TopicPartition, int] | None = None,
) -> Iterator[TailedRecord]:
    """Read records from here on: forever as they come, or up to `stops`."""
    if stops is not None:
        records: Iterator[Record | None] = log.records(
            {
                topic_partition: (start, stops[topic_partition])
                for topic_partition, start in starts.items()
            }
        )
    else:
        records = log.follow(starts)
    for record in records:
        if record is not None:
            yield read_record(log, record)


def read_record(log: RunLog, record: Record) -> TailedRecord:
    """Decode a record, or return it with the reason why it can't be decoded."""
    if not record.value:
        return TailedRecord(record, "tombstone", {})
    if log.plan.parse_entity(record.topic) == SCHEMAS:
        return TailedRecord(record, "schema", {"schema": record.value.decode("utf-8", "replace")})
    try:
        event = log.codec.decode(record.value)
    except (CorruptRecord, SchemaError) as error:
        return TailedRecord(record, "unreadable", {}, str(error))
    return TailedRecord(
        record,
        type(event).__name__,
        {item.name: to_json(getattr(event, item.name)) for item in dataclasses.fields(event)},
    )


def to_json(value: Any) -> Any:
    """Return a field as a JSON value; a long array by its type and shape."""
    if isinstance(value, StoredArray):
        return {"dtype": value.dtype, "shape": list(value.shape), "uri": value.reference.uri}
    if isinstance(value, np.ndarray):
        return (
            value.tolist()
            if value.size <= MAX_LISTED
            else {"dtype": value.dtype.str, "shape": list(value.shape)}
        )
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return value
