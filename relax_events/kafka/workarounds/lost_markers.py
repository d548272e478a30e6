"""A broker that restarts forgets the markers of a decided transaction.

Seen with: Kafka 4.3.1 (4.3.0 to 4.4.0). Report: KAFKA-20734.
Test: test_committed_step_becomes_visible_although_its_markers_were_lost.

A coordinator that has logged a commit or an abort writes a marker to each partition of the
transaction. Kafka forgets the partitions that have no leader at that moment, and a restarted broker
leads none for a moment. A broker that dies between the decision and its markers thus leaves records
undecided: no consumer sees them or what follows, until the markers of the next transaction decide
over both alike. A committed step would be lost with an aborted one, and an aborted one would become
visible with its retry. This file writes the markers again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import structlog

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerUnavailable, Fenced
from relax_events.kafka.connection import Connection, retry_while_unavailable
from relax_events.kafka.offset_admin import OffsetAdmin
from relax_events.kafka.protocol.transaction_state import (
    ONGOING,
    finish_transaction,
    read_transaction_state,
)
from relax_events.kafka.workarounds.stale_leaders import leave_out_outdated_brokers
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()

FIRST_CHECK_SECONDS, MAX_CHECK_SECONDS = 0.05, 1.0
LATE_SECONDS = 0.3
"""Markers follow a commit within milliseconds; later ones may be lost."""
RETRY_SECONDS = 0.1
NUM_TIMEOUTS = 5
"""A broker that is away for so many request timeouts costs no restart, which would train steps
again."""


class _Repair(NamedTuple):
    """The last transaction of a producer, whose markers are being written: what looks open may be
    half of that.
    """

    producer: tuple[int, int]
    """Its id and epoch."""
    commits: bool


class TransactionMarkers:
    """The markers of one transactional id's transactions.

    `partitions` are the partitions that its transactions write; more are added with each commit.
    They may also hold offsets of `consumer_group`.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        transactional_id: str,
        partitions: Iterable[TopicPartition] = (),
        consumer_group: str = "",
    ) -> None:
        self._connection = self._admin_connection = connection
        self._admin = OffsetAdmin(connection)
        self._transactional_id, self._consumer_group = transactional_id, consumer_group
        self._partitions = set(partitions)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """One thread at a time uses the admin client and completes a transaction."""
        self._expectation: threading.Thread | None = None
        self._repair: _Repair | None = None

    @property
    def topics(self) -> list[str]:
        """The topics that the transactions write."""
        return sorted({topic for topic, _ in self._partitions})

    def write_missing(self) -> None:
        """Complete the last transaction in the partitions whose marker is missing, as its
        coordinator decided.

        Raises:
            Fenced: Another instance has taken over the transactional id.
            BrokerUnavailable: The broker stayed unavailable, or still writes markers.
            BrokerError: The broker refuses a request.
        """
        if not self._partitions:
            return
        with self._lock:
            retry_while_unavailable(
                self._write_missing,
                Deadline(NUM_TIMEOUTS * self._connection.request_timeout_seconds),
                pause_seconds=RETRY_SECONDS,
            )

    def _write_missing(self) -> None:
        state = read_transaction_state(self._connection, self._transactional_id)
        if state is None:
            return
        self._leave_out_outdated()
        producer = state.producer_id, state.producer_epoch
        if self._repair is not None and self._repair.producer != producer:
            self._repair = None
        if state.name == ONGOING and self._repair is None:
            return  # the next producer will abort it
        if not state.is_decided and state.name != ONGOING:
            raise BrokerUnavailable(
                f"the coordinator of {self._transactional_id} still writes markers ({state.name}); "
                "check that all brokers run"
            )
        missing = self._find_undecided()
        if not missing:
            self._repair = None
            return
        if self._repair is None:
            self._repair = _Repair(producer, commits=state.is_committed)
            log.error(
                "transaction_markers.lost",
                transactional_id=self._transactional_id,
                is_committed=state.is_committed,
                partitions=[f"{topic}[{partition}]" for topic, partition in missing],
            )
        finish_transaction(
            self._transactional_id,
            state,
            missing,
            consumer_group=self._consumer_group,
            commits=self._repair.commits,
        )
        raise BrokerUnavailable(
            f"the markers of {self._transactional_id} in {len(missing)} partitions were lost by "
            "the broker and are written again; check that all brokers run"
        )  # look again

    def _leave_out_outdated(self) -> None:
        """Ask by a new client if this one may ask brokers that no longer lead."""
        current = leave_out_outdated_brokers(self._admin_connection, self.topics)
        if current != self._admin_connection:
            self._admin.close()
            self._admin, self._admin_connection = OffsetAdmin(current), current

    def _find_undecided(self) -> list[TopicPartition]:
        """Return the partitions that hold records of an undecided transaction."""
        stable = self._admin.last_stable_offsets(sorted(self._partitions))
        ends = self._admin.end_offsets(self._partitions)
        return [partition for partition, offset in stable.items() if offset < ends[partition]]

    def expect(self, ends: Mapping[TopicPartition, int]) -> None:
        """Watch in a thread that a committed transaction becomes visible, and write its markers if
        they are missing: everybody may wait for its records, this process too.

        Args:
            ends: The offset behind its last record in each partition.
        """
        self._partitions.update(ends)
        self._expectation = threading.Thread(
            target=self._watch, args=(ends,), name="transaction-markers", daemon=True
        )
        self._expectation.start()

    def await_expected(self, timeout_seconds: float) -> None:
        """Wait until the markers of the last committed transaction are written.

        Raises:
            BrokerUnavailable: They are not.
        """
        if self._expectation is not None:
            self._expectation.join(timeout_seconds)
            if self._expectation.is_alive():
                raise BrokerUnavailable(
                    f"the last transaction of {self._transactional_id} is committed and not yet "
                    "visible; check that all brokers run"
                )
        self._repair = None

    def _watch(self, ends: Mapping[TopicPartition, int]) -> None:
        pause = waited = FIRST_CHECK_SECONDS
        while not self._closed.wait(pause):
            try:
                with self._lock:
                    stable = self._admin.last_stable_offsets(ends)
                if all(stable[partition] > end for partition, end in ends.items()):
                    return
                if waited > LATE_SECONDS:
                    self.write_missing()
            except Fenced:
                return
            except BrokerError as error:
                log.warning("transaction_markers.unknown", error=str(error))
            pause = min(2 * pause, MAX_CHECK_SECONDS)
            waited += pause

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
