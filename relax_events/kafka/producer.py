"""Produces records idempotently, acknowledged by all in-sync replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from relax_events.deadline import Deadline
from relax_events.errors import AccessDenied, BrokerUnavailable
from relax_events.kafka.connection import Connection, extract_error, translate
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.workarounds.lost_exceptions import translate_fatal_errors

DELIVERY_SECONDS = 120
LINGER_MS = 100.0
"""Time that a worker's records wait for more, so that the roles behind it receive many at a time. A
worker that has nothing else to write ends the wait."""
FLUSH_SECONDS = 1.0  # the interval at which a flush checks whether the broker denies access
WAKE_SECONDS = 0.001
MAX_IN_FLIGHT_RECORDS = 5
"""librdkafka's idempotent producer sends a partition's next batch once fewer records than this wait
for their acknowledgement; until then a batch that is ready keeps a processor busy."""


class RecordProducer:
    """An idempotent producer. `write` returns when the records are acknowledged; it is `send`
    followed by `flush`.

    An outage of less than two minutes delays a write without loss or duplicates. `send` may be
    called by several threads, all other methods by one.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        linger_ms: float = 0.0,
        max_batch_records: int | None = None,
    ) -> None:
        """Open the producer.

        Args:
            connection: The brokers.
            linger_ms: Milliseconds that a record waits for others of its batch; `flush` ends the
                wait.
            max_batch_records: The most records of a batch; a share consumer leases whole batches.
        """
        bounds: dict[str, Any] = (
            {} if max_batch_records is None else {"batch_num_messages": max_batch_records}
        )
        settings = connection.lasting_settings(
            enable_idempotence=True,
            acks="all",
            linger_ms=linger_ms,
            delivery_timeout_ms=DELIVERY_SECONDS * 1000,
            message_max_bytes=64 * 1024 * 1024,
            queue_buffering_max_messages=1_000_000,
            **bounds,
        )
        self._producer = Producer(settings)
        self._connection = connection
        self._max_batch_records = max_batch_records
        self._failure: KafkaError | None = None
        self._is_closed = False
        self._counting = threading.Lock()
        self._num_unacknowledged = 0
        self._waiting_since = self._checked_at = 0.0

    def send(
        self, record: ProducerRecord, *, on_acknowledged: Callable[[], None] | None = None
    ) -> None:
        """Queue a record in the client; it is durable only after `flush`.

        Args:
            record: The record.
            on_acknowledged: Called once the record is durable, by any thread that sends, checks or
                flushes. A partition's records are acknowledged in the order in which they were
                sent.
        """
        with self._counting:
            if not self._num_unacknowledged:
                self._waiting_since = time.monotonic()
            self._num_unacknowledged += 1
        try:
            enqueue(
                self._producer,
                record,
                partial(self._acknowledge_delivery, on_acknowledged)
                if on_acknowledged
                else self._on_delivery,
            )
        except BaseException:
            with self._counting:
                self._num_unacknowledged -= 1
            raise
        self._checked_at = time.monotonic()

    def end_linger(self) -> None:
        """Ask the client to send what waits for others of its batch, and don't wait for the
        acknowledgement. Where its thread wakes too late, the records wait on.
        """
        # the thread looks whether a flush is going on
        with translate_fatal_errors("delivering records"):
            self._producer.flush(WAKE_SECONDS)

    @property
    def unacknowledged_seconds(self) -> float:
        """Seconds without an acknowledgement at the last check; 0 when nothing is pending."""
        return max(0.0, self._checked_at - self._waiting_since) if self._num_unacknowledged else 0.0

    def check(self) -> None:
        """Take the acknowledgements that have arrived, without waiting.

        Raises:
            BrokerError: As for `flush`.
        """
        with translate_fatal_errors("delivering records"):
            self._producer.poll(0)
        self._checked_at = time.monotonic()
        self._connection.auth_failures.raise_fatal()
        if self._connection.auth_failures.seconds > self._connection.request_timeout_seconds:
            self._raise_refusal()
        self._raise_failure()

    def flush(self) -> None:
        """Wait until all sent records are acknowledged.

        Raises:
            AccessDenied: The broker denied access for longer than the request timeout; sent records
                are dropped.
            ClientFailed: This client, or another one of the worker, has lost all brokers for good.
            BrokerError: A record could not be delivered; the state of the other records since the
                last flush is unknown.
        """
        with translate_fatal_errors("delivering records"):
            left = self._flush_within(Deadline(DELIVERY_SECONDS + 1))
        self._raise_failure()
        if left:
            raise BrokerUnavailable(
                f"{left} records were not acknowledged within {DELIVERY_SECONDS} s; see that "
                "the broker runs"
            )

    def write(
        self, records: Iterable[ProducerRecord], *, max_batch_records: int | None = None
    ) -> None:
        """Send records and wait until they are acknowledged.

        With a bound on a batch's records, records of the next batches are made meanwhile.

        Args:
            records: The records.
            max_batch_records: The most records of a batch, if fewer than the producer's bound.
        """
        bound = self._max_batch_records
        if bound is None:
            for record in records:
                self.send(record)
            self.flush()
            return
        size = min(max_batch_records or bound, bound)
        if size == bound:  # the client itself ends the batches
            size *= -(-MAX_IN_FLIGHT_RECORDS // size)
        remaining = iter(records)
        unsent = list(islice(remaining, size))
        while unsent:
            for record in unsent:
                self.send(record)
            unsent = list(islice(remaining, size))
            self.flush()

    def close(self) -> None:
        """Wait up to 5 s for in-flight records, drop the rest, and end the client: one that is left
        open works on while the process ends, and crashes it now and then. Does nothing the second
        time.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._producer.flush(5):
            self._producer.purge()
            self._producer.flush(FLUSH_SECONDS)
        self._producer.close()

    def _flush_within(self, deadline: Deadline) -> int:
        """Wait for acknowledgements; return how many are missing at the deadline."""
        while (
            left := self._producer.flush(min(FLUSH_SECONDS, deadline.remaining_seconds))
        ) and not deadline.passed:
            self._checked_at = time.monotonic()
            self._connection.auth_failures.raise_fatal()
            if self._connection.auth_failures.seconds > self._connection.request_timeout_seconds:
                self._raise_refusal()
        return int(left)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise self._connection.translate(failure, "delivering records")

    def _raise_refusal(self) -> None:
        refused = self._connection.find_refusal("delivering records")
        if refused is not None:
            self._producer.purge()
            self._producer.flush(FLUSH_SECONDS)
            raise refused

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        with self._counting:
            self._num_unacknowledged -= 1
            self._waiting_since = time.monotonic()
        if error is None:
            self._connection.auth_failures.clear()
        else:
            self._failure = error
            if isinstance(
                denied := translate(error, f"writing to {message.topic()}"), AccessDenied
            ):
                # heartbeats are sent without a flush
                self._connection.auth_failures.report_fatal(denied)

    def _acknowledge_delivery(
        self, on_acknowledged: Callable[[], None], error: KafkaError | None, message: Message
    ) -> None:
        self._on_delivery(error, message)
        if error is None:
            on_acknowledged()


def enqueue(producer: Any, record: ProducerRecord, on_delivery: Any) -> None:
    """Queue a record in a client, waiting while the queue is full.

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
            with translate_fatal_errors(f"writing to {record.topic}"):
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
                extract_error(exception), f"writing {size} bytes to {record.topic}"
            ) from exception
        else:
            return
