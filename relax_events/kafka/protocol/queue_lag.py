"""Reads how far a share group is with its queue: its start, and the records that are not finished.

Members see only the records that they receive, and librdkafka does not offer this request.

Source: Kafka protocol guide (DescribeShareGroupOffsets v1, which Kafka has from 4.2 on; KIP-1226).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from relax_events.errors import BrokerError, BrokerUnavailable
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import (
    KafkaProtocolClient,
    ResponseReader,
    encode_compact_string,
)
from relax_events.kafka.protocol.group_membership import NO_GROUP, NOT_READY, find_coordinator
from relax_events.topics.partitions import TopicPartition

DESCRIBE_SHARE_GROUP_OFFSETS = 90
ONE_GROUP, ALL_TOPICS, NO_TAGS = b"\x02", b"\0", b"\0"
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """How far a share group is with a partition: all records below `start` are finished, and
    `num_unfinished` of the later ones are not, including leased ones.
    """

    start: int
    num_unfinished: int


def read_queue_positions(connection: Connection, group: str) -> dict[TopicPartition, QueuePosition]:
    """Return how far a share group is in each partition of its queue.

    A partition is missing until one of its records was finished: before, the broker keeps no state
    of the group there, and all its records wait.

    Raises:
        BrokerUnavailable: The broker is unavailable, not ready, or does not support this request.
        BrokerError: The broker refuses the request.
    """
    body = ONE_GROUP + encode_compact_string(group) + ALL_TOPICS + NO_TAGS + NO_TAGS
    with KafkaProtocolClient(find_coordinator(connection, group)) as client:
        response = client.request(DESCRIBE_SHARE_GROUP_OFFSETS, 1, body, is_flexible=True)
    response.read_int32()
    (positions,) = response.read_compact_array(partial(_read_group, response))
    return positions


def _read_group(response: ResponseReader) -> dict[TopicPartition, QueuePosition]:
    name, topics = (
        response.read_compact_string(),
        response.read_compact_array(partial(_read_topic, response)),
    )
    error, why = response.read_int16(), response.read_compact_string()
    response.skip_tagged_fields()
    if error in NOT_READY:
        raise BrokerUnavailable(f"the coordinator of {name} is not ready (error {error})")
    if error not in (0, NO_GROUP):
        raise BrokerError(f"the lag of {name} could not be read (error {error}: {why})")
    return {topic_partition: position for topic in topics for topic_partition, position in topic}


def _read_topic(response: ResponseReader) -> list[tuple[TopicPartition, QueuePosition]]:
    topic, _uuid = response.read_compact_string() or "", response.read_uuid()
    partitions = response.read_compact_array(partial(_read_partition, response))
    response.skip_tagged_fields()
    return [
        ((topic, partition), position)
        for partition, position in partitions
        if position.num_unfinished != UNKNOWN
    ]


def _read_partition(response: ResponseReader) -> tuple[int, QueuePosition]:
    partition, start, _epoch, lag = (
        response.read_int32(),
        response.read_int64(),
        response.read_int32(),
        response.read_int64(),
    )
    _error, _why = response.read_int16(), response.read_compact_string()
    response.skip_tagged_fields()
    return partition, QueuePosition(start, lag)
