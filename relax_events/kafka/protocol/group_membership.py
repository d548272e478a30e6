"""Reads the members of a consumer group from its coordinator, and evicts members that a worker's
predecessor left behind.

Reading: the admin client's request never returns after a restart of its broker (librdkafka 2.16),
so this file sends FindCoordinator and ConsumerGroupDescribe itself.

Evicting: a broker keeps a dead member until its session expires, and a restarted broker may never
check it again (seen with Kafka 4.3.1). A worker id belongs to one process at a time, so an existing
member with our client id is dead or a zombie. It is removed by a leaving heartbeat, and its
partitions are free at once.

Source: Kafka protocol guide (FindCoordinator v1, ConsumerGroupDescribe v0, ConsumerGroupHeartbeat
v0); leaving by heartbeat: KIP-848.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import structlog

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerUnavailable, ClientFailed
from relax_events.kafka.connection import Connection, retry_while_unavailable
from relax_events.kafka.protocol.client import (
    KafkaProtocolClient,
    ResponseReader,
    encode_compact_string,
    encode_string,
)
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()
FIND_COORDINATOR, CONSUMER_GROUP_DESCRIBE = 10, 69
GROUP_COORDINATOR, TRANSACTION_COORDINATOR = 0, 1
NOT_READY = {14, 15, 16}  # the coordinator is loading or has moved
NO_GROUP = 69
RESPONSE_SECONDS = 5.0
CHECK_SECONDS, MAX_MISMATCHES = 6.0, 1
MEMBERS_PER_CHECK = 32
"""A check reads all members of the group: in a group larger than this, members check less often, so
that what all of them read grows with the group and not with its square."""
MIN_UNREAD_CHECKS = 2


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """A member and its assigned partitions, as known to the group's coordinator."""

    member_id: str
    client_id: str
    partitions: frozenset[TopicPartition]


def compute_check_seconds(num_members: int) -> float:
    """Return how long a member of a group of this size waits for its next check."""
    return CHECK_SECONDS * max(1.0, num_members / MEMBERS_PER_CHECK)


class MembershipMonitor:
    """Detects that the coordinator no longer knows a quiet client or its assignment.

    Seen with librdkafka 2.16 after a broker was suspended for longer than the session timeout: the
    client lost its partitions and never rejoined.
    """

    def __init__(self, connection: Connection, consumer_group: str) -> None:
        self._connection, self._consumer_group = connection, consumer_group
        self._num_mismatches = self._num_unread_checks = 0
        self._unread: Mapping[TopicPartition, int] = {}
        self._num_members = 0
        self.mark_active()

    @property
    def is_due(self) -> bool:
        """Whether the client has received no records for so long that a check is due."""
        return time.monotonic() >= self._check_at

    def mark_active(self) -> None:
        """Postpone the next check, after records arrived or after a check."""
        self._check_at = time.monotonic() + compute_check_seconds(self._num_members)

    def check_unread(self, unread: Mapping[TopicPartition, int]) -> bool:
        """Record which positions have unread records although none arrived; return whether to
        verify now.

        Verification is due after several equal checks, then at doubling intervals, because it may
        fail on a busy machine. Seen with librdkafka 2.16 after a broker's container was restarted:
        one of eight partitions was no longer fetched.
        """
        self._num_unread_checks = (
            self._num_unread_checks + 1 if unread and unread == self._unread else 0
        )
        self._unread = unread
        return (
            self._num_unread_checks >= MIN_UNREAD_CHECKS
            and self._num_unread_checks.bit_count() == 1
        )

    def check_assignment(self, member_id: str, held: frozenset[TopicPartition]) -> None:
        """Compare the client's assignment with the coordinator's, if the coordinator is reachable.

        Raises:
            ClientFailed: They differed at the last check too, which is longer than any rebalance.
        """
        self.mark_active()
        try:
            members = list_members(self._connection, self._consumer_group)
        except BrokerError as error:
            log.debug(
                "membership.read_failed", consumer_group=self._consumer_group, error=str(error)
            )
            return
        self._num_members = len(members)
        assigned_partitions = next(
            (member.partitions for member in members if member.member_id == member_id), None
        )
        if assigned_partitions == held:
            self._num_mismatches = 0
            return
        self._num_mismatches += 1
        self._check_at = time.monotonic() + CHECK_SECONDS  # in a large group too
        answer = (
            "does not know this client"
            if assigned_partitions is None
            else f"gave this client {len(assigned_partitions)} partitions"
        )
        log.warning(
            "membership.mismatch",
            consumer_group=self._consumer_group,
            broker=answer,
            num_held=len(held),
        )
        if self._num_mismatches > MAX_MISMATCHES:
            raise ClientFailed(
                f"the coordinator of {self._consumer_group} {answer}, which holds "
                f"{len(held)}; restart the worker"
            )


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
