"""Ends the membership that a worker's predecessor left behind, so that its partitions are free at
once.

A broker takes a dead member for a live one until its session is over, and one that was restarted
may never look again (seen with Kafka 4.3.1). But a worker id is one process's at a time: a member
of that name that is there before we join is dead, or a zombie.

Source: Kafka protocol guide (ConsumerGroupHeartbeat v0); leaving by heartbeat: KIP-848.
"""

from __future__ import annotations

import struct
import time

import structlog

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerUnavailable
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import Wire, compact_text
from relax_events.kafka.protocol.group_membership import (
    COMING_UP,
    NO_GROUP,
    coordinator_of,
    memberships_by,
)

log = structlog.get_logger()
CONSUMER_GROUP_HEARTBEAT = 68
LEAVING, UNCHANGED = -1, -1
GONE = {25, NO_GROUP}  # the member, or the group, is not known any more
EVICTION_SECONDS, RETRY_SECONDS = 10.0, 0.25


def evict_predecessors(connection: Connection, consumer_group: str) -> int:
    """End all memberships in a consumer group that bear our client id; call it before joining.
    Return how many there were.

    A broker that has just come up is asked again for `EVICTION_SECONDS`. What fails then is logged
    and left to the session timeout.
    """
    deadline = Deadline(EVICTION_SECONDS)
    while True:
        try:
            num_evicted = _evict(connection, consumer_group)
        except BrokerUnavailable as error:
            if deadline.passed:
                log.warning("predecessors.left", consumer_group=consumer_group, error=str(error))
                return 0
            time.sleep(RETRY_SECONDS)
        except BrokerError as error:
            log.warning("predecessors.left", consumer_group=consumer_group, error=str(error))
            return 0
        else:
            return num_evicted


def _evict(connection: Connection, consumer_group: str) -> int:
    with Wire(coordinator_of(connection, consumer_group)) as wire:
        mine = [
            member.member_id
            for member in memberships_by(wire, consumer_group)
            if member.client_id == connection.client_id
        ]
        for member_id in mine:
            _leave(wire, consumer_group, member_id)
    if mine:
        log.info("predecessors.evicted", consumer_group=consumer_group, num_members=len(mine))
    return len(mine)


def _leave(wire: Wire, consumer_group: str, member_id: str) -> None:
    names = compact_text(consumer_group) + compact_text(member_id)
    nothing_new = compact_text(None) * 2 + struct.pack(">i", UNCHANGED) + compact_text(None) * 3
    answer = wire.ask(
        CONSUMER_GROUP_HEARTBEAT,
        0,
        names + struct.pack(">i", LEAVING) + nothing_new + b"\0",
        is_flexible=True,
    )
    answer.take("i")
    error = answer.take("h")
    if error in COMING_UP:
        raise BrokerUnavailable(f"the coordinator of {consumer_group} is not ready (error {error})")
    if error and error not in GONE:
        raise BrokerError(
            f"member {member_id} of {consumer_group} could not be ended (error {error})"
        )
