"""Ends the group memberships of a worker's predecessor, so that its partitions are free at once.

A broker keeps a dead member until its session expires, and a restarted broker may never check it
again (seen with Kafka 4.3.1). A worker id belongs to one process at a time, so an existing member
with our client id is dead or a zombie.

Source: Kafka protocol guide (ConsumerGroupHeartbeat v0); leaving by heartbeat: KIP-848.
"""

from __future__ import annotations

import struct

import structlog

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerUnavailable
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import KafkaProtocolClient, encode_compact_string
from relax_events.kafka.protocol.group_membership import (
    NO_GROUP,
    NOT_READY,
    find_coordinator,
    request_members,
)
from relax_events.kafka.retry import retry_while_unavailable

log = structlog.get_logger()
CONSUMER_GROUP_HEARTBEAT = 68
LEAVING, UNCHANGED = -1, -1
GONE = {25, NO_GROUP}  # the member or the group no longer exists
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
            _leave(client, consumer_group, member_id)
    if mine:
        log.info("predecessors.evicted", consumer_group=consumer_group, num_members=len(mine))
    return len(mine)


def _leave(client: KafkaProtocolClient, consumer_group: str, member_id: str) -> None:
    names = encode_compact_string(consumer_group) + encode_compact_string(member_id)
    nothing_new = (
        encode_compact_string(None) * 2
        + struct.pack(">i", UNCHANGED)
        + encode_compact_string(None) * 3
    )
    response = client.request(
        CONSUMER_GROUP_HEARTBEAT,
        0,
        names + struct.pack(">i", LEAVING) + nothing_new + b"\0",
        is_flexible=True,
    )
    response.read_int32()
    error = response.read_int16()
    if error in NOT_READY:
        raise BrokerUnavailable(f"the coordinator of {consumer_group} is not ready (error {error})")
    if error and error not in GONE:
        raise BrokerError(
            f"member {member_id} of {consumer_group} could not be ended (error {error})"
        )
