"""librdkafka waits for records of a broker that no longer leads.

Seen with: librdkafka 2.16.0. Report: none.
Test: test_clients_that_read_only_from_an_isolated_leader_find_the_new_one.

A broker that is cut off from the others, but not from the clients, still says that it leads its
partitions, and sends no more records. A client that reads from it only did not find the new leader
within 70 s, because it asks the broker that it used last; a client that also reads from others
found it after half a minute. This file compares leaders with all brokers, and leaves outdated
brokers out of the addresses of a new client. The brokers are asked once for all clients of a
process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import structlog

from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.partition_leaders import (
    BrokerMetadata,
    Leader,
    find_outdated,
    read_metadata_from,
    read_metadata_of_each,
    select_newest_leaders,
)
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()
CHECK_SECONDS, CONFIRM_SECONDS = 10.0, 5.0
NO_LEADER = -1
CHANGE_SECONDS = 1.0
"""A new leader is known to all brokers that reach each other within so long."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What brokers named, and when; no leaders if none responded."""

    topics: frozenset[str]
    leaders: Mapping[TopicPartition, Leader]
    asked_at: float
    has_one_broker: bool = False


class LeaderWatch:
    """The leaders that the brokers name, for all clients of a process: each question opens a
    connection with a login, so an answer serves every client while it is new. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._topics: frozenset[str] = frozenset()
        self._turn = 0
        self._of_one: _Answer | None = None
        self._of_each: _Answer | None = None

    @classmethod
    def of(cls, connection: Connection) -> LeaderWatch:
        """Return the watch that all clients of a connection share."""
        watch: LeaderWatch = connection.shared.setdefault(cls, cls())
        return watch

    def read_one(self, connection: Connection, topics: Iterable[str]) -> _Answer:
        """Return what one broker names, another in each turn; the answer is younger than
        `CHECK_SECONDS`.
        """
        with self._lock:
            self._topics |= frozenset(topics)
            if (answer := self._of_one) is None or self._is_old(answer, CHECK_SECONDS):
                address = connection.addresses[self._turn % len(connection.addresses)]
                self._turn += 1
                brokers = read_metadata_from(connection, [address], sorted(self._topics))
                answer = self._of_one = self._answer(brokers)
            return answer

    def read_each(self, connection: Connection, topics: Iterable[str]) -> _Answer:
        """Return the newest leaders that any broker names; the answer is younger than
        `CONFIRM_SECONDS`.
        """
        with self._lock:
            self._topics |= frozenset(topics)
            if (answer := self._of_each) is None or self._is_old(answer, CONFIRM_SECONDS):
                brokers = read_metadata_of_each(connection, sorted(self._topics))
                answer = self._of_each = self._answer(brokers)
            return answer

    def _is_old(self, answer: _Answer, seconds: float) -> bool:
        return time.monotonic() >= answer.asked_at + seconds or not self._topics <= answer.topics

    def _answer(self, brokers: Mapping[str, BrokerMetadata]) -> _Answer:
        addresses = {address for metadata in brokers.values() for address in metadata.addresses}
        newest = select_newest_leaders(brokers.values())
        return _Answer(self._topics, newest, time.monotonic(), len(addresses) == 1)


class LeaderMonitor:
    """Compares the leaders that a client knows with the leaders that the brokers name, now and
    then: a client that receives records from one broker may wait for records of another.

    Not thread-safe: it belongs to the thread that polls the client.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._watch = connection, LeaderWatch.of(connection)
        self._known: Mapping[TopicPartition, int] = {}
        self._suspected: Mapping[TopicPartition, int] = {}
        self._check_at = time.monotonic() + CHECK_SECONDS

    @property
    def is_due(self) -> bool:
        """Whether a check is due."""
        return time.monotonic() >= self._check_at

    def find_newer_leaders(
        self,
        partitions: Collection[TopicPartition],
        read_known: Callable[[], Mapping[TopicPartition, int]],
    ) -> Mapping[TopicPartition, int]:
        """Return the leaders that the client does not know although the brokers named the same ones
        at the last check too, `CONFIRM_SECONDS` ago: no change of leaders takes so long.

        One broker is asked, in turn, and all configured ones once a difference was seen; the client
        is asked where a leader is named that it did not know at its last check.

        Args:
            partitions: What the client reads.
            read_known: Returns the node ids of the leaders that the client knows now; none if it
                can't say.
        Returns:
            The node ids of the leaders; empty if the client knows them, or no broker responds.
        """
        differing = self._compare(partitions, read_known) if partitions else {}
        is_confirmed = bool(differing) and differing == self._suspected
        self._suspected = differing
        self._check_at = time.monotonic() + (CONFIRM_SECONDS if differing else CHECK_SECONDS)
        return differing if is_confirmed else {}

    def _compare(
        self,
        partitions: Collection[TopicPartition],
        read_known: Callable[[], Mapping[TopicPartition, int]],
    ) -> Mapping[TopicPartition, int]:
        topics = {topic for topic, _ in partitions}
        if not self._suspected:
            answer = self._watch.read_one(self._connection, topics)
            is_known = self._known.keys() >= set(partitions) and _knows(self._known, answer.leaders)
            if answer.has_one_broker or is_known:
                return {}
            self._known = read_known()
            if _knows(self._known, answer.leaders):
                return {}
        else:
            self._known = read_known()
        newest = self._watch.read_each(self._connection, topics).leaders
        return {
            at: newest[at].node_id
            for at, node_id in self._known.items()
            if at in newest and newest[at].node_id not in {node_id, NO_LEADER}
        }


def _knows(
    known_leaders: Mapping[TopicPartition, int], leaders: Mapping[TopicPartition, Leader]
) -> bool:
    return all(
        leaders[at].node_id == node_id for at, node_id in known_leaders.items() if at in leaders
    )


def read_newest_leaders(
    connection: Connection, topics: Collection[str]
) -> dict[TopicPartition, int]:
    """Return the node ids of the partitions' leaders, by the broker whose metadata is newest; empty
    if no broker responds.
    """
    metadata = read_metadata_of_each(connection, topics)
    return {at: leader.node_id for at, leader in select_newest_leaders(metadata.values()).items()}


def leave_out_outdated_brokers(connection: Connection, topics: Collection[str]) -> Connection:
    """Return the connection without the addresses of brokers whose metadata of these topics is
    older than that of others, now and `CHANGE_SECONDS` later: a new client may start from any of
    them, and would believe it.

    With one address, which may stand for several brokers, the brokers that it lists replace it if
    one of them is outdated.
    """
    _, outdated = _ask_each(connection, topics)
    if not outdated:
        return connection
    time.sleep(CHANGE_SECONDS)
    addresses, still_outdated = _ask_each(connection, topics)
    outdated &= still_outdated
    candidates = connection.addresses if len(connection.addresses) > 1 else addresses
    current = [address for address in candidates if address not in outdated]
    if not outdated or not current:
        return connection
    log.warning("brokers.outdated", left_out=sorted(outdated), current=current)
    return replace(connection, bootstrap_servers=",".join(current))


def _ask_each(
    connection: Connection, topics: Collection[str]
) -> tuple[Collection[str], frozenset[str]]:
    """Return the addresses of the brokers that respond, and of the outdated among them."""
    metadata = read_metadata_of_each(connection, topics)
    return list(metadata), find_outdated(metadata, select_newest_leaders(metadata.values()))
