"""Transactions: records and offsets are written together or not at all, by one writer at a time,
and no record twice.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from broker_steps import turn_until

from relax_events.errors import BrokerRefused, BrokerUnavailable, Fenced
from relax_events.events.parts import TopicOffset
from relax_events.kafka import transactions
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.transactions import TransactionalWriter
from relax_events.kafka.workarounds import hanging_offsets

MakeTopic = Callable[..., str]


@pytest.fixture
def transactional_id(run_id: str) -> str:
    return f"relax.{run_id}.trainer.0"


@pytest.fixture
def writer(connection: Connection, transactional_id: str) -> Iterator[TransactionalWriter]:
    opened = TransactionalWriter(connection, transactional_id=transactional_id)
    yield opened
    opened.close()


def expect(connection: Connection, topic: str, wanted: list[bytes]) -> None:
    """Wait until exactly these are visible: the broker writes the marker a moment after it has
    answered the commit."""
    turn_until(lambda: values(connection, topic) == wanted)


def values(connection: Connection, topic: str) -> list[bytes]:
    reader = LogReader(connection)
    try:
        return [record.value for record in reader.read_to_end([(topic, 0)])]
    finally:
        reader.close()


def test_commit_writes_records_of_several_topics_and_offsets_atomically(
    writer: TransactionalWriter,
    connection: Connection,
    admin: Admin,
    make_topic: MakeTopic,
    run_id: str,
) -> None:
    steps, outcomes, source = make_topic("steps"), make_topic("outcomes"), make_topic("source", 2)
    reader = LogReader(connection, consumer_group=f"{run_id}.trainer")
    offsets = [TopicOffset(source, 0, 17), TopicOffset(source, 1, 4)]
    writer.commit(
        [
            ProducerRecord(steps, b"step 0"),
            ProducerRecord(outcomes, b"a"),
            ProducerRecord(outcomes, b"b"),
        ],
        offsets=offsets,
        reader=reader,
    )
    expect(connection, steps, [b"step 0"])
    expect(connection, outcomes, [b"a", b"b"])
    turn_until(
        lambda: (
            admin.committed_offsets(f"{run_id}.trainer", [(source, 0), (source, 1)])
            == {(source, 0): 17, (source, 1): 4}
        )
    )
    reader.close()


def test_commit_is_refused_when_another_writer_took_over(
    writer: TransactionalWriter,
    connection: Connection,
    transactional_id: str,
    make_topic: MakeTopic,
) -> None:
    topic = make_topic("steps")
    writer.commit([ProducerRecord(topic, b"before")])
    successor = TransactionalWriter(connection, transactional_id=transactional_id)
    for _ in range(2):
        with pytest.raises(Fenced, match="another instance of this role"):
            writer.commit([ProducerRecord(topic, b"of a zombie")])
    successor.commit([ProducerRecord(topic, b"after")])
    expect(connection, topic, [b"before", b"after"])
    successor.close()


def test_nothing_is_visible_when_one_record_is_refused(
    writer: TransactionalWriter, connection: Connection, make_topic: MakeTopic
) -> None:
    topic = make_topic("steps", max_message_bytes="1000")
    with pytest.raises(BrokerRefused, match="MSG_SIZE_TOO_LARGE"):
        writer.commit([ProducerRecord(topic, b"small"), ProducerRecord(topic, bytes(5000))])
    assert values(connection, topic) == []
    writer.commit([ProducerRecord(topic, b"next")])
    expect(connection, topic, [b"next"])


class Unsure:
    """A writer's try that fails with an indefinite error, before or after the commit really
    happened."""

    def __init__(self, writer: TransactionalWriter, *, failures: int, really_commits: bool) -> None:
        self._try, self._failures, self._really_commits = writer._try, failures, really_commits
        self.calls = 0

    def __call__(self, *arguments: Any) -> None:
        self.calls += 1
        if self.calls > self._failures or self._really_commits:
            self._try(*arguments)
        if self.calls <= self._failures:
            raise BrokerUnavailable("committing a transaction: _TIMED_OUT")


def test_commit_does_not_write_twice_when_a_success_reported_an_error(
    writer: TransactionalWriter,
    connection: Connection,
    make_topic: MakeTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = make_topic("steps")
    unsure = Unsure(writer, failures=1, really_commits=True)
    monkeypatch.setattr(writer, "_try", unsure)
    writer.commit(
        [ProducerRecord(topic, b"step 0")],
        is_already_committed=lambda: values(connection, topic) == [b"step 0"],
    )
    assert (unsure.calls, values(connection, topic)) == (1, [b"step 0"])


def test_commit_is_retried_when_nothing_was_committed(
    writer: TransactionalWriter, connection: Connection, make_topic: MakeTopic
) -> None:
    """The second try runs on the new producer that took over the transactional id."""
    topic = make_topic("steps")
    first, original = writer._producer, writer._try
    failures = [BrokerUnavailable("committing a transaction: _TIMED_OUT")]

    def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        original(*arguments)

    writer._try = fail_once  # type: ignore[method-assign]
    writer.commit([ProducerRecord(topic, b"step 0")], is_already_committed=lambda: False)
    expect(connection, topic, [b"step 0"])
    assert writer._producer is not first


def test_zombie_writer_does_not_fence_its_successor_after_a_timeout(
    writer: TransactionalWriter,
    connection: Connection,
    transactional_id: str,
    make_topic: MakeTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = make_topic("steps")
    successor = TransactionalWriter(connection, transactional_id=transactional_id)

    def already_real() -> bool:
        raise Fenced("step 0 was committed by another trainer")

    monkeypatch.setattr(writer, "_try", Unsure(writer, failures=1, really_commits=False))
    for _ in range(2):
        with pytest.raises(Fenced):
            writer.commit(
                [ProducerRecord(topic, b"of a zombie")], is_already_committed=already_real
            )
    successor.commit([ProducerRecord(topic, b"step 1")])
    expect(connection, topic, [b"step 1"])
    successor.close()


def test_commit_fails_when_the_broker_stays_unavailable(
    writer: TransactionalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsure = Unsure(writer, failures=transactions.ATTEMPTS, really_commits=False)
    monkeypatch.setattr(writer, "_try", unsure)
    monkeypatch.setattr(writer, "_initialise", lambda: writer._producer)
    with pytest.raises(BrokerUnavailable, match="_TIMED_OUT"):
        writer.commit([])
    assert unsure.calls == transactions.ATTEMPTS


class Clock:
    """The time of a process that is stopped while it waits: `stops` are the seconds that each wait
    takes."""

    def __init__(self, *stops: float) -> None:
        self.now, self._stops = 0.0, list(stops)

    def monotonic(self) -> float:
        return self.now

    def get(self, *, timeout: float) -> None:
        self.now += self._stops.pop(0) if self._stops else 0.0
        if self._stops:
            raise queue.Empty


@pytest.mark.parametrize(("seconds", "is_asked_again"), [(5.1, False), (30.0, True)])
def test_waiting_for_a_result_is_extended_once_after_a_process_suspension(
    seconds: float, is_asked_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = Clock(seconds, 0.1)
    monkeypatch.setattr(hanging_offsets, "time", clock)
    if is_asked_again:
        assert hanging_offsets.await_result(clock) is None
    else:
        with pytest.raises(BrokerUnavailable, match="no answer within 5 s"):
            hanging_offsets.await_result(clock)


def test_waiting_for_a_result_ends_despite_repeated_process_suspensions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock: Any = Clock(30.0, 30.0, 30.0)
    monkeypatch.setattr(hanging_offsets, "time", clock)
    with pytest.raises(BrokerUnavailable):
        hanging_offsets.await_result(clock)
