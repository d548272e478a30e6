"""Kafka in memory, behind the client's classes as `relax_events.kafka` uses them: deterministic,
and with a possible crash at every call.

It implements what the product's promises need: offsets, committed positions, transactions with
markers and read_committed, fencing by transactional id, and consumer groups that reject stale
members. A client belongs to the process that creates it. A process dies at a broker call, before or
after the call takes effect, and loses its unsent records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_INVALID,
    KafkaError,
    KafkaException,
    TopicPartition,
)

PartitionKey = tuple[str, int]
Headers = Sequence[tuple[str, bytes]]


class Killed(BaseException):
    """The process is no more; nothing of it may run on."""


@dataclass(slots=True)
class Process:
    """A process that makes broker calls. Each call passes it twice, and it dies when `passes_left`
    reaches 0."""

    name: str
    is_dead: bool = False
    passes_left: int = 0
    lost_report: bool = False
    lost_commit: bool = False
    unsure_commit: str = ""

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surround the effect of one broker call."""
        self._pass()
        yield
        self._pass()

    def _pass(self) -> None:
        if self.passes_left:
            self.passes_left -= 1
            self.is_dead = self.passes_left == 0
        if self.is_dead:
            raise Killed(self.name)

    def heal(self) -> None:
        """Take back the faults that have not happened yet."""
        self.passes_left, self.lost_report, self.lost_commit, self.unsure_commit = (
            0,
            False,
            False,
            "",
        )


@dataclass(slots=True, eq=False)
class Transaction:
    """Open until it is committed or aborted."""

    state: str = "open"
    topic_partitions: dict[PartitionKey, None] = field(default_factory=dict)
    offsets: dict[str, dict[PartitionKey, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry at an offset: a record, or the marker that ends a transaction."""

    topic_partition: PartitionKey
    offset: int
    key: bytes | None
    stored: bytes | None
    carried: Headers
    transaction: Transaction | None
    is_marker: bool = False


@dataclass(frozen=True, slots=True)
class MemoryMessage:
    """An entry, or an error, as the client hands it over."""

    topic_partition: PartitionKey
    entry: Entry | None = None
    failure: KafkaError | None = None

    def topic(self) -> str:
        return self.topic_partition[0]

    def partition(self) -> int:
        return self.topic_partition[1]

    def offset(self) -> int:
        return self.entry.offset if self.entry else OFFSET_INVALID

    def error(self) -> KafkaError | None:
        return self.failure

    def key(self) -> bytes | None:
        return self.entry.key if self.entry else None

    def value(self) -> bytes | None:
        return self.entry.stored if self.entry else None

    def headers(self) -> Headers:
        return self.entry.carried if self.entry else ()

    def timestamp(self) -> tuple[int, int]:
        return (1, 0)


class MemoryKafka:
    """The cluster: partitions, groups, transactional ids. `current` is the process on whose behalf
    clients are made."""

    def __init__(self) -> None:
        self.partitions: dict[PartitionKey, list[Entry]] = {}
        self.committed: dict[str, dict[PartitionKey, int]] = {}
        self.members: dict[str, list[MemoryConsumer]] = {}
        self.epochs: dict[str, int] = {}
        self.open: dict[str, Transaction] = {}
        self.current = Process("none")
        self.after_commit: Callable[[], None] = lambda: None
        """Called after each commit of offsets, before its process learns of it: a moment at which
        that process can die."""

    def create(self, topic: str, num_partitions: int) -> None:
        """Make a topic."""
        for partition in range(num_partitions):
            self.partitions[topic, partition] = []

    def append(
        self,
        topic_partition: PartitionKey,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        transaction: Transaction | None = None,
    ) -> None:
        """Write a record."""
        entries = self.partitions[topic_partition]
        entries.append(Entry(topic_partition, len(entries), key, value, headers, transaction))
        if transaction is not None:
            transaction.topic_partitions[topic_partition] = None

    def stable_end(self, topic_partition: PartitionKey) -> int:
        """Return the offset up to which readers of committed records may read."""
        open_ones = (
            entry.offset
            for entry in self.partitions[topic_partition]
            if entry.transaction is not None and entry.transaction.state == "open"
        )
        return next(open_ones, len(self.partitions[topic_partition]))

    def visible(self, topic_partition: PartitionKey, offset: int) -> Iterator[Entry]:
        """Yield the committed records from an offset on."""
        for entry in self.partitions[topic_partition][offset : self.stable_end(topic_partition)]:
            if not entry.is_marker and (
                entry.transaction is None or entry.transaction.state == "committed"
            ):
                yield entry

    def end_transaction(self, transactional_id: str, state: str) -> None:
        """Commit or abort what the id has open."""
        transaction = self.open.pop(transactional_id, None)
        if transaction is None:
            return
        transaction.state = state
        for topic_partition in transaction.topic_partitions:
            entries = self.partitions[topic_partition]
            entries.append(
                Entry(topic_partition, len(entries), None, None, (), None, is_marker=True)
            )
        if state == "committed":
            for group, offsets in transaction.offsets.items():
                self.commit(group, offsets)

    def commit(self, group: str, offsets: dict[PartitionKey, int]) -> None:
        """Commit offsets of a consumer group."""
        self.committed.setdefault(group, {}).update(offsets)
        self.after_commit()

    def lapse(self, process: Process) -> None:
        """Let the sessions of a process's group members time out."""
        for group in self.members.values():
            group[:] = [member for member in group if member.process is not process]


class MemoryAdmin:
    """The admin calls of the trainer, and of who reads a log."""

    def __init__(self, kafka: MemoryKafka) -> None:
        self._kafka, self._process = kafka, kafka.current

    def topics(self, prefix: str) -> list[str]:
        return sorted({topic for topic, _ in self._kafka.partitions if topic.startswith(prefix)})

    def end_offsets(self, topic_partitions: Sequence[PartitionKey]) -> dict[PartitionKey, int]:
        with self._process.call():
            return {
                topic_partition: len(self._kafka.partitions[topic_partition])
                for topic_partition in topic_partitions
            }

    def close(self) -> None: ...


class MemoryMarkers:
    """The markers of transactions, none of which is lost here: a broker dies in the fault tests."""

    topics: tuple[str, ...] = ()

    def __init__(self, *_: object, **__: object) -> None: ...

    def write_missing(self) -> None: ...

    def expect(self, _: object) -> None: ...

    def await_expected(self, _: float) -> None: ...

    def close(self) -> None: ...


class MemoryProducer:
    """An idempotent or transactional producer. Plain records leave the client at `flush`; a dying
    one takes the newer half with it."""

    def __init__(self, kafka: MemoryKafka, settings: dict[str, Any]) -> None:
        self._kafka, self._process = kafka, kafka.current
        self._id: str = settings.get("transactional.id", "")
        self._epoch = 0
        self._buffer: list[tuple[PartitionKey, dict[str, Any], Callable[..., None]]] = []

    def produce(
        self,
        topic: str,
        *,
        value: bytes | None,
        key: bytes | None,
        headers: Headers,
        on_delivery: Callable[..., None],
        partition: int = 0,
    ) -> None:
        fields = {"key": key, "value": value, "headers": headers}
        if not self._id:
            self._buffer.append(((topic, partition), fields, on_delivery))
        elif self._kafka.epochs[self._id] == self._epoch:
            with self._process.call():
                self._kafka.append(
                    (topic, partition), **fields, transaction=self._kafka.open[self._id]
                )

    def poll(self, timeout: float) -> int:
        return 0

    def flush(self, timeout: float) -> int:
        try:
            with self._process.call():
                self._deliver(len(self._buffer))
        except Killed:
            self._deliver(len(self._buffer) // 2)
            self.purge()
            raise
        return 0

    def purge(self) -> None:
        self._buffer.clear()

    def close(self) -> None:
        """End the client, which has nothing left to send: it was flushed or purged."""
        assert not self._buffer

    def _deliver(self, count: int) -> None:
        leaving, self._buffer = self._buffer[:count], self._buffer[count:]
        for topic_partition, fields, on_delivery in leaving:
            self._kafka.append(topic_partition, **fields)
            # it is on the log, but its outcome is reported as unknown
            if self._process.lost_report:
                self._process.lost_report = False
                on_delivery(KafkaError(KafkaError._MSG_TIMED_OUT), MemoryMessage(topic_partition))
            else:
                on_delivery(None, MemoryMessage(topic_partition))

    def init_transactions(self, timeout: float) -> None:
        with self._process.call():
            self._epoch = self._kafka.epochs[self._id] = self._kafka.epochs.get(self._id, 0) + 1
            self._kafka.end_transaction(self._id, "aborted")

    def begin_transaction(self) -> None:
        self._refuse_zombie()
        with self._process.call():
            self._kafka.open[self._id] = Transaction()

    def send_offsets_to_transaction(
        self, positions: Sequence[TopicPartition], group: str, timeout: float
    ) -> None:
        """Called in its own thread, so it can't kill the process: the next call does."""
        if self._kafka.epochs[self._id] == self._epoch:
            offsets = {
                (position.topic, position.partition): position.offset for position in positions
            }
            self._kafka.open[self._id].offsets.setdefault(group, {}).update(offsets)

    def commit_transaction(self, timeout: float) -> None:
        self._refuse_zombie()
        unsure, self._process.unsure_commit = self._process.unsure_commit, ""
        with self._process.call():
            if unsure != "not done":
                self._kafka.end_transaction(self._id, "committed")
        if unsure:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))

    def _refuse_zombie(self) -> None:
        if self._kafka.epochs[self._id] != self._epoch:
            raise KafkaException(KafkaError(KafkaError._FENCED, fatal=True))


class MemoryConsumer:
    """A group member with the range assignor, or a reader of chosen partitions; both see committed
    records only."""

    def __init__(self, kafka: MemoryKafka, settings: dict[str, Any]) -> None:
        self._kafka, self.process = kafka, kafka.current
        self._group: str = settings["group.id"]
        self._reports_ends: bool = settings.get("enable.partition.eof", False)
        self._positions: dict[PartitionKey, int] = {}
        self._reported: dict[PartitionKey, int] = {}
        self._paused: set[PartitionKey] = set()
        self._topics: list[str] = []
        self._callbacks: dict[str, Callable[..., None]] = {}

    def subscribe(self, topics: list[str], **callbacks: Callable[..., None]) -> None:
        self._topics, self._callbacks = topics, callbacks
        self._kafka.members.setdefault(self._group, []).append(self)

    def poll(self, timeout: float) -> MemoryMessage | None:
        if self._topics:
            self._rebalance()
        return next(iter(self.consume(1, timeout)), None)

    def consume(self, count: int, timeout: float) -> list[MemoryMessage]:
        with self.process.call():
            return [message for _, message in zip(range(count), self._messages(), strict=False)]

    def _messages(self) -> Iterator[MemoryMessage]:
        """Yield what there is, and move on as each is taken."""
        for topic_partition in [
            topic_partition
            for topic_partition in self._positions
            if topic_partition not in self._paused
        ]:
            for entry in self._kafka.visible(topic_partition, self._positions[topic_partition]):
                self._positions[topic_partition] = entry.offset + 1
                yield MemoryMessage(topic_partition, entry)
            end = self._kafka.stable_end(topic_partition)
            if self._reports_ends and self._reported.get(topic_partition) != end:
                self._reported[topic_partition] = end
                yield MemoryMessage(topic_partition, failure=KafkaError(KafkaError._PARTITION_EOF))

    def _rebalance(self) -> None:
        """Take part in one round: release the partitions of others, then take the free ones."""
        members = self._kafka.members[self._group]
        held = set(self._positions)
        if self not in members:
            self._paused.clear()
            self._call("on_lost", held)
            members.append(self)
            return
        target = self._target(members)
        self._call("on_revoke", held - target)
        of_others = {
            topic_partition
            for member in members
            if member is not self
            for topic_partition in member._positions
        }
        self._call("on_assign", target - held - of_others)

    def _target(self, members: list[MemoryConsumer]) -> set[PartitionKey]:
        topic_partitions = sorted(
            topic_partition
            for topic_partition in self._kafka.partitions
            if topic_partition[0] in self._topics
        )
        count = 1 + max(partition for _, partition in topic_partitions)
        mine = members.index(self)
        return {
            topic_partition
            for topic_partition in topic_partitions
            if topic_partition[1] * len(members) // count == mine
        }

    def _call(self, name: str, topic_partitions: set[PartitionKey]) -> None:
        if topic_partitions:
            self._callbacks[name](
                self,
                [TopicPartition(*topic_partition) for topic_partition in sorted(topic_partitions)],
            )

    def commit(self, offsets: list[TopicPartition], *, asynchronous: bool) -> None:
        with self.process.call():
            if self._topics and self not in self._kafka.members[self._group]:
                if asynchronous:
                    return
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))
            if self.process.lost_commit:
                self.process.lost_commit = False
                return
            self._kafka.commit(
                self._group, {(one.topic, one.partition): one.offset for one in offsets}
            )

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        with self.process.call():
            known = self._kafka.committed.get(self._group, {})
            return [
                TopicPartition(
                    one.topic, one.partition, known.get((one.topic, one.partition), OFFSET_INVALID)
                )
                for one in partitions
            ]

    def offsets_for_times(
        self, partitions: list[TopicPartition], timeout: float
    ) -> list[TopicPartition]:
        with self.process.call():
            return [TopicPartition(one.topic, one.partition, 0) for one in partitions]

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._positions, self._reported = {}, {}
        self.incremental_assign(partitions)

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        for one in partitions:
            self._positions[one.topic, one.partition] = (
                0 if one.offset == OFFSET_BEGINNING else one.offset
            )

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        for one in partitions:
            self._positions.pop((one.topic, one.partition), None)

    def seek(self, position: TopicPartition) -> None:
        self._positions[position.topic, position.partition] = position.offset

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition(*topic_partition) for topic_partition in self._positions]

    def pause(self, partitions: list[TopicPartition]) -> None:
        self._paused |= {(one.topic, one.partition) for one in partitions}

    def resume(self, partitions: list[TopicPartition]) -> None:
        self._paused -= {(one.topic, one.partition) for one in partitions}

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = 0.0, cached: bool = False
    ) -> tuple[int, int]:
        with self.process.call():
            return 0, self._kafka.stable_end((partition.topic, partition.partition))

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:
        with self.process.call():
            partitions = {
                topic_partition[1]: None
                for topic_partition in self._kafka.partitions
                if topic_partition[0] == topic
            }
            return SimpleNamespace(
                topics={topic: SimpleNamespace(error=None, partitions=partitions)}
            )

    def consumer_group_metadata(self) -> str:
        return self._group

    def memberid(self) -> str:
        return str(id(self))

    def close(self) -> None:
        if self._topics and self in self._kafka.members[self._group]:
            self._call("on_revoke", set(self._positions))
            self._kafka.members[self._group].remove(self)
