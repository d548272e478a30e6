"""Reads how many records of a share group's queue are not finished.

Members see only the records that they receive, and librdkafka does not offer this request.

Source: Kafka protocol guide (DescribeShareGroupOffsets v1, which Kafka has from 4.2 on; KIP-1226).
"""

from __future__ import annotations

from functools import partial

from relax_events.errors import BrokerError, BrokerUnavailable
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import (
    KafkaProtocolClient,
    ResponseReader,
    encode_compact_string,
)
from relax_events.kafka.protocol.group_membership import NOT_READY, find_coordinator

DESCRIBE_SHARE_GROUP_OFFSETS = 90
ONE_GROUP, ALL_TOPICS, NO_TAGS = b"\x02", b"\0", b"\0"
UNKNOWN = -1


def read_queue_lag(connection: Connection, group: str) -> int:
    """Return the number of records that a share group has not finished, including leased ones.

    A partition counts once one of its records was finished: before, the broker keeps no state of
    the group there.

    Raises:
        BrokerUnavailable: The broker is unavailable, not ready, or does not support this request.
        BrokerError: The broker refuses the request.
    """
    body = ONE_GROUP + encode_compact_string(group) + ALL_TOPICS + NO_TAGS + NO_TAGS
    with KafkaProtocolClient(find_coordinator(connection, group)) as client:
        response = client.request(DESCRIBE_SHARE_GROUP_OFFSETS, 1, body, is_flexible=True)
    response.read_int32()
    (backlog,) = response.read_compact_array(partial(_read_group, response))
    return backlog


def _read_group(response: ResponseReader) -> int:
    name, topics = (
        response.read_compact_string(),
        response.read_compact_array(partial(_read_topic, response)),
    )
    error, why = response.read_int16(), response.read_compact_string()
    response.skip_tagged_fields()
    if error in NOT_READY:
        raise BrokerUnavailable(f"the coordinator of {name} is not ready (error {error})")
    if error:
        raise BrokerError(f"the lag of {name} could not be read (error {error}: {why})")
    return sum(topics)


def _read_topic(response: ResponseReader) -> int:
    response.read_compact_string()
    response.read_uuid()
    backlog = sum(response.read_compact_array(partial(_read_partition, response)))
    response.skip_tagged_fields()
    return backlog


def _read_partition(response: ResponseReader) -> int:
    """Read the number of unfinished records of a partition; 0 when the broker does not know it."""
    _partition, _start, _epoch, lag = (
        response.read_int32(),
        response.read_int64(),
        response.read_int32(),
        response.read_int64(),
    )
    _error, _why = response.read_int16(), response.read_compact_string()
    response.skip_tagged_fields()
    return 0 if lag == UNKNOWN else int(lag)
