"""Writes a partition anew, each record at the offset that it had.

Readers of committed records see offsets leap where a transaction left its mark, or was aborted.
TrainStepCommitted names records by offset, so a copy has to leap alike, and can:

    one offset to leap          the records before it are written in a transaction, whose commit leaves one mark
    several                     an aborted transaction: its records and its mark take up as many, and nobody sees them
    before the first record     (a log that was purged) records of no content, which are deleted at the end
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerUnavailable
from relax_events.events.container import LoggedRecord
from relax_events.events.parts import TopicOffset
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection, error_of, translate

WRITE_SECONDS = 120.0
TRANSACTION_SECONDS = 60
RECORDS_AT_ONCE = 2000
PADDING_AT_ONCE = 10_000
MARK_SECONDS = 0.002
PADDING = LoggedRecord(0, 0, b"", b"", (("relax-gap", b""),))


class PartitionWriter:
    """Rebuilds partitions, one at a time, on topics with `message.timestamp.type=CreateTime`."""

    def __init__(self, connection: Connection, *, transactional_id: str) -> None:
        settings = {
            "linger_ms": 5,
            "message_max_bytes": 64 * 1024 * 1024,
            "delivery_timeout_ms": int(WRITE_SECONDS * 1000),
        }
        self._plain = Producer(connection.settings(enable_idempotence=True, acks="all", **settings))
        self._admin, self._timeout_seconds = Admin(connection), connection.request_timeout_seconds
        timeouts = {
            "transaction_timeout_ms": TRANSACTION_SECONDS * 1000,
            "delivery_timeout_ms": TRANSACTION_SECONDS * 1000,
        }
        self._transactions = Producer(
            connection.settings(transactional_id=transactional_id, **(settings | timeouts))
        )
        try:
            self._transactions.init_transactions(self._timeout_seconds)
        except KafkaException as exception:
            raise translate(
                error_of(exception), "opening a transaction to import with"
            ) from exception
        self._topic, self._partition, self._position = "", 0, 0
        self._is_mark_due = False
        self._failure: BrokerError | None = None

    def write(
        self, topic: str, partition: int, records: Iterable[LoggedRecord], *, end: int
    ) -> None:
        """Rebuild an empty partition.

        Args:
            topic: Its topic's full name.
            partition: Its number.
            records: What readers of committed records are to see, by rising offset; streamed.
            end: The partition's next offset afterwards.
        Raises:
            BrokerError: A record did not get its offset; the partition was not empty, or somebody
                else writes to it.
        """
        self._topic, self._partition, self._position = topic, partition, 0
        run: list[LoggedRecord] = []
        first = 0
        for record in records:
            gap = record.offset - self._position - len(run)
            if gap:
                first = first or (record.offset if not self._position + len(run) else 0)
                self._leap(run, gap)
                run = []
            elif len(run) >= RECORDS_AT_ONCE:
                self._send(run[:-1])
                run = run[-1:]
            run.append(record)
        first = first or (end if not self._position + len(run) else 0)
        self._leap(run, end - self._position - len(run))
        self._await_mark()
        if first:
            self._admin.delete_records([TopicOffset(topic, partition, first)])

    def append(self, topic: str, partition: int, records: Iterable[LoggedRecord]) -> None:
        """Write records behind each other, whatever their offsets were: for compacted topics, where
        no offset has a meaning.
        """
        run: list[LoggedRecord] = []
        self._topic, self._partition, self._position = topic, partition, 0
        for record in records:
            run.append(record)
            if len(run) >= RECORDS_AT_ONCE:
                self._send(run)
                run = []
        self._send(run)

    def close(self) -> None:
        """Leave nothing open."""
        self._plain.purge()
        self._transactions.purge()

    def _leap(self, run: Sequence[LoggedRecord], gap: int) -> None:
        """Write a run of records, then pass over so many offsets."""
        if gap == 1 and run:
            self._transact(run, commits=True)
            return
        self._send(run)
        is_first = self._position == 0
        while gap:
            size = gap if gap <= PADDING_AT_ONCE else PADDING_AT_ONCE // 2
            if is_first:
                self._send([PADDING] * size)
            else:
                self._transact([PADDING] * (size - 1), commits=False)
            gap -= size

    def _transact(self, records: Sequence[LoggedRecord], *, commits: bool) -> None:
        """Write records in a transaction of their own; its mark takes the offset behind them."""
        try:
            self._transactions.begin_transaction()
            self._send(records, self._transactions)
            (
                self._transactions.commit_transaction
                if commits
                else self._transactions.abort_transaction
            )(TRANSACTION_SECONDS)
        except KafkaException as exception:
            raise translate(
                error_of(exception),
                f"importing into {self._topic}[{self._partition}]@{self._position}",
            ) from exception
        self._position += 1
        self._is_mark_due = True

    def _await_mark(self) -> None:
        """Wait until the last transaction's mark is on the log: the broker answers first and writes
        it then, and tells nobody.

        The next transaction waits by itself; a plain record would take the mark's offset.
        """
        deadline = Deadline(self._timeout_seconds)
        place = (self._topic, self._partition)
        while self._is_mark_due and self._admin.end_offsets([place])[place] < self._position:
            if deadline.passed:
                raise BrokerUnavailable(
                    f"the transaction before {place[0]}[{place[1]}]@{self._position} left no "
                    "mark; see that all brokers run"
                )
            time.sleep(MARK_SECONDS)
        self._is_mark_due = False

    def _send(self, records: Sequence[LoggedRecord], producer: Any = None) -> None:
        """Write records, wait until they are acknowledged, and see that each got the next
        offset.
        """
        if records and producer is None:
            self._await_mark()
        producer = producer or self._plain
        for record in records:
            self._produce(producer, record)
        if records and producer.flush(WRITE_SECONDS):
            raise BrokerUnavailable(
                f"importing into {self._topic}[{self._partition}]: not acknowledged within "
                f"{WRITE_SECONDS:g} s"
            )
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _produce(self, producer: Any, record: LoggedRecord) -> None:
        while True:
            try:
                producer.produce(
                    self._topic,
                    partition=self._partition,
                    key=record.key,
                    value=record.value,
                    headers=list(record.headers),
                    timestamp=record.timestamp_ms,
                    on_delivery=self._delivered,
                )
            except BufferError:
                producer.poll(0.1)  # the client's queue is full: wait for acknowledgements
            else:
                producer.poll(0)
                return

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        what = f"importing into {self._topic}[{self._partition}]@{self._position}"
        if error is not None:
            self._failure = self._failure or translate(error, what)
        elif message.offset() != self._position and self._failure is None:
            self._failure = BrokerError(
                f"{what}: the record lies at {message.offset()}; the partition was not "
                "empty, or somebody else writes to it"
            )
        self._position += 1
