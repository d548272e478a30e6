"""A lane whose client can't continue; with a consumer that fails on command, since
no broker does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from relax_events.config.broker import BrokerConfig
from relax_events.errors import BrokerRefused, ClientFailed
from relax_events.kafka import group_leases, share_leases
from relax_events.kafka.auth_errors import AuthFailureTracker
from relax_events.kafka.connection import Connection
from relax_events.kafka.group_leases import ConsumerGroupLeases
from relax_events.kafka.leases import Lease
from relax_events.kafka.records import Record
from relax_events.kafka.share_leases import ShareGroupLeases

FATAL = KafkaError(KafkaError._FATAL, "fenced for good", fatal=True)
FULL = KafkaError(
    KafkaError.GROUP_MAX_SIZE_REACHED, "Consumer group has reached maximum size", fatal=True
)


class Message:
    """A record of the queue, or an error instead of a record."""

    def __init__(self, error: KafkaError | None = None, *, offset: int = 7) -> None:
        self._error, self._offset = error, offset

    def error(self) -> KafkaError | None:
        return self._error

    def delivery_count(self) -> int:
        return 1

    def topic(self) -> str:
        return "queue"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return b"000000-0000-0"

    def value(self) -> bytes:
        return b"work"

    def headers(self) -> list[tuple[str, bytes]]:
        return []

    def timestamp(self) -> tuple[int, int]:
        return 1, 0


class Consumers:
    """Makes share consumers whose polls return the entries of a script, one each, and then nothing
    for a while."""

    def __init__(self, *script: list[Message] | KafkaException) -> None:
        self._script = iter(script)
        self.made: list[Consumers.One] = []

    def __call__(self, settings: dict[str, Any]) -> Consumers.One:
        entry = next(self._script, [])
        if isinstance(entry, KafkaException):
            raise entry
        self.made.append(Consumers.One(entry))
        return self.made[-1]

    class One:
        """One consumer."""

        def __init__(self, messages: list[Message]) -> None:
            self._messages, self.is_closed, self.acknowledged = messages, False, 0
            self.committed: list[int] = []

        def subscribe(self, topics: list[str]) -> None:
            assert topics == ["queue"]

        def poll(self, seconds: float) -> list[Message]:
            messages, self._messages = self._messages, []
            if not messages:
                threading.Event().wait(0.01)
            return messages

        def acknowledge(self, message: Message, kind: object) -> None:
            self.acknowledged += 1

        def commit_sync(self, seconds: float) -> dict[str, None]:
            self.committed.append(self.acknowledged)
            return {}

        def close(self) -> None:
            self.is_closed = True


def lane_of(
    consumers: Any,
    monkeypatch: pytest.MonkeyPatch,
    taken: list[Lease],
    *,
    max_leases: int = 1,
    first_lanes: int = 1,
    most_lanes: int = 9,
) -> ShareGroupLeases:
    monkeypatch.setattr(share_leases, "ShareConsumer", consumers)
    connection = Connection.from_config(
        BrokerConfig(bootstrap_servers="127.0.0.1:1"), client_id="test"
    )
    return ShareGroupLeases(
        connection,
        group="group",
        topic="queue",
        max_leases=max_leases,
        on_lease=taken.append,
        first_lanes=first_lanes,
        most_lanes=most_lanes,
    )


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to it"
        threading.Event().wait(0.01)


def settled(leases: list[Lease]) -> None:
    wait_until(lambda: bool(leases))
    leases[0].done()


def test_records_of_a_batch_that_are_done_together_are_acknowledged_by_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(share_leases, "SETTLE_SECONDS", 60.0)
    consumers, taken = Consumers([Message(offset=offset) for offset in range(4)]), list[Lease]()
    source = lane_of(consumers, monkeypatch, taken, max_leases=4)
    wait_until(lambda: len(taken) == 4)
    for lease in taken:
        lease.done()
    wait_until(lambda: bool(consumers.made[0].committed))
    source.close()
    assert consumers.made[0].committed == [4]


def test_done_record_is_acknowledged_although_others_of_its_batch_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumers, taken = Consumers([Message(offset=offset) for offset in range(2)]), list[Lease]()
    source = lane_of(consumers, monkeypatch, taken, max_leases=2)
    wait_until(lambda: len(taken) == 2)
    taken[1].done()
    wait_until(lambda: bool(consumers.made[0].committed))
    taken[0].done()
    source.close()
    assert consumers.made[0].committed == [1, 2]


def test_another_share_consumer_joins_when_all_hold_records_and_there_is_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumers, taken = Consumers([Message(offset=0)], [Message(offset=1)]), list[Lease]()
    source = lane_of(consumers, monkeypatch, taken, max_leases=3)
    wait_until(lambda: len(taken) == 2 and len(consumers.made) == 3)
    assert sorted(lease.record.offset for lease in taken) == [0, 1]
    source.close()


def test_share_consumer_that_cannot_be_made_costs_no_lease_and_is_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE, "no thread left"))
    consumers, taken = Consumers([Message(offset=0)], refused, [Message(offset=1)]), list[Lease]()
    source = lane_of(consumers, monkeypatch, taken, max_leases=2)
    wait_until(lambda: len(taken) == 2)
    for lease in taken:
        lease.done()
    wait_until(lambda: [one.committed for one in consumers.made] == [[1], [1]])
    source.close()


def test_more_records_are_leased_when_capacity_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    consumers, taken = Consumers([Message(offset=0)], [Message(offset=1)]), list[Lease]()
    source = lane_of(consumers, monkeypatch, taken, max_leases=2, first_lanes=2)
    source.add_capacity(-1)
    wait_until(lambda: len(taken) == 1)
    assert not any(one.is_closed for one in consumers.made)
    source.add_capacity(1)
    wait_until(lambda: len(taken) == 2)
    source.close()


def test_share_consumers_leave_when_others_are_idle_but_the_first_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumers, taken = Consumers(*([Message(offset=index)] for index in range(5))), list[Lease]()
    source = lane_of(consumers, monkeypatch, taken, max_leases=5)
    wait_until(lambda: len(taken) == 5)
    leases = {lease.record.offset: lease for lease in taken}
    for number in (1, 2, 3, 4):
        leases[number].done()
        wait_until(lambda at=number: consumers.made[at].committed == [1])  # type: ignore[misc]
        wait_until(lambda at=number: consumers.made[at].is_closed == (at > 2))  # type: ignore[misc]
    leases[0].done()
    wait_until(lambda: consumers.made[0].committed == [1])
    source.add_capacity(0)
    assert [one.is_closed for one in consumers.made] == [False, False, False, True, True]
    source.close()


def test_at_most_so_many_share_consumers_join_as_may(monkeypatch: pytest.MonkeyPatch) -> None:
    consumers, taken = Consumers(*([Message(offset=index)] for index in range(9))), list[Lease]()
    source = lane_of(consumers, monkeypatch, taken, max_leases=2, first_lanes=2, most_lanes=4)
    source.add_capacity(5)
    wait_until(lambda: len(taken) == 4)
    source.add_capacity(1)
    taken[0].done()
    wait_until(lambda: consumers.made[0].committed == [1])
    source.close()
    assert len(consumers.made) == 4


def test_consumer_group_leases_more_records_when_capacity_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Queue:
        """A partition with records."""

        def __init__(self, *_: object, **__: object) -> None:
            self.position, self.is_paused, self.num_paused_polls = 0, False, 0
            made.append(self)

        def fetch(self, *_: object, **__: object) -> list[Record]:
            if self.is_paused:
                self.num_paused_polls += 1
                return []
            self.position += 1
            return [Record("queue", 0, self.position, "key", b"", {}, 0)]

        def pause(self) -> None:
            self.is_paused = True

        def resume(self) -> None:
            self.is_paused = False

        def commit(self, *_: object, **__: object) -> None: ...

        def close(self) -> None: ...

    made: list[Queue] = []
    monkeypatch.setattr(group_leases, "SubscribedConsumer", Queue)
    connection = Connection.from_config(
        BrokerConfig(bootstrap_servers="127.0.0.1:1"), client_id="test"
    )
    taken: list[Lease] = []
    source = ConsumerGroupLeases(
        connection, group="group", topic="queue", max_leases=1, on_lease=taken.append
    )
    wait_until(lambda: made[0].num_paused_polls > 2)
    assert len(taken) == 1
    source.add_capacity(2)
    polls = made[0].num_paused_polls
    wait_until(lambda: len(taken) == 3 and made[0].num_paused_polls > polls + 2)
    source.add_capacity(-2)
    for lease in taken[:2]:
        lease.done()
    polls = made[0].num_paused_polls
    wait_until(lambda: made[0].num_paused_polls > polls + 2)
    assert len(taken) == 3
    taken[2].done()
    wait_until(lambda: len(taken) == 4)
    source.close()


def test_worker_does_without_another_share_consumer_when_the_group_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(share_leases, "FULL_SECONDS", -1.0)
    consumers, taken = Consumers([Message(offset=0)], [Message(FULL)]), list[Lease]()
    source = lane_of(consumers, monkeypatch, taken, max_leases=2)
    wait_until(lambda: len(consumers.made) == 2 and consumers.made[1].is_closed)
    assert not source.stopping
    taken[0].done()
    wait_until(lambda: consumers.made[0].committed == [1])
    source.close()
    assert len(consumers.made) == 2


def test_lane_rejoins_the_share_group_after_a_fatal_client_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumers = Consumers([Message(FATAL)], [Message()])
    taken: list[Lease] = []
    lane = lane_of(consumers, monkeypatch, taken)
    settled(taken)
    lane.close()
    assert [one.is_closed for one in consumers.made] == [True, True]
    assert [one.acknowledged for one in consumers.made] == [0, 1]
    assert taken[0].record.offset == 7


def test_lane_retries_when_rejoining_the_share_group_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE, "no thread left"))
    consumers = Consumers([Message(FATAL), Message()], refused, [Message()])
    taken: list[Lease] = []
    lane = lane_of(consumers, monkeypatch, taken)
    settled(taken)
    lane.close()
    assert (
        len(taken) == 1
    )  # what came together with the error is delivered again, to a consumer that can acknowledge it
    assert [one.acknowledged for one in consumers.made] == [0, 1]


def test_consumer_group_lease_queue_ends_its_worker_when_its_client_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing:
        def __init__(self, *_: object, **__: object) -> None:
            """Join nothing."""

        def fetch(self, *_: object, **__: object) -> list[Record]:
            raise ClientFailed("its heartbeats have stopped")

        def commit(self, *_: object, **__: object) -> None:
            """Nothing to commit."""

        def close(self) -> None:
            """Nothing to leave."""

    monkeypatch.setattr(group_leases, "SubscribedConsumer", Failing)
    reported = threading.Event()
    monkeypatch.setattr(
        AuthFailureTracker,
        "report_fatal",
        lambda self, error, report=AuthFailureTracker.report_fatal: (
            report(self, error),
            reported.set(),
        ),
    )
    connection = Connection.from_config(
        BrokerConfig(bootstrap_servers="127.0.0.1:1"), client_id="test"
    )
    source = ConsumerGroupLeases(
        connection, group="group", topic="queue", max_leases=1, on_lease=lambda lease: None
    )
    assert reported.wait(60)
    with pytest.raises(ClientFailed, match="its heartbeats have stopped"):
        connection.auth_failures.raise_fatal()
    source.close()


def test_worker_ends_with_an_error_when_the_share_group_stays_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    class Refused:
        def __init__(self, _: object) -> None:
            """Join; the broker's response arrives with the first poll."""

        def subscribe(self, _: list[str]) -> None: ...

        def poll(self, _: float) -> list[Message]:
            raise KafkaException(FULL)

        def close(self) -> None: ...

    monkeypatch.setattr(share_leases, "ShareConsumer", Refused)
    monkeypatch.setattr(share_leases, "FULL_SECONDS", 0.05)
    reported = threading.Event()
    monkeypatch.setattr(
        AuthFailureTracker,
        "report_fatal",
        lambda self, error, report=AuthFailureTracker.report_fatal: (
            report(self, error),
            reported.set(),
        ),
    )
    connection = Connection.from_config(
        BrokerConfig(bootstrap_servers="127.0.0.1:1"), client_id="test"
    )
    source = ShareGroupLeases(
        connection,
        group="relax.r.rollout",
        topic="queue",
        max_leases=2,
        on_lease=lambda lease: None,
    )
    assert reported.wait(60)
    with pytest.raises(
        BrokerRefused,
        match=r"relax.r.rollout has no room for the first 2 share consumers of this worker.*lower engine.max_prompt_groups",
    ):
        connection.auth_failures.raise_fatal()
    assert source.stopping
    source.close()
