"""Reads the members of a consumer group from its coordinator, and ends memberships.

librdkafka can't end another client's membership, and its request for members does not return after
a restart of the broker.

Source: Kafka protocol guide (FindCoordinator v1, ConsumerGroupDescribe v0, ConsumerGroupHeartbeat
v0); leaving by heartbeat: KIP-848.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import partial

from relax_events.errors import BrokerError, BrokerUnavailable
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import (
    KafkaProtocolClient,
    ResponseReader,
    encode_compact_string,
    encode_string,
)
from relax_events.topics.partitions import TopicPartition

FIND_COORDINATOR, CONSUMER_GROUP_DESCRIBE = 10, 69
GROUP_COORDINATOR, TRANSACTION_COORDINATOR = 0, 1
NOT_READY = {14, 15, 16}  # the coordinator is loading or has moved
NO_GROUP = 69
RESPONSE_SECONDS = 5.0
CONSUMER_GROUP_HEARTBEAT = 68
LEAVING, UNCHANGED = -1, -1
GONE = {25, NO_GROUP}  # the member or the group no longer exists


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """A member and its assigned partitions, as known to the group's coordinator."""

    member_id: str
    client_id: str
    partitions: frozenset[TopicPartition]


def find_coordinator(
    connection: Connection, name: str, *, kind: int = GROUP_COORDINATOR
) -> Connection:
    """Return a connection to the coordinator of a group or of a transactional id, with a request
    timeout of at most `RESPONSE_SECONDS`.

    Raises:
        BrokerUnavailable: The coordinator is not known yet.
    """
    impatient = connection.with_timeout_of_at_most(RESPONSE_SECONDS)
    with KafkaProtocolClient(impatient) as client:
        response = client.request(
            FIND_COORDINATOR,
            1,
            encode_string(name) + struct.pack(">b", kind),
        )
    response.read_int32()
    error, _, _ = response.read_int16(), response.read_string(), response.read_int32()
    if error:
        raise BrokerUnavailable(f"the coordinator of {name} is not known (error {error})")
    return replace(impatient, bootstrap_servers=f"{response.read_string()}:{response.read_int32()}")


def find_coordinators(connection: Connection, name: str, *, kind: int) -> list[Connection]:
    """Return connections to all brokers that one of the configured brokers names as the
    coordinator: a broker that is isolated from the others still names itself.

    Raises:
        BrokerUnavailable: No broker knows the coordinator.
    """
    coordinators: dict[str, Connection] = {}
    failure: BrokerUnavailable | None = None
    for address in connection.addresses:
        try:
            one = find_coordinator(replace(connection, bootstrap_servers=address), name, kind=kind)
        except BrokerUnavailable as error:
            failure = error
        else:
            coordinators[one.bootstrap_servers] = one
    if not coordinators and failure is not None:
        raise failure
    return list(coordinators.values())


def list_members(connection: Connection, consumer_group: str) -> list[GroupMembership]:
    """Return a group's members; empty when the group does not exist.

    Raises:
        BrokerUnavailable: The coordinator is unavailable or not ready.
        BrokerError: The coordinator refuses the request.
    """
    with KafkaProtocolClient(find_coordinator(connection, consumer_group)) as client:
        return request_members(client, consumer_group)


def request_members(client: KafkaProtocolClient, consumer_group: str) -> list[GroupMembership]:
    """Return a group's members over an open connection to its coordinator."""
    one_group = b"\x02" + encode_compact_string(consumer_group)
    response = client.request(CONSUMER_GROUP_DESCRIBE, 0, one_group + b"\0\0", is_flexible=True)
    response.read_int32()
    (members,) = response.read_compact_array(partial(_read_group, response))
    return members


def _read_group(response: ResponseReader) -> list[GroupMembership]:
    error, why, name = (
        response.read_int16(),
        response.read_compact_string(),
        response.read_compact_string(),
    )
    if error in NOT_READY:
        raise BrokerUnavailable(f"the coordinator of {name} is not ready (error {error})")
    if error and error != NO_GROUP:
        raise BrokerError(f"the members of {name} could not be listed (error {error}: {why})")
    _state, _epoch, _assignment_epoch, _assignor = (
        response.read_compact_string(),
        response.read_int32(),
        response.read_int32(),
        response.read_compact_string(),
    )
    members = response.read_compact_array(partial(_read_member, response))
    response.read_int32()
    response.skip_tagged_fields()
    return members


def _read_member(response: ResponseReader) -> GroupMembership:
    member_id, _instance, _rack, _epoch = (
        response.read_compact_string(),
        response.read_compact_string(),
        response.read_compact_string(),
        response.read_int32(),
    )
    client_id, _host = response.read_compact_string(), response.read_compact_string()
    response.read_compact_array(response.read_compact_string)
    response.read_compact_string()
    current, _target = _read_assignment(response), _read_assignment(response)
    response.skip_tagged_fields()
    return GroupMembership(member_id or "", client_id or "", current)


def _read_assignment(response: ResponseReader) -> frozenset[TopicPartition]:
    topics = response.read_compact_array(partial(_read_partitions, response))
    response.skip_tagged_fields()
    return frozenset(partition for partitions in topics for partition in partitions)


def _read_partitions(response: ResponseReader) -> list[TopicPartition]:
    response.read_uuid()
    topic, partitions = (
        response.read_compact_string() or "",
        response.read_compact_array(response.read_int32),
    )
    response.skip_tagged_fields()
    return [(topic, partition) for partition in partitions]


def end_membership(client: KafkaProtocolClient, consumer_group: str, member_id: str) -> None:
    """End a membership by a leaving heartbeat; its partitions are free at once.

    Raises:
        BrokerUnavailable: The coordinator is not ready.
        BrokerError: The coordinator refuses the request.
    """
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
