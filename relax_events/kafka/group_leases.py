"""Leases by a consumer group, for brokers without share groups.

Records are leased in partition order, and the committed offset follows the oldest open lease.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from relax_events.deadline import Deadline
from relax_events.errors import AccessDenied, BrokerError, ClientFailed
from relax_events.events.parts import TopicOffset
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.leases import LEAVE_SECONDS, POLL_SECONDS, Lease
from relax_events.kafka.records import Record

log = structlog.get_logger()


class ConsumerGroupLeases:
    """A lease source with one polling thread, which pauses the consumer while `max_leases` are open
    and keeps its membership.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        group: str,
        topic: str,
        max_leases: int,
        on_lease: Callable[[Lease], None],
    ) -> None:
        self._stopping, self._closing = threading.Event(), threading.Event()
        self._capacity, self._capacity_changed = max_leases, threading.Condition()
        self._lock = threading.Lock()
        self._open: dict[int, dict[int, bool]] = {}
        self._on_lease = on_lease
        self._topic, self._connection = topic, connection
        self._consumer = SubscribedConsumer(
            connection, consumer_group=group, topics=[topic], on_revoked=self._revoked
        )
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def add_capacity(self, num_records: int) -> None:
        """See `LeaseSource.add_capacity`."""
        with self._capacity_changed:
            self._capacity += num_records
            self._capacity_changed.notify_all()

    def stop(self) -> None:
        """See `LeaseSource.stop`."""
        self._stopping.set()

    def close(self) -> None:
        """See `LeaseSource.close`."""
        self.stop()
        self._closing.set()
        self._thread.join(LEAVE_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._step()
            except BrokerError as error:
                log.warning("lease.failed", error=str(error))
                if isinstance(error, AccessDenied | ClientFailed):
                    self._connection.auth_failures.report_fatal(error)
                self._closing.wait(POLL_SECONDS)
        self._commit(wait=Deadline(POLL_SECONDS * 5))
        self._consumer.close()

    def _step(self) -> None:
        with self._capacity_changed:
            has_capacity = self._capacity_changed.wait_for(
                lambda: self._capacity > 0, 0.0 if self._stopping.is_set() else POLL_SECONDS / 10
            )
        if self._stopping.is_set() or not has_capacity:
            self._poll_paused()
            return
        is_leased = False
        self.add_capacity(-1)
        try:
            for record in self._consumer.fetch(1, timeout_seconds=POLL_SECONDS):
                is_leased = self._lease(record)
        finally:
            if not is_leased:
                self.add_capacity(1)
        self._commit()

    def _poll_paused(self) -> None:
        """Poll while paused to keep the membership. A record that still arrives, from a newly
        assigned partition, is returned by a seek.
        """
        self._consumer.pause()
        for record in self._consumer.fetch(1, timeout_seconds=POLL_SECONDS / 10):
            self._consumer.seek(record.topic, record.partition, record.offset)
        self._consumer.resume()
        self._commit()

    def _lease(self, record: Record) -> bool:
        """Lease a record; return False if it was returned by a seek because the source is
        stopping.
        """
        if self._stopping.is_set():
            self._consumer.seek(record.topic, record.partition, record.offset)
            return False
        with self._lock:
            self._open.setdefault(record.partition, {})[record.offset] = False
        self._on_lease(Lease(record, 1, lambda done: self._settle(record, done)))
        return True

    def _settle(self, record: Record, done: bool) -> None:
        """Mark a record as done. A released record blocks the committed offset until the partition
        is reassigned or the worker restarts.
        """
        with self._lock:
            if done and record.offset in self._open.get(record.partition, {}):
                self._open[record.partition][record.offset] = True
        self.add_capacity(1)

    def _commit(self, *, wait: Deadline | None = None) -> None:
        with self._lock:
            marks = [
                TopicOffset(self._topic, partition, mark)
                for partition in self._open
                if (mark := self._advance(partition)) is not None
            ]
        self._consumer.commit(marks, wait=wait)

    def _advance(self, partition: int) -> int | None:
        """Drop the done records below the oldest open one; return the new position, or None when it
        is unchanged.
        """
        held, mark = self._open[partition], None
        for offset in sorted(held):
            if not held[offset]:
                break
            del held[offset]
            mark = offset + 1
        return mark

    def _revoked(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        self._commit(wait=deadline)
        with self._lock:
            for offset in offsets:
                self._open.pop(offset.partition, None)
