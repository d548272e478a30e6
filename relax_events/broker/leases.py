"""Leases on a work queue: a record is held by one worker until it is done, and is free again when the worker dies.

`ShareLeases` uses a share group through lanes: one lane is one share consumer that holds one record, because a share
consumer that holds several must settle them all before it may poll again. `GroupLeases` uses a consumer group for
brokers without share groups: records are taken in order of the partition, and the offset follows the oldest open one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from confluent_kafka import AcknowledgeType, KafkaError, KafkaException, ShareConsumer

from relax_events.broker.admin import Admin
from relax_events.broker.connection import Connection, error_of, translate
from relax_events.broker.consumer import GroupConsumer
from relax_events.broker.deadline import Deadline
from relax_events.broker.records import Record
from relax_events.errors import AccessDenied, BrokerError, ClientFailed
from relax_events.events.parts import TopicOffset

log = structlog.get_logger()
POLL_SECONDS = 1.0
LEAVE_SECONDS = POLL_SECONDS + 5
LONGEST_WORK_MS = 86_400_000
"""A lane that works does not poll, and by default leaves the group after five minutes; how long it may hold a record is the broker's to say."""
USUAL_DELIVERY_LIMIT = 5


@dataclass(frozen=True, slots=True)
class Lease:
    """One record of the queue, held until `done` or `release` is called, from any thread."""

    record: Record
    delivery_count: int
    settle: Callable[[bool], None]

    def done(self) -> None:
        """The work is finished and safe: the record leaves the queue."""
        self.settle(True)

    def release(self) -> None:
        """The work was not finished: another worker may have the record at once."""
        self.settle(False)


def delivery_limit(connection: Connection, group: str) -> int:
    """Return after how many deliveries the broker drops a record of a share group; what brokers do by themselves if it does not tell us."""
    try:
        settings = Admin(connection).group_settings(group)
    except BrokerError as error:
        log.info("deliveries.unknown", error=str(error), assumed=USUAL_DELIVERY_LIMIT)
        return USUAL_DELIVERY_LIMIT
    return int(settings.get("share.delivery.count.limit", USUAL_DELIVERY_LIMIT))


class LeaseSource(Protocol):
    """Hands leases to `on_lease`, at most `lanes` at a time, from threads of its own; `close` releases what is left."""

    def stop(self) -> None:
        """Take no more leases; those held stay held."""

    def close(self) -> None:
        """Stop, release what is still held, leave the group."""


class ShareLeases:
    """See the module's docstring. Each lane waits in the client, not in a loop of ours.

    Every delivery of a record counts, and after so many the broker drops it without a word. So what is released while we stop stays held
    until all lanes without a lease have left: they would take it in their last poll, one after the other.
    """

    def __init__(self, connection: Connection, *, group: str, topic: str, lanes: int, on_lease: Callable[[Lease], None]) -> None:
        self._stopping = threading.Event()
        self._on_lease = on_lease
        self._lanes_changed = threading.Condition()
        self._num_idle = lanes
        self._lanes = [_Lane(connection, group, topic, self) for _ in range(lanes)]

    def stop(self) -> None:
        """See `LeaseSource.stop`."""
        self._stopping.set()

    def close(self) -> None:
        """See `LeaseSource.close`."""
        self.stop()
        for lane in self._lanes:
            lane.settlement.put(False)
        for lane in self._lanes:
            lane.thread.join(LEAVE_SECONDS)

    @property
    def stopping(self) -> bool:
        """Whether no more leases are taken."""
        return self._stopping.is_set()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count a lane as one that holds a lease, for the length of the block."""
        self._count_idle(-1)
        try:
            yield
        finally:
            self._count_idle(1)

    def pause(self) -> None:
        """Let a moment pass before what failed is tried again; a stop ends it."""
        self._stopping.wait(POLL_SECONDS / 10)

    def leave(self) -> None:
        """Count a lane as one that has left the group."""
        self._count_idle(-1)

    def until_idle_left(self) -> None:
        """Wait until no lane is left but those that hold a lease; once we stop, that is soon."""
        with self._lanes_changed:
            self._lanes_changed.wait_for(lambda: self._num_idle == 0, timeout=LEAVE_SECONDS)

    def _count_idle(self, change: int) -> None:
        with self._lanes_changed:
            self._num_idle += change
            self._lanes_changed.notify_all()

    def hand_over(self, lease: Lease) -> None:
        """Pass a lease on to the worker."""
        self._on_lease(lease)


class _Lane:
    """One share consumer and the thread that waits for it."""

    def __init__(self, connection: Connection, group: str, topic: str, source: ShareLeases) -> None:
        self._settings = connection.settings(
            group_id=group, share_acknowledgement_mode="explicit", max_poll_records=1, max_poll_interval_ms=LONGEST_WORK_MS
        )
        self._source, self._connection, self._topic = source, connection, topic
        self._consumer: Any | None = self._joined()
        self.settlement: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="lane", daemon=True)
        self.thread.start()

    def _joined(self) -> Any:
        consumer = ShareConsumer(self._settings)
        consumer.subscribe([self._topic])
        return consumer

    def _run(self) -> None:
        try:
            while not self._source.stopping:
                self._turn()
            if self._consumer is not None:
                self._consumer.close()
        finally:
            self._source.leave()

    def _turn(self) -> None:
        try:
            if self._consumer is None:
                self._consumer = self._joined()
            polled = self._consumer.poll(POLL_SECONDS)
            for message in polled:
                self._note(message.error())
            messages = [message for message in polled if message.error() is None]
            if messages and self._consumer is not None:
                with self._source.serving():
                    self._serve(self._consumer, messages)
        except KafkaException as exception:
            self._note(error_of(exception))
            self._source.pause()

    def _note(self, error: KafkaError | None) -> None:
        """Pass over what mends itself, join anew after what does not.

        What we are denied ends the worker, since its queue would stay silent for ever.
        """
        if error is None:
            return
        log.debug("lane.disturbed", error=error.name())
        if error.fatal() or error.code() == KafkaError._FATAL:
            log.warning("lane.rejoins", error=error.str())
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                consumer.close()
            return
        if isinstance(refused := translate(error, "leasing records"), AccessDenied):
            self._connection.refusals.deny(refused)
            self._source.stop()

    def _serve(self, consumer: Any, messages: list[Any]) -> None:
        """Serve what one poll brought: one record as a rule, more when the producer batched several."""
        for message in messages:
            while not self.settlement.empty():
                self.settlement.get()  # a settlement of a lease that was settled twice
            if self._source.stopping:
                accepted = False
            else:
                self._source.hand_over(Lease(Record.of(message), message.delivery_count() or 1, self.settlement.put))
                accepted = self.settlement.get()
            if not accepted and self._source.stopping:
                self._source.until_idle_left()
            consumer.acknowledge(message, AcknowledgeType.ACCEPT if accepted else AcknowledgeType.RELEASE)
        for partition, error in (consumer.commit_sync(POLL_SECONDS * 10) or {}).items():
            if error is not None:
                log.warning("lease.lapsed", partition=str(partition), error=str(error))


class GroupLeases:
    """See the module's docstring. One thread polls; it pauses while all lanes are taken, and keeps its membership."""

    def __init__(self, connection: Connection, *, group: str, topic: str, lanes: int, on_lease: Callable[[Lease], None]) -> None:
        self._stopping, self._closing = threading.Event(), threading.Event()
        self._free = threading.Semaphore(lanes)
        self._lock = threading.Lock()
        self._open: dict[int, dict[int, bool]] = {}
        self._on_lease = on_lease
        self._topic, self._connection = topic, connection
        self._consumer = GroupConsumer(connection, consumer_group=group, topics=[topic], on_revoked=self._revoked)
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

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
                self._turn()
            except BrokerError as error:
                log.warning("lease.disturbed", error=str(error))
                if isinstance(error, AccessDenied | ClientFailed):
                    self._connection.refusals.deny(error)
                self._closing.wait(POLL_SECONDS)
        self._commit(wait=Deadline(POLL_SECONDS * 5))
        self._consumer.close()

    def _turn(self) -> None:
        if self._stopping.is_set() or not self._free.acquire(timeout=POLL_SECONDS / 10):
            self._idle()
            return
        taken = False
        try:
            for record in self._consumer.fetch(1, timeout_seconds=POLL_SECONDS):
                taken = self._take(record)
        finally:
            if not taken:
                self._free.release()
        self._commit()

    def _idle(self) -> None:
        """Take part in the group without taking records: one that comes all the same, of a partition just assigned, is put back."""
        self._consumer.pause()
        for record in self._consumer.fetch(1, timeout_seconds=POLL_SECONDS / 10):
            self._consumer.seek(record.topic, record.partition, record.offset)
        self._consumer.resume()
        self._commit()

    def _take(self, record: Record) -> bool:
        """Hand a record over; return whether it was, or was put back since we stopped while it came."""
        if self._stopping.is_set():
            self._consumer.seek(record.topic, record.partition, record.offset)
            return False
        with self._lock:
            self._open.setdefault(record.partition, {})[record.offset] = False
        self._on_lease(Lease(record, 1, lambda done: self._settle(record, done)))
        return True

    def _settle(self, record: Record, done: bool) -> None:
        """Note that a record is done; a released one keeps the offset back until the partition moves or we restart."""
        with self._lock:
            if done and record.offset in self._open.get(record.partition, {}):
                self._open[record.partition][record.offset] = True
        self._free.release()

    def _commit(self, *, wait: Deadline | None = None) -> None:
        with self._lock:
            marks = [TopicOffset(self._topic, partition, mark) for partition in self._open if (mark := self._advance(partition)) is not None]
        self._consumer.commit(marks, wait=wait)

    def _advance(self, partition: int) -> int | None:
        """Drop the done records before the oldest open one and return the new position, or None when nothing moved."""
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
