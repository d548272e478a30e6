"""What the benchmark of many workers makes of librdkafka's reports and of its cases."""

from __future__ import annotations

import json

import pytest

from benchmarks.fleet import Case, RequestRates


def report(name: str, seconds: float, *, fetches: int, coordinator: int) -> str:
    """Write a report: requests of the coordinator's connection are not listed by kind."""
    brokers = {
        "127.0.0.1:1/1": {"tx": fetches, "req": {"Fetch": fetches}},
        "GroupCoordinator": {"tx": coordinator + 3, "req": {"FindCoordinator": 3}},
    }
    return json.dumps({"name": name, "ts": int(seconds * 1e6), "brokers": brokers})


def test_rates_are_from_the_last_two_reports_of_each_client() -> None:
    rates = RequestRates()
    for name in ("first", "second"):
        rates.update(report(name, 0.0, fetches=1000, coordinator=500))
        rates.update(report(name, 10.0, fetches=1000, coordinator=500))
        rates.update(report(name, 20.0, fetches=1040, coordinator=520))
    assert rates.per_second()["Fetch"] == pytest.approx(8.0)
    assert rates.per_second()["heartbeats"] == pytest.approx(4.0)
    assert rates.per_second()["FindCoordinator"] == 0.0


def test_client_that_reported_once_has_no_rate() -> None:
    rates = RequestRates()
    rates.update(report("first", 5.0, fetches=7, coordinator=0))
    assert not rates.per_second()


def test_queue_of_a_consumer_group_has_a_partition_for_each_worker() -> None:
    assert "broker.queue_partitions=64" in Case(64, "consumer_group", 1).overrides("h:1")
    assert "broker.queue_partitions=1" in Case(64, "share_group", 1).overrides("h:1")
