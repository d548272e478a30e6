"""Transactions of a role that has one active instance: records and consumed offsets become real
together, or not at all.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
from confluent_kafka import KafkaException, Producer, TopicPartition

from relax_events.errors import BrokerError, BrokerRefused, BrokerUnavailable, Fenced
from relax_events.events.parts import TopicOffset
from relax_events.kafka.connection import Connection, error_of, translate
from relax_events.kafka.consumer import LogReader
from relax_events.kafka.producer import enqueue
from relax_events.kafka.records import OutRecord

log = structlog.get_logger()

TRANSACTION_SECONDS = 20  # an abandoned transaction hides plain records behind it for this long
OFFSETS_SECONDS = 4.0
HELD_UP_SECONDS = 1.0  # of delay that no busy machine explains
ATTEMPTS = 5


class TransactionalWriter:
    """Commits record batches with offsets, and fences every earlier writer of the same id.

    After an indefinite error (was it committed or not?) the producer is thrown away and a new one
    asks the broker to finish or abort what was open; `commit` then asks `already_real` before it
    tries again, so nothing is written twice. It
    asks before that too: a zombie learns so that it was replaced, and does not fence the one that
        replaced it.
    """

    def __init__(self, connection: Connection, *, transactional_id: str) -> None:
        self._connection, self._transactional_id = connection, transactional_id
        self._is_fenced = False
        self._producer = self._initialise()

    def _initialise(self) -> Any:
        producer = Producer(
            self._connection.settings(
                transactional_id=self._transactional_id,
                transaction_timeout_ms=TRANSACTION_SECONDS * 1000,
                delivery_timeout_ms=TRANSACTION_SECONDS * 1000,
                socket_timeout_ms=TRANSACTION_SECONDS * 1000,
                linger_ms=0,
                message_max_bytes=64 * 1024 * 1024,
            )
        )
        self._retrying(producer.init_transactions, "taking over the transactional id")
        return producer

    def commit(
        self,
        records: Sequence[OutRecord],
        *,
        offsets: Iterable[TopicOffset] = (),
        reader: LogReader | None = None,
        already_real: Any = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Write records and offsets as one transaction.

        Args:
            records: What becomes visible together.
            offsets: Next positions of the reader's consumer group.
            reader: The reader whose consumer group the offsets belong to.
            already_real: Called after an indefinite error; tells whether an earlier try did commit
                after all, and raises `Fenced` where another instance went on meanwhile.
            before_commit: Called when everything lies in the open transaction.
        Raises:
            Fenced: Another instance took over; nothing of this call is visible, and no later call
                gets through.
            BrokerRefused: The broker will never accept one of the records; nothing of this call is
                visible.
            BrokerError: The broker stayed away; nothing may be assumed, and the process must start
                anew.
        """
        if self._is_fenced:
            raise Fenced(
                f"{self._transactional_id} was taken over by another instance of this role "
                "before; end this one"
            )
        for attempt in range(ATTEMPTS):
            try:
                self._try(records, list(offsets), reader, before_commit)
            except Fenced:
                self._is_fenced = True  # a new producer would fence the one that took over
                raise
            except BrokerRefused:
                self._producer = self._initialise()  # aborts what is open
                raise
            except BrokerError as error:
                log.warning("transaction.failed", attempt=attempt, error=str(error))
                self._yield_to_successor(already_real)
                self._producer = self._initialise()
                if already_real is not None and already_real():
                    return
                if attempt + 1 == ATTEMPTS:
                    raise
            else:
                return

    def _yield_to_successor(self, already_real: Any) -> None:
        try:
            if already_real is not None:
                already_real()
        except Fenced:
            self._is_fenced = True
            raise
        except BrokerUnavailable as error:
            log.warning("transaction.unsure", error=str(error))  # it is asked again by and by

    def _try(
        self,
        records: Sequence[OutRecord],
        offsets: list[TopicOffset],
        reader: LogReader | None,
        before_commit: Callable[[], None],
    ) -> None:
        failures: list[Any] = []
        producer = self._producer
        try:
            producer.begin_transaction()
            for record in records:
                enqueue(
                    producer, record, lambda error, _: failures.append(error) if error else None
                )
            if offsets and reader is not None:
                _add_offsets(producer, offsets, reader)
            before_commit()
            producer.commit_transaction(TRANSACTION_SECONDS)
        except KafkaException as exception:
            raise translate(error_of(exception), "committing a transaction") from exception
        if failures:
            raise translate(failures[0], "writing in a transaction")

    def _retrying(self, call: Any, what: str) -> None:
        for attempt in range(ATTEMPTS):
            try:
                call(self._connection.request_timeout_seconds)
            except KafkaException as exception:
                error = error_of(exception)
                refused = self._connection.refused(what)
                if refused is not None or not error.retriable() or attempt + 1 == ATTEMPTS:
                    raise refused or translate(error, what) from exception
            else:
                return

    def close(self) -> None:
        """Leave nothing open."""
        self._producer.purge()


def _add_offsets(producer: Any, offsets: Sequence[TopicOffset], reader: LogReader) -> None:
    """Add offsets to the open transaction, within a deadline of our own.

    The client's timeout is not kept (librdkafka, issue 5456): when the coordinator has just come
    back the call may never return. So a thread makes it, and is left behind at the deadline with
    its producer, which the next one fences.

    Raises:
        BrokerUnavailable: The coordinator did not answer in time.
    """
    partitions = [
        TopicPartition(offset.topic, offset.partition, offset.offset) for offset in offsets
    ]
    metadata = reader.group_metadata()
    answer: queue.SimpleQueue[KafkaException | None] = queue.SimpleQueue()

    def call() -> None:
        try:
            producer.send_offsets_to_transaction(partitions, metadata, OFFSETS_SECONDS)
        except KafkaException as exception:
            answer.put(exception)
        else:
            answer.put(None)

    threading.Thread(target=call, name="transaction-offsets", daemon=True).start()
    if (failure := awaited(answer)) is not None:
        raise failure


def awaited(answer: queue.SimpleQueue[KafkaException | None]) -> KafkaException | None:
    """Wait for the thread's answer; once more when this very process was held up, whose delay is
    not the broker's.

    A zombie that was stopped here learns so that it was fenced. A new producer of its own would
    fence the one that took over.

    Raises:
        BrokerUnavailable: None came in time.
    """
    limit = OFFSETS_SECONDS + 1
    for _ in range(2):
        started = time.monotonic()
        try:
            return answer.get(timeout=limit)
        except queue.Empty:
            if time.monotonic() - started < limit + HELD_UP_SECONDS:
                break
    raise BrokerUnavailable(
        f"adding offsets to a transaction: no answer within {limit:g} s"
    ) from None
