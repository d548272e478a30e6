"""Transactions of a role with one active instance: records and consumed offsets are committed
together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
from confluent_kafka import KafkaException, Producer

from relax_events.errors import BrokerError, BrokerRefused, BrokerUnavailable, Fenced
from relax_events.events.parts import TopicOffset
from relax_events.kafka.connection import Connection, extract_error, translate
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import enqueue
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.workarounds.hanging_offsets import add_offsets
from relax_events.kafka.workarounds.lost_markers import TransactionMarkers
from relax_events.kafka.workarounds.stale_leaders import leave_out_outdated_brokers
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()

TRANSACTION_SECONDS = 20  # an abandoned transaction blocks later records for this long
TAKE_OVER_SECONDS = 10.0
"""The first attempt's bound; each further one has so much more, up to the request timeout."""
ATTEMPTS = 5
COORDINATORS = "__transaction_state"
"""Kafka's topic whose partitions' leaders coordinate transactions."""


class TransactionalWriter:
    """A transactional producer that fences every earlier one with the same transactional id.

    After an error with an unknown outcome it replaces the client, and the new one completes or
    aborts the open transaction. `commit` then calls `is_already_committed` before a retry, so
    nothing is written twice. It also calls it before it replaces the client: a zombie learns there
    that it was replaced, and does not fence its successor. A client that has lost all brokers is
    replaced likewise, by the commit that fails. Between two transactions it sees to it that the
    broker has written the markers of the first (`TransactionMarkers`).
    """

    def __init__(
        self,
        connection: Connection,
        *,
        transactional_id: str,
        partitions: Iterable[TopicPartition] = (),
        consumer_group: str = "",
    ) -> None:
        """Take over the transactional id.

        Args:
            connection: How to reach the broker.
            transactional_id: The id; one writer at a time has it.
            partitions: The partitions that earlier writers with this id may have written.
            consumer_group: The group whose offsets its transactions hold.
        """
        self._connection, self._transactional_id = connection, transactional_id
        self._is_fenced = False
        self._markers = TransactionMarkers(
            connection,
            transactional_id=transactional_id,
            partitions=partitions,
            consumer_group=consumer_group,
        )
        self._producer = self._initialise()

    def _initialise(self) -> Any:
        self._markers.write_missing()  # of a decision that the next call forgets
        producer = self._take_over()
        self._markers.write_missing()  # of a transaction that this call has aborted
        return producer

    def _take_over(self) -> Any:
        """Return a new client that has the transactional id. Each attempt has a client of its own:
        a client that asked a broker which is cut off from the others would ask it again.
        """
        what = "taking over the transactional id"
        topics = [*self._markers.topics, COORDINATORS]
        for attempt in range(1, ATTEMPTS + 1):
            current = leave_out_outdated_brokers(self._connection, topics)
            producer = Producer(
                current.settings(
                    transactional_id=self._transactional_id,
                    transaction_timeout_ms=TRANSACTION_SECONDS * 1000,
                    delivery_timeout_ms=TRANSACTION_SECONDS * 1000,
                    socket_timeout_ms=TRANSACTION_SECONDS * 1000,
                    linger_ms=0,
                    message_max_bytes=64 * 1024 * 1024,
                )
            )
            try:
                producer.init_transactions(
                    min(attempt * TAKE_OVER_SECONDS, self._connection.request_timeout_seconds)
                )
            except KafkaException as exception:
                error = extract_error(exception)
                refused = self._connection.find_refusal(what)
                if refused is not None or not error.retriable() or attempt == ATTEMPTS:
                    raise refused or translate(error, what) from exception
                log.warning("transactional_id.retried", attempt=attempt, error=error.str())
            else:
                break
        return producer

    def commit(
        self,
        records: Sequence[ProducerRecord],
        *,
        offsets: Iterable[TopicOffset] = (),
        reader: LogReader | None = None,
        is_already_committed: Any = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Write records and offsets as one transaction.

        Args:
            records: The records, which become visible together.
            offsets: Next positions of the reader's consumer group.
            reader: The reader whose consumer group owns the offsets.
            is_already_committed: Called after an error with an unknown outcome; returns whether an
                earlier attempt has committed, and raises `Fenced` if another instance has taken
                over.
            before_commit: Called when the open transaction contains everything.
        Raises:
            Fenced: Another instance took over; nothing of this call is visible, and every later
                call fails.
            BrokerRefused: The broker will never accept one of the records; nothing of this call is
                visible.
            BrokerError: The broker stayed unavailable; the outcome is unknown, and the process must
                restart.
        """
        if self._is_fenced:
            raise Fenced(
                f"{self._transactional_id} was taken over by another instance of this role; "
                "end this one"
            )
        for attempt in range(ATTEMPTS):
            try:
                self._try(records, list(offsets), reader, before_commit)
            except Fenced:
                self._is_fenced = True  # a new producer would fence the producer that took over
                raise
            except BrokerRefused:
                self._producer = self._initialise()  # aborts what is open
                raise
            except BrokerError as error:
                log.warning("transaction.failed", attempt=attempt, error=str(error))
                self._check_fenced(is_already_committed)
                self._producer = self._initialise()
                if is_already_committed is not None and is_already_committed():
                    return
                if attempt + 1 == ATTEMPTS:
                    raise
            else:
                return

    def _check_fenced(self, is_already_committed: Any) -> None:
        try:
            if is_already_committed is not None:
                is_already_committed()
        except Fenced:
            self._is_fenced = True
            raise
        except BrokerUnavailable as error:
            # it is called again after the client was replaced
            log.warning("transaction.outcome_unknown", error=str(error))

    def _try(
        self,
        records: Sequence[ProducerRecord],
        offsets: list[TopicOffset],
        reader: LogReader | None,
        before_commit: Callable[[], None],
    ) -> None:
        failures: list[Any] = []
        ends: dict[TopicPartition, int] = {}

        def note_delivery(error: Any, message: Any) -> None:
            if error:
                failures.append(error)
            else:
                ends[message.topic(), message.partition()] = message.offset() + 1

        producer = self._producer
        self._markers.await_expected(TRANSACTION_SECONDS)
        try:
            producer.begin_transaction()
            for record in records:
                enqueue(producer, record, note_delivery)
            if offsets and reader is not None:
                add_offsets(producer, offsets, reader)
            before_commit()
            producer.commit_transaction(TRANSACTION_SECONDS)
        except KafkaException as exception:
            raise translate(extract_error(exception), "committing a transaction") from exception
        if failures:
            raise translate(failures[0], "writing in a transaction")
        self._markers.expect(ends)

    def close(self) -> None:
        """Drop all unsent records."""
        self._markers.close()
        self._producer.purge()
