"""Asks the broker, not the client, who belongs to a consumer group and what each of its members
holds.

The admin client's own request for it never returns once its broker has come up anew (librdkafka
2.16).

Source: Kafka protocol guide (FindCoordinator v1, ConsumerGroupDescribe v0).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import structlog

from relax_events.errors import BrokerError, BrokerUnavailable, ClientFailed
from relax_events.kafka.base_consumer import Place
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.client import Reader, Wire, compact_text, text

log = structlog.get_logger()
FIND_COORDINATOR, CONSUMER_GROUP_DESCRIBE = 10, 69
OF_A_GROUP = 0
COMING_UP = {14, 15, 16}  # the coordinator loads, or has moved
NO_GROUP = 69
ANSWER_SECONDS = 5.0
LOOK_SECONDS, MAX_MISMATCHES = 6.0, 1
MIN_UNREAD_LOOKS = 2


@dataclass(frozen=True, slots=True)
class Membership:
    """A member as its group's coordinator knows it, and the (topic, partition) places that it may
    read.
    """

    member_id: str
    client_id: str
    places: frozenset[Place]


class MembershipWatch:
    """Sees whether the broker takes a quiet client for a member, with what it holds: a client can
    forget to join anew.

    Seen with librdkafka 2.16 after its broker had stood still for longer than the session:
    partitions lost, and never asked for again.
    """

    def __init__(self, connection: Connection, consumer_group: str) -> None:
        self._connection, self._consumer_group = connection, consumer_group
        self._num_mismatches = self._num_unread_looks = 0
        self._unread: Mapping[Place, int] = {}
        self.hear()

    @property
    def is_due(self) -> bool:
        """Whether the client has been quiet for so long that it is time to look."""
        return time.monotonic() >= self._looks_at

    def hear(self) -> None:
        """Note that records came, or that we have looked."""
        self._looks_at = time.monotonic() + LOOK_SECONDS

    def look_at_unread(self, unread: Mapping[Place, int]) -> bool:
        """Take in behind which positions the log goes on, although nothing came; return whether
        that is suspicious and should be proven now.

        It is after a while, and then again at waits that double, since a proof may fail on a
        machine that is busy. Seen with librdkafka 2.16 after a broker in a container was stopped
        and started: one of eight partitions was fetched no more.
        """
        self._num_unread_looks = (
            self._num_unread_looks + 1 if unread and unread == self._unread else 0
        )
        self._unread = unread
        return (
            self._num_unread_looks >= MIN_UNREAD_LOOKS and self._num_unread_looks.bit_count() == 1
        )

    def look(self, member_id: str, held: frozenset[Place]) -> None:
        """Compare what the client holds with what the coordinator says, where that can be reached.

        Raises:
            ClientFailed: They differed the last time too: no rebalance takes that long.
        """
        self.hear()
        try:
            members = memberships(self._connection, self._consumer_group)
        except BrokerError as error:
            log.debug("membership.unknown", consumer_group=self._consumer_group, error=str(error))
            return
        given = next((member.places for member in members if member.member_id == member_id), None)
        if given == held:
            self._num_mismatches = 0
            return
        self._num_mismatches += 1
        found = (
            "does not know this client"
            if given is None
            else f"gave this client {len(given)} partitions"
        )
        log.warning(
            "membership.mismatch",
            consumer_group=self._consumer_group,
            broker=found,
            num_held=len(held),
        )
        if self._num_mismatches > MAX_MISMATCHES:
            raise ClientFailed(
                f"the coordinator of {self._consumer_group} {found}, which holds "
                f"{len(held)}; the worker must start again to go on"
            )


def coordinator_of(connection: Connection, consumer_group: str) -> Connection:
    """Return how to reach the broker that keeps a group, which answers within `ANSWER_SECONDS` or
    not at all.

    Raises:
        BrokerUnavailable: It is not known yet.
    """
    impatient = replace(
        connection, request_timeout_seconds=min(connection.request_timeout_seconds, ANSWER_SECONDS)
    )
    with Wire(impatient) as wire:
        answer = wire.ask(FIND_COORDINATOR, 1, text(consumer_group) + struct.pack(">b", OF_A_GROUP))
    answer.take("i")
    error, _, _ = answer.take("h"), answer.text(), answer.take("i")
    if error:
        raise BrokerUnavailable(f"the coordinator of {consumer_group} is not known (error {error})")
    return replace(impatient, bootstrap_servers=f"{answer.text()}:{answer.take('i')}")


def memberships(connection: Connection, consumer_group: str) -> list[Membership]:
    """Return a group's members; none where there is no such group.

    Raises:
        BrokerUnavailable: The broker is not there, or not ready.
        BrokerError: It does not tell us.
    """
    with Wire(coordinator_of(connection, consumer_group)) as wire:
        return memberships_by(wire, consumer_group)


def memberships_by(wire: Wire, consumer_group: str) -> list[Membership]:
    """Return the same by a connection to the coordinator."""
    one_group = b"\x02" + compact_text(consumer_group)
    answer = wire.ask(CONSUMER_GROUP_DESCRIBE, 0, one_group + b"\0\0", is_flexible=True)
    answer.take("i")
    (members,) = answer.compact_array(partial(_group, answer))
    return members


def _group(answer: Reader) -> list[Membership]:
    error, why, name = answer.take("h"), answer.compact_text(), answer.compact_text()
    if error in COMING_UP:
        raise BrokerUnavailable(f"the coordinator of {name} is not ready (error {error})")
    if error and error != NO_GROUP:
        raise BrokerError(f"the members of {name} could not be listed (error {error}: {why})")
    _state, _epoch, _assignment_epoch, _assignor = (
        answer.compact_text(),
        answer.take("i"),
        answer.take("i"),
        answer.compact_text(),
    )
    members = answer.compact_array(partial(_member, answer))
    answer.take("i")
    answer.skip_tags()
    return members


def _member(answer: Reader) -> Membership:
    member_id, _instance, _rack, _epoch = (
        answer.compact_text(),
        answer.compact_text(),
        answer.compact_text(),
        answer.take("i"),
    )
    client_id, _host = answer.compact_text(), answer.compact_text()
    answer.compact_array(answer.compact_text)
    answer.compact_text()
    current, _target = _assignment(answer), _assignment(answer)
    answer.skip_tags()
    return Membership(member_id or "", client_id or "", current)


def _assignment(answer: Reader) -> frozenset[Place]:
    topics = answer.compact_array(partial(_partitions, answer))
    answer.skip_tags()
    return frozenset(place for places in topics for place in places)


def _partitions(answer: Reader) -> list[Place]:
    answer.take("16s")
    topic, partitions = answer.compact_text() or "", answer.compact_array(partial(answer.take, "i"))
    answer.skip_tags()
    return [(topic, partition) for partition in partitions]
