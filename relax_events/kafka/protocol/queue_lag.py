"""Asks the broker how many records of a share group's queue are not done: its members see no more
than what they are given.

librdkafka has no call for it.

Source: Kafka protocol guide (DescribeShareGroupOffsets v1, which Kafka has from 4.2 on; KIP-1226).
"""

from __future__ import annotations

from functools import partial

from relax_events.errors import BrokerError, BrokerUnavailable
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import Reader, Wire, compact_text
from relax_events.kafka.protocol.group_membership import COMING_UP, coordinator_of

DESCRIBE_SHARE_GROUP_OFFSETS = 90
ONE_GROUP, ALL_TOPICS, NO_TAGS = b"\x02", b"\0", b"\0"
UNKNOWN = -1


def queue_backlog(connection: Connection, group: str) -> int:
    """Return how many records of its topics a share group has not finished, those included that are
    held.

    A partition counts from when one of its records was finished: before, the broker keeps no state
    of the group there.

    Raises:
        BrokerUnavailable: The broker is not there, not ready, or does not know this request.
        BrokerError: It does not tell us.
    """
    body = ONE_GROUP + compact_text(group) + ALL_TOPICS + NO_TAGS + NO_TAGS
    with Wire(coordinator_of(connection, group)) as wire:
        answer = wire.ask(DESCRIBE_SHARE_GROUP_OFFSETS, 1, body, is_flexible=True)
    answer.take("i")
    (backlog,) = answer.compact_array(partial(_group, answer))
    return backlog


def _group(answer: Reader) -> int:
    name, topics = answer.compact_text(), answer.compact_array(partial(_topic, answer))
    error, why = answer.take("h"), answer.compact_text()
    answer.skip_tags()
    if error in COMING_UP:
        raise BrokerUnavailable(f"the coordinator of {name} is not ready (error {error})")
    if error:
        raise BrokerError(f"the backlog of {name} could not be told (error {error}: {why})")
    return sum(topics)


def _topic(answer: Reader) -> int:
    answer.compact_text()
    answer.take("16s")
    backlog = sum(answer.compact_array(partial(_partition, answer)))
    answer.skip_tags()
    return backlog


def _partition(answer: Reader) -> int:
    """Return the unfinished records of a partition; none where the broker does not know."""
    _partition, _start, _epoch, lag = (
        answer.take("i"),
        answer.take("q"),
        answer.take("i"),
        answer.take("q"),
    )
    _error, _why = answer.take("h"), answer.compact_text()
    answer.skip_tags()
    return 0 if lag == UNKNOWN else int(lag)
