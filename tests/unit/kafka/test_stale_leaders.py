"""Which brokers know an older leader than others, and when a client must look for a newer one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from relax_events.errors import BrokerUnavailable
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

    def read_one(self, connection: Connection, _topics: object) -> BrokerMetadata:
        address = connection.bootstrap_servers
        self.asked.append(address)
        if address not in self.leaders:
            raise BrokerUnavailable(f"{address} is down")
        return BrokerMetadata(ADDRESSES, self.leaders[address])

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
    monkeypatch.setattr(stale_leaders, "read_metadata", made.read_one)
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


def test_new_leaders_are_reported_at_the_second_check_that_finds_them(brokers: Brokers) -> None:
    monitor = LeaderMonitor(CONNECTION)
    checks = [dict(monitor.find_newer_leaders({AT: OLD.node_id})) for _ in range(3)]
    assert checks == [{}, {}, {AT: NEW.node_id}], "the first check asks the outdated broker"
    assert brokers.asked[:2] == ["one:1", "two:2"]


def test_a_client_that_knows_the_leader_asks_one_broker_a_check(brokers: Brokers) -> None:
    monitor = LeaderMonitor(Connection("two:2,three:3"))
    assert [dict(monitor.find_newer_leaders({AT: NEW.node_id})) for _ in range(4)] == [{}] * 4
    assert brokers.asked == ["two:2", "three:3"] * 2


def test_a_leader_that_changes_again_is_not_confirmed(brokers: Brokers) -> None:
    monitor = LeaderMonitor(Connection("two:2,three:3"))
    assert monitor.find_newer_leaders({AT: OLD.node_id}) == {}
    brokers.leaders = {key: {AT: Leader(3, 6)} for key in ADDRESSES}
    assert monitor.find_newer_leaders({AT: OLD.node_id}) == {}
    assert monitor.find_newer_leaders({AT: OLD.node_id}) == {AT: 3}


def test_a_partition_without_a_leader_and_brokers_that_are_down_are_no_finding(
    brokers: Brokers,
) -> None:
    brokers.leaders = {key: {AT: Leader(-1, 6)} for key in ADDRESSES}
    monitor = LeaderMonitor(CONNECTION)
    assert [dict(monitor.find_newer_leaders({AT: 1})) for _ in range(3)] == [{}] * 3
    brokers.leaders = {}
    assert [dict(monitor.find_newer_leaders({AT: 1})) for _ in range(3)] == [{}] * 3


def test_a_difference_is_checked_again_sooner(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(stale_leaders.time, "monotonic", lambda: now[0])
    monitor = LeaderMonitor(Connection("two:2"))
    waits = []
    for known in [NEW, NEW, OLD, OLD, NEW]:
        began = now[0]
        while not monitor.is_due:
            now[0] += 1.0
        waits.append(now[0] - began)
        monitor.find_newer_leaders({AT: known.node_id})
    assert waits == [CHECK_SECONDS, CHECK_SECONDS, CHECK_SECONDS, CONFIRM_SECONDS, CONFIRM_SECONDS]
