"""Both kinds of leases keep the same promises: a record has one holder, and returns when it is
released or its holder dies.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from broker_steps import TIMEOUT_SECONDS, next_line, other_process, turn_until

from relax_events.errors import AccessDenied
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.group_leases import ConsumerGroupLeases
from relax_events.kafka.leases import Lease, LeaseSource, read_delivery_limit
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.protocol.queue_lag import read_queue_positions
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.share_leases import ShareGroupLeases

HOLDER = """
import sys, queue
from relax_events.kafka.connection import Connection
from relax_events.kafka.group_leases import ConsumerGroupLeases
from relax_events.kafka.share_leases import ShareGroupLeases
kind, bootstrap_servers, group, topic, lanes, *added = sys.argv[1:]
inbox = queue.SimpleQueue()
make = {"ConsumerGroupLeases": ConsumerGroupLeases, "ShareGroupLeases": ShareGroupLeases}[kind]
most = {"most_lanes": 99} if kind == "ShareGroupLeases" else {}
source = make(Connection(bootstrap_servers), group=group, topic=topic, max_leases=int(lanes), on_lease=inbox.put, **most)
for number in added:
    source.add_capacity(int(number))
for _ in range(2 + sum(map(int, added))):
    print(inbox.get().record.value.decode())
sys.stdin.read()
"""


@dataclass
class Queue:
    """A work queue of one kind, and what opens a holder on it."""

    kind: str
    connection: Connection
    topic: str
    num_partitions: int
    group: str
    inboxes: list[queue.SimpleQueue[Lease]] = field(default_factory=list)

    @contextmanager
    def holder(
        self, *, lanes: int, **options: int
    ) -> Iterator[tuple[LeaseSource, queue.SimpleQueue[Lease]]]:
        inbox: queue.SimpleQueue[Lease] = queue.SimpleQueue()
        make: Any = {
            "ShareGroupLeases": ShareGroupLeases,
            "ConsumerGroupLeases": ConsumerGroupLeases,
        }[self.kind]
        source = make(
            self.connection,
            group=self.group,
            topic=self.topic,
            max_leases=lanes,
            on_lease=inbox.put,
            **options,
        )
        try:
            yield source, inbox
        finally:
            source.close()


@pytest.fixture
def share_queue(
    connection: Connection, make_topic: Callable[..., str], make_share_group: Callable[[str], str]
) -> Queue:
    return Queue(
        "ShareGroupLeases",
        connection,
        make_topic("prompt.groups", 1),
        1,
        make_share_group("rollout"),
    )


@pytest.fixture
def group_queue(
    connection: Connection, make_topic: Callable[..., str], make_group: Callable[[str], str]
) -> Queue:
    return Queue(
        "ConsumerGroupLeases", connection, make_topic("prompt.groups", 2), 2, make_group("rollout")
    )


@pytest.fixture(params=["share_queue", "group_queue"])
def work(request: pytest.FixtureRequest) -> Queue:
    found: Queue = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def single(connection: Connection) -> Iterator[RecordProducer]:
    """A producer as the prompter has it: one record in each batch, so that one can be leased at a
    time."""
    opened = RecordProducer(connection, max_batch_records=1)
    yield opened
    opened.close()


def enqueue(producer: RecordProducer, work: Queue, names: list[str]) -> None:
    producer.write(
        ProducerRecord(work.topic, name.encode(), key=name, partition=index % work.num_partitions)
        for index, name in enumerate(names)
    )


def take(inbox: queue.SimpleQueue[Lease], count: int) -> list[Lease]:
    return [inbox.get(timeout=TIMEOUT_SECONDS) for _ in range(count)]


def values(leases: list[Lease]) -> list[str]:
    return sorted(lease.record.value.decode() for lease in leases)


def test_each_record_is_leased_once_when_two_workers_share_the_queue(
    work: Queue, single: RecordProducer
) -> None:
    names = [f"p{index:02}" for index in range(20)]
    enqueue(single, work, names)
    seen: Counter[str] = Counter()
    with work.holder(lanes=3) as (_, first), work.holder(lanes=3) as (_, second):

        def settle() -> None:
            for inbox in (first, second):
                while not inbox.empty():
                    lease = inbox.get()
                    seen[lease.record.key] += 1
                    lease.done()

        turn_until(lambda: len(seen) == 20, settle)
    assert seen == Counter(names)


def test_worker_leases_at_most_one_record_per_lane(work: Queue, single: RecordProducer) -> None:
    enqueue(single, work, [f"p{index}" for index in range(6)])
    with work.holder(lanes=2) as (_, inbox):
        held = take(inbox, 2)
        with pytest.raises(queue.Empty):
            inbox.get(timeout=0.7)
        held[0].done()
        assert len(take(inbox, 1)) == 1
        with pytest.raises(queue.Empty):
            inbox.get(timeout=0.5)


def test_share_group_backlog_counts_unfinished_records_leased_or_not(
    share_queue: Queue, single: RecordProducer
) -> None:
    def backlog() -> int:
        positions = read_queue_positions(share_queue.connection, share_queue.group)
        return sum(position.num_unfinished for position in positions.values())

    enqueue(single, share_queue, [f"p{index}" for index in range(8)])
    with share_queue.holder(lanes=2) as (_, inbox):
        take(inbox, 1)[0].done()  # a partition counts once something of it is done
        turn_until(lambda: backlog() == 7)
        held = take(inbox, 2)
        assert backlog() == 7
        for lease in held:
            lease.done()
        turn_until(lambda: backlog() == 5)


def test_held_records_go_to_another_worker_when_the_holder_closes(
    work: Queue, single: RecordProducer
) -> None:
    enqueue(single, work, ["a", "b", "c", "d"])
    with work.holder(lanes=4) as (_, inbox):
        held = {lease.record.key: lease for lease in take(inbox, 4)}
        held["a"].done()
        held["b"].done()
    with work.holder(lanes=4) as (_, inbox):
        assert values(take(inbox, 2)) == ["c", "d"]
        with pytest.raises(queue.Empty):
            inbox.get(timeout=0.5)


def test_stopped_lease_source_keeps_its_leases_and_takes_no_new_ones(
    work: Queue, single: RecordProducer
) -> None:
    enqueue(single, work, ["a", "b"])
    with work.holder(lanes=2) as (source, inbox):
        held = take(inbox, 2)
        source.stop()
        enqueue(single, work, ["c", "d"])
        for lease in held:
            lease.done()
        with pytest.raises(queue.Empty):
            inbox.get(timeout=1.2)
    with work.holder(lanes=4) as (_, inbox):
        assert values(take(inbox, 2)) == ["c", "d"]


def test_records_are_redelivered_when_their_holder_is_killed(
    work: Queue, single: RecordProducer, bootstrap_servers: str
) -> None:
    enqueue(single, work, ["a", "b"])
    with other_process(HOLDER, work.kind, bootstrap_servers, work.group, work.topic, "2") as holder:
        assert sorted([next_line(holder), next_line(holder)]) == ["a", "b"]
    with work.holder(lanes=2) as (_, inbox):
        assert values(take(inbox, 2)) == ["a", "b"]


def test_all_records_beyond_its_lanes_are_redelivered_when_their_holder_is_killed(
    work: Queue, single: RecordProducer, bootstrap_servers: str
) -> None:
    names = [f"p{index:02}" for index in range(20)]
    enqueue(single, work, names)
    options = (work.kind, bootstrap_servers, work.group, work.topic, "2", "18")
    with other_process(HOLDER, *options) as holder:
        assert sorted(next_line(holder) for _ in names) == names
    counts: Counter[str] = Counter()
    with work.holder(lanes=4) as (_, inbox):
        while len(counts) < len(names):
            lease = inbox.get(timeout=TIMEOUT_SECONDS)
            counts[lease.record.key] = max(counts[lease.record.key], lease.delivery_count)
            lease.done()
    assert sorted(counts) == names
    assert max(counts.values()) <= 4


def test_all_records_beyond_its_lanes_return_when_their_holder_stops(
    share_queue: Queue, single: RecordProducer
) -> None:
    names = [f"p{index:02}" for index in range(12)]
    enqueue(single, share_queue, names)
    with share_queue.holder(lanes=2, first_lanes=1, most_lanes=20) as (source, inbox):
        source.add_capacity(10)
        held = take(inbox, 12)
        assert values(held) == names
        source.stop()
        for lease in held:
            lease.release()
    counts: Counter[str] = Counter()
    with share_queue.holder(lanes=4) as (_, inbox):
        while len(counts) < len(names):
            lease = inbox.get(timeout=TIMEOUT_SECONDS)
            counts[lease.record.key] += lease.delivery_count
            lease.done()
    assert counts == dict.fromkeys(names, 2)


def test_killed_holder_uses_up_at_most_a_few_deliveries_of_a_record(
    share_queue: Queue, single: RecordProducer, bootstrap_servers: str
) -> None:
    """The broker notices the death of a worker lane by lane, and hands its records to those that it
    has not noticed yet."""
    enqueue(single, share_queue, ["a", "b"])
    with other_process(
        HOLDER, "ShareGroupLeases", bootstrap_servers, share_queue.group, share_queue.topic, "32"
    ) as holder:
        assert sorted([next_line(holder), next_line(holder)]) == ["a", "b"]
    counts = []
    with share_queue.holder(lanes=2) as (_, inbox):
        for lease in take(inbox, 2):
            counts.append(lease.delivery_count)
            lease.done()
    assert max(counts) <= 4


def test_share_group_redelivers_a_released_record(
    share_queue: Queue, single: RecordProducer
) -> None:
    enqueue(single, share_queue, ["a"])
    with share_queue.holder(lanes=1) as (_, inbox):
        first = inbox.get(timeout=TIMEOUT_SECONDS)
        first.release()
        second = inbox.get(timeout=TIMEOUT_SECONDS)
        assert (first.delivery_count, second.delivery_count) == (1, 2)
        assert second.record.location == first.record.location
        second.done()


def test_stopping_a_holder_uses_up_at_most_one_delivery_of_a_record(
    share_queue: Queue, single: RecordProducer
) -> None:
    """Idle lanes are in their last poll when the others release: resumed by one after the other, a
    record would be dropped by the broker."""
    enqueue(single, share_queue, [f"p{index}" for index in range(4)])
    with share_queue.holder(lanes=16) as (source, inbox):
        held = take(inbox, 4)
        source.stop()
        for lease in held:
            lease.release()
    counts = []
    with share_queue.holder(lanes=4) as (_, inbox):
        while (
            len(counts) < 4
        ):  # one lane may take neighbours together, and hands them over one by one
            lease = inbox.get(timeout=TIMEOUT_SECONDS)
            counts.append(lease.delivery_count)
            lease.done()
    assert counts == [2, 2, 2, 2]


def test_second_settlement_of_a_lease_has_no_effect(
    share_queue: Queue, single: RecordProducer
) -> None:
    """The second settlement must not count for the record that the lane holds next."""
    enqueue(single, share_queue, ["a", "b", "c"])
    with share_queue.holder(lanes=1) as (_, inbox):
        lease = inbox.get(timeout=TIMEOUT_SECONDS)
        lease.done()
        lease.done()
        rest = [lease.record.key]
        while len(rest) < 3:
            lease = inbox.get(timeout=TIMEOUT_SECONDS)
            rest.append(lease.record.key)
            lease.done()
        assert sorted(rest) == ["a", "b", "c"]


def test_group_offset_follows_the_oldest_open_lease(
    group_queue: Queue, single: RecordProducer, admin: Admin
) -> None:
    single.write(
        ProducerRecord(group_queue.topic, str(index).encode(), partition=0) for index in range(4)
    )
    with group_queue.holder(lanes=4) as (_, inbox):
        held = sorted(take(inbox, 4), key=lambda lease: lease.record.offset)
        held[3].done()
        held[1].done()
        held[0].done()
        turn_until(
            lambda: (
                admin.committed_offsets(group_queue.group, [(group_queue.topic, 0)])
                == {(group_queue.topic, 0): 2}
            )
        )
        held[2].done()
        turn_until(
            lambda: (
                admin.committed_offsets(group_queue.group, [(group_queue.topic, 0)])
                == {(group_queue.topic, 0): 4}
            )
        )


def test_records_of_partitions_assigned_to_a_full_holder_are_not_lost(
    group_queue: Queue, single: RecordProducer
) -> None:
    """A full holder keeps its membership without taking records; partitions assigned to it
    meanwhile start unread."""
    enqueue(single, group_queue, ["a", "b", "c", "d"])
    with group_queue.holder(lanes=1) as (_, first):
        held = first.get(timeout=TIMEOUT_SECONDS)
        with group_queue.holder(lanes=1) as (_, second):
            other = second.get(timeout=TIMEOUT_SECONDS)
        held.done()
        seen = {held.record.key}
        while len(seen) < 4:
            lease = first.get(timeout=TIMEOUT_SECONDS)
            seen.add(lease.record.key)
            lease.done()
        assert seen == {"a", "b", "c", "d"}
        assert other.record.key in seen


def test_delivery_limit_comes_from_the_group_or_else_from_the_broker(
    connection: Connection, admin: Admin, make_share_group: Callable[[str], str]
) -> None:
    own, other = make_share_group("own"), make_share_group("other")
    admin.alter_group(own, {"share.delivery.count.limit": "7"})
    assert (read_delivery_limit(connection, own), read_delivery_limit(connection, other)) == (7, 5)


def test_delivery_limit_is_the_default_when_the_group_can_not_be_described(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Admin, name: str) -> dict[str, str]:
        raise AccessDenied(f"describing group {name}: no right")

    monkeypatch.setattr(Admin, "group_settings", denied)
    assert read_delivery_limit(connection, "rollout") == 5


def test_adjacent_released_records_are_processed_in_parallel(
    share_queue: Queue, single: RecordProducer
) -> None:
    """The broker hands them to one lane, which must not keep the others waiting; nor are more taken
    than there is room for."""
    enqueue(single, share_queue, [f"p{index}" for index in range(6)])
    with share_queue.holder(lanes=4) as (_, inbox):
        take(inbox, 4)
    with share_queue.holder(lanes=4) as (_, inbox):
        held = take(inbox, 4)
        assert [lease.delivery_count for lease in held] == [2, 2, 2, 2]
        with pytest.raises(queue.Empty):
            inbox.get(timeout=0.5)
        for lease in reversed(held[:2]):
            lease.done()
        assert values(take(inbox, 2)) == ["p4", "p5"]
