"""Which brokers know an older leader than others, and when a client must look for a newer one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.partition_leaders import BrokerMetadata, Leader
from relax_events.kafka.workarounds import stale_leaders
from relax_events.kafka.workarounds.stale_leaders import (
    CHECK_SECONDS,
    CONFIRM_SECONDS,
    LeaderMonitor,
    leave_out_outdated_brokers,
    read_newest_leaders,
)

AT, OTHER = ("prompt.groups", 0), ("control.commands", 0)
ADDRESSES = ("one:1", "two:2", "three:3")
CONNECTION = Connection(",".join(ADDRESSES))
OLD, NEW = Leader(1, 4), Leader(2, 5)


class Brokers:
    """What each broker says of the leaders; one that is absent does not respond."""

    def __init__(self, leaders: Mapping[str, Mapping[tuple[str, int], Leader]]) -> None:
        self.leaders = dict(leaders)
        self.asked: list[str] = []
        self.listed = ADDRESSES

    def read_from(
        self, _connection: Connection, addresses: Iterable[str], _topics: object
    ) -> dict[str, BrokerMetadata]:
        asked = list(addresses)
        self.asked += asked
        return {
            address: BrokerMetadata(self.listed, self.leaders[address])
            for address in asked
            if address in self.leaders
        }

    def read_each(self, connection: Connection, topics: object) -> dict[str, BrokerMetadata]:
        addresses = connection.bootstrap_servers.split(",")
        listed = ADDRESSES if len(addresses) == 1 else addresses
        self.asked += listed
        return {
            address: BrokerMetadata(ADDRESSES, self.leaders[address])
            for address in listed
            if address in self.leaders
        }


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    """Return three brokers, the first of which is cut off from the others and was the leader."""
    made = Brokers({"one:1": {AT: OLD, OTHER: NEW}} | {key: {AT: NEW} for key in ADDRESSES[1:]})
    monkeypatch.setattr(stale_leaders, "read_metadata_from", made.read_from)
    monkeypatch.setattr(stale_leaders, "read_metadata_of_each", made.read_each)
    monkeypatch.setattr(stale_leaders.time, "sleep", lambda _: None)
    return made


def test_brokers_that_know_an_older_leader_are_left_out(brokers: Brokers) -> None:
    assert leave_out_outdated_brokers(CONNECTION, ["t"]).bootstrap_servers == "two:2,three:3"
    assert read_newest_leaders(CONNECTION, ["t"]) == {AT: 2, OTHER: 2}


def test_a_single_address_is_replaced_by_the_brokers_that_are_current(brokers: Brokers) -> None:
    one = Connection("balanced:9092")
    assert leave_out_outdated_brokers(one, ["t"]).bootstrap_servers == "two:2,three:3"
    brokers.leaders["one:1"] = {AT: NEW}
    assert leave_out_outdated_brokers(one, ["t"]) is one


def test_a_broker_that_is_down_stays_among_the_addresses(brokers: Brokers) -> None:
    del brokers.leaders["three:3"]
    assert leave_out_outdated_brokers(CONNECTION, ["t"]).bootstrap_servers == "two:2,three:3"


def test_a_broker_that_learns_of_the_new_leader_meanwhile_stays(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        stale_leaders.time, "sleep", lambda _: brokers.leaders.update({"one:1": {AT: NEW}})
    )
    assert leave_out_outdated_brokers(CONNECTION, ["t"]) is CONNECTION


def test_addresses_stay_if_each_broker_is_outdated_or_none_responds(brokers: Brokers) -> None:
    newer = {address: {(address, 0): Leader(1, 9)} for address in ADDRESSES}
    older = {(address, 0): Leader(2, 1) for address in ADDRESSES}
    brokers.leaders = {address: older | newer[address] for address in ADDRESSES}
    assert leave_out_outdated_brokers(CONNECTION, ["t"]) is CONNECTION
    brokers.leaders = {}
    assert leave_out_outdated_brokers(CONNECTION, ["t"]) is CONNECTION
    assert read_newest_leaders(CONNECTION, ["t"]) == {}


class Client:
    """A client that knows the leaders, and is checked whenever a check is due."""

    def __init__(self, clock: list[float], connection: Connection, known: Leader) -> None:
        self._clock, self.known, self.num_asked = clock, {AT: known.node_id}, 0
        self.monitor = LeaderMonitor(connection)

    def read_known(self) -> dict[tuple[str, int], int]:
        self.num_asked += 1
        return self.known

    def check(self) -> tuple[float, dict[tuple[str, int], int]]:
        """Return the seconds until the next check, and what it finds."""
        began = self._clock[0]
        while not self.monitor.is_due:
            self._clock[0] += 1.0
        found = self.monitor.find_newer_leaders(self.known.keys(), self.read_known)
        return self._clock[0] - began, dict(found)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, which tests advance."""
    now = [0.0]
    monkeypatch.setattr(stale_leaders.time, "monotonic", lambda: now[0])
    return now


def test_new_leaders_are_reported_at_the_second_check_that_finds_them(
    brokers: Brokers, clock: list[float]
) -> None:
    client = Client(clock, Connection(CONNECTION.bootstrap_servers), OLD)
    checks = [client.check()[1] for _ in range(3)]
    assert checks == [{}, {}, {AT: NEW.node_id}], "the first check asks the outdated broker"
    assert brokers.asked[:2] == ["one:1", "two:2"]


def test_a_client_that_knows_the_leader_asks_one_broker_a_check(
    brokers: Brokers, clock: list[float]
) -> None:
    client = Client(clock, Connection("two:2,three:3"), NEW)
    assert [client.check()[1] for _ in range(4)] == [{}] * 4
    assert brokers.asked == ["two:2", "three:3"] * 2
    assert client.num_asked == 1, "no other leader was named since"


def test_clients_of_a_process_share_what_the_brokers_name(
    brokers: Brokers, clock: list[float]
) -> None:
    """With their own questions, a thousand workers opened and authenticated hundreds of connections a
    second."""
    connection = Connection("two:2,three:3")
    clients = [Client(clock, replace(connection), NEW) for _ in range(10)]
    for _ in range(4):
        assert [client.check()[1] for client in clients] == [{}] * 10
    assert brokers.asked == ["two:2", "three:3"] * 2
    for client in clients:
        client.known = {AT: OLD.node_id}  # none has learned of a new leader
    brokers.leaders = {key: {AT: Leader(3, 6)} for key in ADDRESSES}
    brokers.asked.clear()
    found = [client.check()[1] for _ in range(2) for client in clients]
    assert found == [{}] * 10 + [{AT: 3}] * 10
    assert brokers.asked == ["two:2", "two:2", "three:3", "two:2", "three:3"]


def test_an_answer_without_a_client_s_topic_serves_the_others_only(
    brokers: Brokers, clock: list[float]
) -> None:
    connection = Connection("two:2")
    first, second = (Client(clock, connection, NEW) for _ in range(2))
    second.known = {OTHER: NEW.node_id}
    for _ in range(3):
        first.check()
        second.check()
    assert brokers.asked == ["two:2"] * 4, "one more, until both topics are asked for"


def test_a_client_of_the_only_broker_is_not_asked(brokers: Brokers, clock: list[float]) -> None:
    brokers.listed, brokers.leaders = ("one:1",), {"one:1": {AT: NEW}}
    client = Client(clock, Connection("one:1"), OLD)
    assert [client.check()[1] for _ in range(4)] == [{}] * 4
    assert (client.num_asked, brokers.asked) == (0, ["one:1"] * 4)


def test_a_leader_that_changes_again_is_not_confirmed(brokers: Brokers, clock: list[float]) -> None:
    client = Client(clock, Connection("two:2,three:3"), OLD)
    assert client.check()[1] == {}
    brokers.leaders = {key: {AT: Leader(3, 6)} for key in ADDRESSES}
    assert client.check()[1] == {}
    assert client.check()[1] == {AT: 3}


def test_a_partition_without_a_leader_and_brokers_that_are_down_are_no_finding(
    brokers: Brokers, clock: list[float]
) -> None:
    brokers.leaders = {key: {AT: Leader(-1, 6)} for key in ADDRESSES}
    client = Client(clock, Connection(CONNECTION.bootstrap_servers), OLD)
    assert [client.check()[1] for _ in range(3)] == [{}] * 3
    brokers.leaders = {}
    assert [client.check()[1] for _ in range(3)] == [{}] * 3


def test_a_difference_is_checked_again_sooner(brokers: Brokers, clock: list[float]) -> None:
    client = Client(clock, Connection("two:2"), NEW)
    waits = []
    for named in [NEW, NEW, Leader(3, 6), Leader(3, 6), NEW]:
        brokers.leaders = {key: {AT: named} for key in ADDRESSES}
        waits.append(client.check()[0])
    assert waits == [CHECK_SECONDS, CHECK_SECONDS, CHECK_SECONDS, CONFIRM_SECONDS, CONFIRM_SECONDS]
