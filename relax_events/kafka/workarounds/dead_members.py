"""A restarted broker may keep a dead member of a consumer group without end.

Seen with: Kafka 4.3.1. Report: none.

A broker keeps a dead member until its session expires, and a restarted broker may never check it
again. A worker id belongs to one process at a time, so an existing member with our client id is
dead or a zombie. This file removes it by a leaving heartbeat, and its partitions are free at once.
"""

from __future__ import annotations

import structlog

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError
from relax_events.kafka.connection import Connection, retry_while_unavailable
from relax_events.kafka.protocol.client import KafkaProtocolClient
from relax_events.kafka.protocol.group_membership import (
    end_membership,
    find_coordinator,
    request_members,
)

log = structlog.get_logger()
EVICTION_SECONDS, RETRY_SECONDS = 10.0, 0.25


def evict_predecessors(connection: Connection, consumer_group: str) -> int:
    """End all memberships of our client id in a consumer group; return their number. Call it before
    joining.

    Retries for `EVICTION_SECONDS` while the broker starts. A failure is logged and left to the
    session timeout.
    """
    try:
        return retry_while_unavailable(
            lambda: _evict(connection, consumer_group),
            Deadline(EVICTION_SECONDS),
            pause_seconds=RETRY_SECONDS,
        )
    except BrokerError as error:
        log.warning("predecessors.eviction_failed", consumer_group=consumer_group, error=str(error))
        return 0


def _evict(connection: Connection, consumer_group: str) -> int:
    with KafkaProtocolClient(find_coordinator(connection, consumer_group)) as client:
        mine = [
            member.member_id
            for member in request_members(client, consumer_group)
            if member.client_id == connection.client_id
        ]
        for member_id in mine:
            end_membership(client, consumer_group, member_id)
    if mine:
        log.info("predecessors.evicted", consumer_group=consumer_group, num_members=len(mine))
    return len(mine)
