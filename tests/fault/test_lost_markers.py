"""The broker dies after it has logged the decision over a transaction, before it wrote the markers.

Markers go over the listener between brokers. Here it leads over a link that is down at the
decision, so a killed broker leaves none. Restarted, Kafka 4.3 forgets them in most attempts
(KAFKA-20734): its partitions have no leader for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from broker_steps import turn_until
from link import Link
from node import Node, choose_ports, node_behind_link
from structlog.testing import capture_logs

from relax_events.errors import BrokerUnavailable
from relax_events.events.parts import TopicOffset
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.transactions import TransactionalWriter
from relax_events.topics import TopicSpec

MAX_DEATHS = 10
FLUSH_SECONDS = 30.0
LOST = "transaction_markers.lost"


@pytest.fixture
def node(directory: Path, run_id: str, link: Link) -> Iterator[Node]:
    """Yield a broker whose markers go over the link, and clients' requests don't."""
    (port,) = choose_ports(1)
    with node_behind_link(
        directory / f"{run_id}-node",
        port=port,
        linked_port=link.target_port,
        link_port=link.port,
        properties={"inter.broker.listener.name": "LINKED"},
    ) as node:
        yield node


class Steps:
    """Two partitions to which each step is written in one transaction, as by a trainer."""

    def __init__(self, node: Node, link: Link, run_id: str) -> None:
        self._node, self._link = node, link
        self.connection = Connection(node.bootstrap_servers, client_id=f"{run_id}-trainer")
        self._partitions = [(f"{run_id}.steps", 0), (f"{run_id}.versions", 0)]
        self._admin = Admin(self.connection)
        self._admin.create(
            [TopicSpec(topic, 1, 1, "of a test", {}) for topic, _ in self._partitions]
        )
        self._transactional_id, self._group = f"{run_id}.trainer.0", f"{run_id}.trainer"
        self.reader = LogReader(self.connection, consumer_group=self._group)
        self.is_to_die = False
        """Within the next transaction, before it wrote the markers."""

    def open_writer(self) -> TransactionalWriter:
        """Return the writer of a trainer that has just started."""
        return TransactionalWriter(
            self.connection,
            transactional_id=self._transactional_id,
            partitions=self._partitions,
            consumer_group=self._group,
        )

    def write(self, writer: TransactionalWriter, step: int) -> None:
        """Write a step as a trainer does."""
        writer.commit(
            self.build_records(step),
            offsets=self.build_offsets(step),
            reader=self.reader,
            is_already_committed=lambda: step in self.read()[0],
            before_commit=lambda: self.hold_markers_back(writer),
        )

    def build_records(self, step: int) -> list[ProducerRecord]:
        """Return the records of a step."""
        return [ProducerRecord(topic, str(step).encode()) for topic, _ in self._partitions]

    def build_offsets(self, step: int) -> list[TopicOffset]:
        """Return the offsets of a step's transaction."""
        topic, partition = self._partitions[0]
        return [TopicOffset(topic, partition, step)]

    def read_committed_offset(self) -> int:
        """Return the offset that the last visible step committed; an undecided one is an error."""
        return self._admin.committed_offsets(self._group, self._partitions[:1])[self._partitions[0]]

    def read(self) -> list[list[int]]:
        """Return the steps that a consumer sees in each partition."""
        reader = LogReader(self.connection)
        try:
            return [
                [int(record.value) for record in reader.read_to_end([partition])]
                for partition in self._partitions
            ]
        finally:
            reader.close()

    def hold_markers_back(self, writer: TransactionalWriter) -> None:
        """If the broker is to die, take the link down once it has the records: to accept them it
        asks itself over the link.
        """
        if self.is_to_die:
            assert writer._producer.flush(FLUSH_SECONDS) == 0
            self._link.go_down()

    def die_without_markers(self) -> None:
        """Kill the broker, which could not write markers since the link went down, and start it
        again."""
        self.is_to_die = False
        self._node.kill()
        self._link.heal()
        self._node.start()


@pytest.fixture
def steps(node: Node, link: Link, run_id: str) -> Steps:
    return Steps(node, link, run_id)


def assert_each_once(steps: Steps, number: int) -> None:
    turn_until(lambda: steps.read()[0][-1:] == [number - 1])
    assert steps.read() == [list(range(number))] * 2
    assert steps.read_committed_offset() == number - 1


def write_until_markers_are_lost(steps: Steps, write: Callable[[int], None]) -> int:
    """Write steps while the broker dies after each one's decision; return how many there are once
    it has lost the markers of one. Each is seen once."""
    with capture_logs() as logs:
        for step in range(1, MAX_DEATHS):
            turn_until(lambda step=step: steps.read()[0][-1:] == [step - 1])  # type: ignore[misc]
            steps.is_to_die = True
            write(step)
            assert_each_once(steps, step + 1)
            if any(entry["event"] == LOST for entry in logs):
                return step + 1
    pytest.skip("the broker wrote the markers of all its decisions")


def test_committed_step_becomes_visible_although_its_markers_were_lost(
    steps: Steps,
) -> None:
    """Also while its writer waits for what others do after they see it."""
    writer = steps.open_writer()
    steps.write(writer, 0)

    def write(step: int) -> None:
        steps.write(writer, step)
        steps.die_without_markers()

    number = write_until_markers_are_lost(steps, write)
    steps.write(writer, number)
    assert_each_once(steps, number + 1)
    writer.close()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_step_with_an_unknown_outcome_is_written_once_although_its_markers_were_lost(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    """By the same writer, and by that of a restarted trainer."""
    writer = steps.open_writer()
    steps.write(writer, 0)
    original: Callable[..., None] = TransactionalWriter._try

    def die_at_the_end(self: TransactionalWriter, *arguments: Any) -> None:
        original(self, *arguments)
        if steps.is_to_die:
            self._markers.close()  # it has no news of its commit, and expects nothing
            steps.die_without_markers()
            raise BrokerUnavailable("committing a transaction: _TIMED_OUT")

    monkeypatch.setattr(TransactionalWriter, "_try", die_at_the_end)

    def write(step: int) -> None:
        nonlocal writer
        if not is_restarted:
            steps.write(writer, step)
            return
        with pytest.raises(BrokerUnavailable):
            writer._try(
                steps.build_records(step),
                steps.build_offsets(step),
                steps.reader,
                partial(steps.hold_markers_back, writer),
            )
        writer.close()
        writer = steps.open_writer()

    write_until_markers_are_lost(steps, write)
    writer.close()
