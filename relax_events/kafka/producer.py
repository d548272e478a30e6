"""Writes records: acknowledged by all replicas, exactly once in each partition, failures never
swallowed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from relax_events.deadline import Deadline
from relax_events.errors import AccessDenied, BrokerUnavailable
from relax_events.kafka.connection import Connection, error_of, fatal_errors, translate
from relax_events.kafka.records import OutRecord

DELIVERY_SECONDS = 120
FLUSH_SECONDS = 1.0  # after each it is asked whether the broker lets us in


class RecordProducer:
    """An idempotent producer. `write` returns when the records are acknowledged; `send` and `flush`
    split the two.

    A broker that is away for less than two minutes delays a write; it neither loses nor doubles it.
    `send` may be called by several threads, all else by one.
    """

    def __init__(
        self, connection: Connection, *, linger_ms: float = 0.0, one_record_per_batch: bool = False
    ) -> None:
        single = {"batch_num_messages": 1} if one_record_per_batch else {}
        settings = connection.settings(
            enable_idempotence=True,
            acks="all",
            linger_ms=linger_ms,
            delivery_timeout_ms=DELIVERY_SECONDS * 1000,
            message_max_bytes=64 * 1024 * 1024,
            queue_buffering_max_messages=1_000_000,
            **single,
        )
        self._producer = Producer(settings)
        self._connection = connection
        self._failure: KafkaError | None = None
        self._counting = threading.Lock()
        self._num_unanswered = 0
        self._waiting_since = self._looked_at = 0.0

    def send(self, record: OutRecord) -> None:
        """Hand a record to the client; it is safe only after `flush`."""
        with self._counting:
            if not self._num_unanswered:
                self._waiting_since = time.monotonic()
            self._num_unanswered += 1
        try:
            enqueue(self._producer, record, self._delivered)
        except BaseException:
            with self._counting:
                self._num_unanswered -= 1
            raise
        self._looked_at = time.monotonic()

    @property
    def seconds_unanswered(self) -> float:
        """For how long the broker had not answered when we last looked; 0 when nothing was owed."""
        return max(0.0, self._looked_at - self._waiting_since) if self._num_unanswered else 0.0

    def flush(self) -> None:
        """Wait until everything sent is acknowledged.

        Raises:
            AccessDenied: The broker has not let us in for as long as a request may take; what was
                sent is dropped.
            BrokerError: A record could not be delivered; nothing may be assumed about the others
                since the last flush.
        """
        with fatal_errors("delivering records"):
            left = self._flush_within(Deadline(DELIVERY_SECONDS + 1))
        failure, self._failure = self._failure, None
        if failure is not None:
            raise self._connection.translate(failure, "delivering records")
        if left:
            raise BrokerUnavailable(
                f"{left} records were not acknowledged within {DELIVERY_SECONDS} s; see that "
                "the broker runs"
            )

    def write(self, records: Iterable[OutRecord]) -> None:
        """Send records and wait until they are acknowledged."""
        for record in records:
            self.send(record)
        self.flush()

    def close(self) -> None:
        """Wait briefly for what is under way and drop the rest."""
        if self._producer.flush(5):
            self._producer.purge()

    def _flush_within(self, deadline: Deadline) -> int:
        """Wait for acknowledgements and return how many are missing at the deadline."""
        while (
            left := self._producer.flush(min(FLUSH_SECONDS, deadline.remaining_seconds))
        ) and not deadline.passed:
            self._looked_at = time.monotonic()
            if self._connection.refusals.seconds > self._connection.request_timeout_seconds:
                self._give_up()
        return int(left)

    def _give_up(self) -> None:
        refused = self._connection.refused("delivering records")
        if refused is not None:
            self._producer.purge()
            self._producer.flush(FLUSH_SECONDS)
            raise refused

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        with self._counting:
            self._num_unanswered -= 1
            self._waiting_since = time.monotonic()
        if error is None:
            self._connection.refusals.forget()
        else:
            self._failure = error
            if isinstance(
                denied := translate(error, f"writing to {message.topic()}"), AccessDenied
            ):
                self._connection.refusals.deny(denied)  # beats are sent and never waited for


def enqueue(producer: Any, record: OutRecord, on_delivery: Any) -> None:
    """Put a record into a client's queue, waiting while the queue is full.

    Raises:
        BrokerRefused: The record is larger than the client or the topic allows.
    """
    deadline = time.monotonic() + DELIVERY_SECONDS
    where = {} if record.partition < 0 else {"partition": record.partition}
    while True:
        try:
            producer.produce(
                record.topic,
                value=record.value,
                key=record.key.encode() or None,
                headers=[(name, text.encode()) for name, text in record.headers.items()],
                on_delivery=on_delivery,
                **where,
            )
            with fatal_errors(f"writing to {record.topic}"):
                producer.poll(0)
        except BufferError:
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"producer queue stayed full for {DELIVERY_SECONDS} s; see that the broker runs"
                ) from None
            producer.poll(0.05)
        except KafkaException as exception:
            size = len(record.value or b"")
            raise translate(
                error_of(exception), f"writing {size} bytes to {record.topic}"
            ) from exception
        else:
            return
