"""Rebuilds a partition with each record at its original offset.

Offsets of a log have gaps where a transaction left its control record or was aborted.
TrainStepCommitted names records by offset, so a copy must have the same gaps:

    one offset                  a transaction, whose commit marker takes the offset
    several offsets             an aborted transaction: its records and its marker take them
    before the first record     (a purged log) empty records, which are deleted at the end
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
from relax_events.kafka.connection import Connection, extract_error, translate

WRITE_SECONDS = 120.0
TRANSACTION_SECONDS = 60
MAX_BATCH_RECORDS = 2000
MAX_PADDING_RECORDS = 10_000
CONTROL_RECORD_POLL_SECONDS = 0.002
PADDING = LoggedRecord(0, 0, b"", b"", (("relax-gap", b""),))


class PartitionWriter:
    """Rebuilds one partition at a time, on topics with `message.timestamp.type=CreateTime`."""

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
                extract_error(exception), "opening a transaction to import with"
            ) from exception
        self._topic, self._partition, self._position = "", 0, 0
        self._is_control_record_due = False
        self._failure: BrokerError | None = None

    def write(
        self, topic: str, partition: int, records: Iterable[LoggedRecord], *, end: int
    ) -> None:
        """Rebuild an empty partition.

        Args:
            topic: The topic's full name.
            partition: The partition's number.
            records: The committed records by ascending offset; streamed.
            end: The partition's end offset afterwards.
        Raises:
            BrokerError: A record did not get its offset, because the partition was not empty or has
                another producer.
        """
        self._topic, self._partition, self._position = topic, partition, 0
        run: list[LoggedRecord] = []
        first = 0
        for record in records:
            gap = record.offset - self._position - len(run)
            if gap:
                first = first or (record.offset if not self._position + len(run) else 0)
                self._skip_offsets(run, gap)
                run = []
            elif len(run) >= MAX_BATCH_RECORDS:
                self._send(run[:-1])
                run = run[-1:]
            run.append(record)
        first = first or (end if not self._position + len(run) else 0)
        self._skip_offsets(run, end - self._position - len(run))
        self._await_control_record()
        if first:
            self._admin.delete_records([TopicOffset(topic, partition, first)])

    def append(self, topic: str, partition: int, records: Iterable[LoggedRecord]) -> None:
        """Append records without keeping their offsets: for compacted topics, where offsets have no
        meaning.
        """
        run: list[LoggedRecord] = []
        self._topic, self._partition, self._position = topic, partition, 0
        for record in records:
            run.append(record)
            if len(run) >= MAX_BATCH_RECORDS:
                self._send(run)
                run = []
        self._send(run)

    def close(self) -> None:
        """Drop all unsent records."""
        self._plain.purge()
        self._transactions.purge()

    def _skip_offsets(self, run: Sequence[LoggedRecord], gap: int) -> None:
        """Write consecutive records, then skip `gap` offsets."""
        if gap == 1 and run:
            self._write_transaction(run, commits=True)
            return
        self._send(run)
        is_first = self._position == 0
        while gap:
            size = gap if gap <= MAX_PADDING_RECORDS else MAX_PADDING_RECORDS // 2
            if is_first:
                self._send([PADDING] * size)
            else:
                self._write_transaction([PADDING] * (size - 1), commits=False)
            gap -= size

    def _write_transaction(self, records: Sequence[LoggedRecord], *, commits: bool) -> None:
        """Write records in a transaction of their own; its control record takes the offset behind
        them.
        """
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
                extract_error(exception),
                f"importing into {self._topic}[{self._partition}]@{self._position}",
            ) from exception
        self._position += 1
        self._is_control_record_due = True

    def _await_control_record(self) -> None:
        """Wait until the last transaction's control record is on the log: the broker writes it
        after it responds.

        The client's next transaction waits for it; a record outside of a transaction would take its
        offset.
        """
        deadline = Deadline(self._timeout_seconds)
        partition = (self._topic, self._partition)
        while (
            self._is_control_record_due
            and self._admin.end_offsets([partition])[partition] < self._position
        ):
            if deadline.passed:
                raise BrokerUnavailable(
                    f"the transaction before {self._topic}[{self._partition}]@{self._position} "
                    "left no control record; check that all brokers run"
                )
            time.sleep(CONTROL_RECORD_POLL_SECONDS)
        self._is_control_record_due = False

    def _send(self, records: Sequence[LoggedRecord], producer: Any = None) -> None:
        """Write records, wait for their acknowledgements, and check that each got the next
        offset.
        """
        if records and producer is None:
            self._await_control_record()
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
                    on_delivery=self._on_delivery,
                )
            except BufferError:
                producer.poll(0.1)  # the client's queue is full: wait for acknowledgements
            else:
                producer.poll(0)
                return

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        what = f"importing into {self._topic}[{self._partition}]@{self._position}"
        if error is not None:
            self._failure = self._failure or translate(error, what)
        elif message.offset() != self._position and self._failure is None:
            self._failure = BrokerError(
                f"{what}: the record got offset {message.offset()}; the partition was not "
                "empty, or has another producer"
            )
        self._position += 1
