"""librdkafka waits for records of a broker that no longer leads.

Seen with: librdkafka 2.16.0. Report: none.
Test: test_clients_that_read_only_from_an_isolated_leader_find_the_new_one.

A broker that is cut off from the others, but not from the clients, still says that it leads its
partitions, and sends no more records. A client that reads from it only did not find the new leader
within 70 s, because it asks the broker that it used last; a client that also reads from others
found it after half a minute. This file compares leaders with all brokers, and leaves outdated
brokers out of the addresses of a new client.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

import structlog

from relax_events.errors import RelaxError
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.partition_leaders import (
    Leader,
    find_outdated,
    read_metadata,
    read_metadata_of_each,
    select_newest_leaders,
)
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()
CHECK_SECONDS, CONFIRM_SECONDS = 10.0, 5.0
NO_LEADER = -1
CHANGE_SECONDS = 1.0
"""A new leader is known to all brokers that reach each other within so long."""


class LeaderMonitor:
    """Compares the leaders that a client knows with the leaders that the brokers name, now and
    then: a client that receives records from one broker may wait for records of another.

    Not thread-safe: it belongs to the thread that polls the client.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._addresses = itertools.cycle(connection.addresses)
        self._suspected: Mapping[TopicPartition, int] = {}
        self._check_at = time.monotonic() + CHECK_SECONDS

    @property
    def is_due(self) -> bool:
        """Whether a check is due."""
        return time.monotonic() >= self._check_at

    def find_newer_leaders(
        self, known_leaders: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, int]:
        """Return the leaders that the client does not know although the brokers named the same ones
        at the last check too, `CONFIRM_SECONDS` ago: no change of leaders takes so long.

        Asks one broker, in turn, and all configured ones once a difference was seen.

        Args:
            known_leaders: The node ids of the leaders that the client knows.
        Returns:
            The node ids of the leaders; empty if the client knows them, or no broker responds.
        """
        differing = self._compare(known_leaders) if known_leaders else {}
        is_confirmed = bool(differing) and differing == self._suspected
        self._suspected = differing
        self._check_at = time.monotonic() + (CONFIRM_SECONDS if differing else CHECK_SECONDS)
        return differing if is_confirmed else {}

    def _compare(self, known_leaders: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        topics = sorted({topic for topic, _ in known_leaders})
        if not self._suspected and _knows(known_leaders, self._read_from_one(topics)):
            return {}
        newest = select_newest_leaders(read_metadata_of_each(self._connection, topics).values())
        return {
            at: newest[at].node_id
            for at, node_id in known_leaders.items()
            if at in newest and newest[at].node_id not in {node_id, NO_LEADER}
        }

    def _read_from_one(self, topics: Collection[str]) -> Mapping[TopicPartition, Leader]:
        one = replace(self._connection, bootstrap_servers=next(self._addresses))
        try:
            return read_metadata(one, topics).leaders
        except RelaxError as error:
            log.debug("leaders.read_failed", address=one.bootstrap_servers, error=str(error))
            return {}


def _knows(
    known_leaders: Mapping[TopicPartition, int], named: Mapping[TopicPartition, Leader]
) -> bool:
    return all(named[at].node_id == node_id for at, node_id in known_leaders.items() if at in named)


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
