"""A broker that leads a topic is cut off from the other brokers, while clients still reach it:
clients that read from it only find the new leader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import Cluster
from harness import BROKER_SECONDS

from relax_events.errors import ClientFailed
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.leases import Lease
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.share_leases import ShareGroupLeases
from relax_events.kafka.workarounds.stale_leaders import (
    leave_out_outdated_brokers,
    read_newest_leaders,
)
from relax_events.topics.plan import TopicSpec

TOPIC = "one-partition"
SETTLE_SECONDS = 10.0
"""Longer than a client's refresh of its metadata, which begins at its start."""


class Follower:
    """Polls in a thread of its own, and keeps what it received and the error that ended it."""

    def __init__(self, poll: Callable[[], list[bytes]]) -> None:
        self._poll, self._closing = poll, threading.Event()
        self.values: list[bytes] = []
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self.values += self._poll()
        except ClientFailed as error:
            self.failure = error

    def close(self) -> None:
        """Stop polling."""
        self._closing.set()
        self._thread.join(SETTLE_SECONDS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Yield three brokers with one replicated topic of one partition."""
    with Cluster(tmp_path / "cluster") as started:
        with closing(Admin(Connection(started.bootstrap_servers))) as admin:
            admin.create([TopicSpec(TOPIC, 1, 3, "read by all", {"min.insync.replicas": "2"})])
        yield started


def write(cluster: Cluster, value: bytes) -> None:
    """Write by a client that knows no broker yet, and may meet the isolated one first."""
    producer = RecordProducer(
        leave_out_outdated_brokers(Connection(cluster.bootstrap_servers), [TOPIC]), linger_ms=0
    )
    producer.write([ProducerRecord(TOPIC, value, partition=0)])
    producer.close()


def wait_until(holds: Callable[[], bool], what: str, seconds: float = BROKER_SECONDS) -> float:
    """Wait, and return for how long."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, f"{what} within {seconds:.0f} s"
        time.sleep(0.1)
    return time.monotonic() - began


@pytest.mark.long
def test_clients_that_read_only_from_an_isolated_leader_find_the_new_one(cluster: Cluster) -> None:
    connection = Connection(cluster.bootstrap_servers)
    leased: list[bytes] = []

    def on_lease(lease: Lease) -> None:
        leased.append(lease.record.value)
        lease.done()

    reader = LogReader(replace(connection, client_id="reader"), start={(TOPIC, 0): 0})
    member = SubscribedConsumer(
        replace(connection, client_id="member"), consumer_group="members", topics=[TOPIC]
    )
    leases = ShareGroupLeases(
        replace(connection, client_id="share"),
        group="shares",
        topic=TOPIC,
        max_leases=2,
        on_lease=on_lease,
    )
    followed = Follower(lambda: [r.value for r in reader.fetch(timeout_seconds=0.2)])
    joined = Follower(lambda: [r.value for r in member.fetch(timeout_seconds=0.2)])
    time.sleep(SETTLE_SECONDS)
    write(cluster, b"before")
    for values in (followed.values, joined.values, leased):
        wait_until(lambda values=values: values == [b"before"], "each receives the first record")

    first = cluster.leader(TOPIC)
    cluster.cut_off(first)
    wait_until(lambda: knows_other_leader(connection, first), "another broker leads")
    write(cluster, b"after")
    seconds = {
        "reader": wait_until(lambda: b"after" in followed.values, "the reader finds the leader"),
        "share": wait_until(lambda: b"after" in leased, "the share consumer finds the leader"),
        "member": wait_until(
            lambda: joined.failure is not None or b"after" in joined.values,
            "the member finds the leader, or ends its worker",
        ),
    }
    print({name: round(waited, 1) for name, waited in seconds.items()}, joined.failure)
    assert followed.values == leased == [b"before", b"after"]
    assert followed.failure is None
    if joined.failure is not None:
        assert "restart the worker" in str(joined.failure)

    current = leave_out_outdated_brokers(connection, [TOPIC])
    assert cluster.nodes[first].bootstrap_servers not in current.bootstrap_servers
    joined.close()
    member.close()
    member = SubscribedConsumer(
        replace(current, client_id="member"), consumer_group="members", topics=[TOPIC]
    )
    restarted = Follower(lambda: [r.value for r in member.fetch(timeout_seconds=0.2)])
    wait_until(lambda: b"after" in restarted.values + joined.values, "a restarted member reads it")
    for follower in (followed, restarted):
        follower.close()
    for client in (reader, member, leases):
        client.close()


def knows_other_leader(connection: Connection, node_id: int) -> bool:
    """Return whether a broker names another leader of the topic."""
    return read_newest_leaders(connection, [TOPIC])[TOPIC, 0] not in {node_id, -1}
