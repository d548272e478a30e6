"""Leases by a share group, through lanes: a lane is one share consumer, since a consumer must
settle all that it holds before it may poll again.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog
from confluent_kafka import AcknowledgeType, KafkaError, KafkaException, ShareConsumer

from relax_events.errors import AccessDenied, BrokerRefused
from relax_events.kafka.base_consumer import READER_SETTINGS
from relax_events.kafka.connection import Connection, error_of, translate
from relax_events.kafka.leases import LEAVE_SECONDS, POLL_SECONDS, Lease
from relax_events.kafka.records import Record

log = structlog.get_logger()
COMMIT_SECONDS = 10.0
FULL_SECONDS = 20.0
"""A worker that was killed stays a member until its session lapses; who is refused for longer than
that is one too many."""


class ShareLeases:
    """Lanes wait in the client, not in a loop of ours, and one at a time: the others wait for their
    turn.

    Every delivery of a record counts, and after so many the broker drops it without a word. What a
    killed worker held, the broker would hand to each of its waiting lanes in turn, for it notices
    their deaths one by one: 28 of them cost four records up to ten deliveries each. So one lane
    waits, and a death costs three at most. Likewise what is released while we stop stays held until
    nobody waits any more. The queue has one partition, so that the lane that waits may take any
    record.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        group: str,
        topic: str,
        lanes: int,
        on_lease: Callable[[Lease], None],
    ) -> None:
        self._stopping = threading.Event()
        self._on_lease = on_lease
        self._turn = threading.Lock()
        self._num_places, self._places_changed = lanes, threading.Condition()
        self.full_text = (
            f"share group {group} has no room for all {lanes} lanes of this worker: "
            "group.share.max.size of the brokers bounds the lanes of all "
            "workers together; lower engine.max_prompt_groups, run fewer rollout workers, or "
            "raise group.share.max.size (1000 is Kafka's most)"
        )
        self._lanes = [_Lane(connection, group, topic, self) for _ in range(lanes)]

    def stop(self) -> None:
        """See `LeaseSource.stop`."""
        self._stopping.set()
        self.make_room(0)

    def close(self) -> None:
        """See `LeaseSource.close`."""
        self.stop()
        for lane in self._lanes:
            lane.release_all()
        for lane in self._lanes:
            lane.thread.join(LEAVE_SECONDS)

    @property
    def stopping(self) -> bool:
        """Whether no more leases are taken."""
        return self._stopping.is_set()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one lane wait for a record, for the length of the block, once there is room for
        one.
        """
        with self._turn:
            with self._places_changed:
                self._places_changed.wait_for(lambda: self._num_places > 0 or self.stopping)
            yield

    def make_room(self, num_records: int) -> None:
        """Count records as settled; as taken, if negative. A lane may take more than there is room
        for, since the broker decides how many.
        """
        with self._places_changed:
            self._num_places += num_records
            self._places_changed.notify_all()

    def pause(self) -> None:
        """Let a moment pass before what failed is tried again; a stop ends it."""
        self._stopping.wait(POLL_SECONDS / 10)

    def hand_over(self, lease: Lease) -> None:
        """Pass a lease on to the worker."""
        self._on_lease(lease)


class _Lane:
    """One share consumer and the thread that waits for it."""

    def __init__(self, connection: Connection, group: str, topic: str, source: ShareLeases) -> None:
        self._settings = connection.settings(
            group_id=group,
            share_acknowledgement_mode="explicit",
            max_poll_records=1,
            max_poll_interval_ms=READER_SETTINGS["max_poll_interval_ms"],
        )
        self._source, self._connection, self._topic = source, connection, topic
        self._consumer: Any | None = self._joined()
        self._numbers = itertools.count()
        self._held: dict[int, Any] = {}
        self._settled: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._refused_at: float | None = None
        self.thread = threading.Thread(target=self._run, name="lane", daemon=True)
        self.thread.start()

    def release_all(self) -> None:
        """Release what the lane holds, from any thread."""
        for number in list(self._held):
            self._settled.put((number, False))

    def _joined(self) -> Any:
        consumer = ShareConsumer(self._settings)
        consumer.subscribe([self._topic])
        return consumer

    def _run(self) -> None:
        while not self._source.stopping:
            self._work()
        self._leave()

    def _work(self) -> None:
        try:
            self._take()
            if self._consumer is not None:
                self._serve(self._consumer)
        except KafkaException as exception:
            self._note(error_of(exception))
            self._source.pause()
        finally:
            self._source.make_room(len(self._held))
            self._held.clear()

    def _take(self) -> None:
        """Wait for our turn, and then until a record comes or we stop; then we leave first, for
        what the others release would still come to us.

        One record comes as a rule. Of records that were released the broker hands out neighbours
        together, as it does with those that were produced in one batch.
        """
        with self._source.turn():
            while not self._source.stopping:
                if self._consumer is None:
                    self._consumer = self._joined()
                polled = self._consumer.poll(POLL_SECONDS)
                for message in polled:
                    self._note(message.error())
                if messages := [message for message in polled if message.error() is None]:
                    self._refused_at = None
                    self._held.update({next(self._numbers): message for message in messages})
                    self._source.make_room(-len(messages))
                    return
                if self._source.stopping:
                    self._leave()

    def _serve(self, consumer: Any) -> None:
        """Hand over what we hold, and settle each record when its work is done."""
        for number, message in list(self._held.items()):
            if self._source.stopping:
                self._settle(number, False)
            else:
                self._source.hand_over(
                    Lease(
                        Record.of(message),
                        message.delivery_count() or 1,
                        partial(self._settle, number),
                    )
                )
        while self._held and self._consumer is not None:
            number, accepted = self._settled.get()
            if (message := self._held.pop(number, None)) is None:
                continue  # it was settled twice
            if not accepted and self._source.stopping:
                with self._source.turn():  # nobody waits any more
                    pass
            self._acknowledge(
                consumer, message, AcknowledgeType.ACCEPT if accepted else AcknowledgeType.RELEASE
            )
            self._source.make_room(1)

    def _acknowledge(self, consumer: Any, message: Any, kind: AcknowledgeType) -> None:
        """Tell the broker; where that fails it will hand the record out again, and what else we
        hold stays held.
        """
        try:
            consumer.acknowledge(message, kind)
            errors = consumer.commit_sync(COMMIT_SECONDS) or {}
        except KafkaException as exception:
            self._note(error_of(exception))
            return
        for partition, error in errors.items():
            if error is not None:
                log.warning("lease.lapsed", partition=str(partition), error=str(error))

    def _settle(self, number: int, accepted: bool) -> None:
        self._settled.put((number, accepted))

    def _leave(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _note(self, error: KafkaError | None) -> None:
        """Pass over what mends itself, join anew after what does not.

        What we are denied ends the worker, since its queue would stay silent for ever; so does a
        share group that stays full.
        """
        if error is None:
            return
        log.debug("lane.disturbed", error=error.name())
        if error.code() == KafkaError.GROUP_MAX_SIZE_REACHED:
            self._meet_full_group()
            return
        if error.fatal() or error.code() == KafkaError._FATAL:
            log.warning("lane.rejoins", error=error.str())
            self._leave()
            return
        if isinstance(refused := translate(error, "leasing records"), AccessDenied):
            self._connection.refusals.deny(refused)
            self._source.stop()

    def _meet_full_group(self) -> None:
        """Try again while it may be that a worker that died has still its place there; after that,
        end the worker.
        """
        self._leave()
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        log.warning(
            "lane.refused",
            reason="the share group is full",
            seconds=round(now - self._refused_at, 1),
        )
        if now - self._refused_at > FULL_SECONDS:
            self._connection.refusals.deny(BrokerRefused(self._source.full_text))
            self._source.stop()
