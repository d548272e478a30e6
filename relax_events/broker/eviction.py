"""Ends the membership that a worker's predecessor left behind, so that its partitions are free at once.

A broker takes a dead member for a live one until its session is over, and one that was restarted may never look again (seen with
Kafka 4.3.1). But a worker id is one process's at a time: a member of that name that is there before we join is dead, or a zombie.

Source: Kafka protocol guide (FindCoordinator v1, ConsumerGroupHeartbeat v0); leaving by heartbeat: KIP-848.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import structlog

from relax_events.broker.admin import Admin
from relax_events.broker.connection import Connection
from relax_events.broker.wire import Wire, compact_text, text
from relax_events.errors import BrokerError, BrokerUnavailable

log = structlog.get_logger()
FIND_COORDINATOR, CONSUMER_GROUP_HEARTBEAT = 10, 68
LEAVING, UNCHANGED = -1, -1
OF_A_GROUP = 0
GONE = {25, 69}  # the member, or the group, is not known any more


def evict_predecessors(connection: Connection, consumer_group: str) -> int:
    """End all memberships in a consumer group that bear our client id; call it before joining. Return how many there were.

    What fails is logged and left to the session timeout.
    """
    admin = Admin(connection)
    try:
        group = admin.groups(consumer_group).get(consumer_group)
        mine = [member.member_id for member in group.members if member.client_id == connection.client_id] if group else []
        if mine:
            with Wire(_coordinator_of(connection, consumer_group)) as wire:
                for member_id in mine:
                    _leave(wire, consumer_group, member_id)
            log.info("predecessors.evicted", consumer_group=consumer_group, num_members=len(mine))
    except BrokerError as error:
        log.warning("predecessors.left", consumer_group=consumer_group, error=str(error))
        return 0
    finally:
        admin.close()
    return len(mine)


def _coordinator_of(connection: Connection, consumer_group: str) -> Connection:
    with Wire(connection) as wire:
        answer = wire.ask(FIND_COORDINATOR, 1, text(consumer_group) + struct.pack(">b", OF_A_GROUP))
    answer.take("i")
    error, _, _ = answer.take("h"), answer.text(), answer.take("i")
    if error:
        raise BrokerUnavailable(f"the coordinator of {consumer_group} is not known (error {error})")
    return replace(connection, bootstrap_servers=f"{answer.text()}:{answer.take('i')}")


def _leave(wire: Wire, consumer_group: str, member_id: str) -> None:
    names = compact_text(consumer_group) + compact_text(member_id)
    nothing_new = compact_text(None) * 2 + struct.pack(">i", UNCHANGED) + compact_text(None) * 3
    answer = wire.ask(CONSUMER_GROUP_HEARTBEAT, 0, names + struct.pack(">i", LEAVING) + nothing_new + b"\0", is_flexible=True)
    answer.take("i")
    error = answer.take("h")
    if error and error not in GONE:
        raise BrokerError(f"member {member_id} of {consumer_group} could not be ended (error {error})")
