"""Leases by a share group, with as many share consumers and threads as record batches are held.

A share consumer leases whole record batches, and must acknowledge all records that it holds before
it may poll again.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from confluent_kafka import AcknowledgeType, KafkaError, KafkaException, ShareConsumer

from relax_events.deadline import Deadline
from relax_events.errors import AccessDenied, BrokerRefused
from relax_events.kafka.base_consumer import READER_SETTINGS
from relax_events.kafka.connection import Connection, extract_error, translate
from relax_events.kafka.leases import LEAVE_SECONDS, POLL_SECONDS, Lease
from relax_events.kafka.records import Record
from relax_events.kafka.workarounds.stale_leaders import (
    LeaderMonitor,
    leave_out_outdated_brokers,
    read_newest_leaders,
)

log = structlog.get_logger()
COMMIT_SECONDS = 10.0
SETTLE_SECONDS = 0.05
"""How long a settled record waits for others of its batch: they are acknowledged by one request."""
LANE_REPORT_SECONDS = 240.0
"""Lanes that wait for their turn are not polled, so the reports of their clients accumulate."""
NUM_IDLE_LANES = 2
"""Lanes beyond the first that stay for the next records."""
FULL_SECONDS = 20.0
"""Longer than a session: a killed worker stays a member until its session expires. A consumer that
is refused for longer exceeds the group's size."""


class ShareGroupLeases:
    """A lease source in which one share consumer polls at a time, while the others wait for their
    turn. Another one joins the group once all hold records and there is capacity for more, and
    leaves it when others are idle.

    The broker counts each delivery of a record and silently drops the record after a limit. It
    notices the deaths of a killed worker's consumers one by one, and meanwhile delivers the
    worker's records to consumers that still seem to poll: 28 consumers cost four records up to ten
    deliveries each. With one polling consumer a death costs at most three. For the same reason,
    records released during a stop are returned only when no consumer polls any more. The queue has
    one partition, so that the polling consumer may receive any record.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        group: str,
        topic: str,
        max_leases: int,
        on_lease: Callable[[Lease], None],
        first_lanes: int | None = None,
        most_lanes: int | None = None,
    ) -> None:
        """Join the group.

        Args:
            connection: The brokers.
            group: The share group.
            topic: The queue, with one partition.
            max_leases: How many records may be held before capacity is added; the last record batch
                may exceed it.
            on_lease: Called with each lease, by several threads.
            first_lanes: Share consumers that join at once, without which the worker ends; as many
                as `max_leases` by default.
            most_lanes: Share consumers that may join; as many as the larger of the two by default.
        """
        self._topic, self.connection = topic, connection
        self._leaders = LeaderMonitor(connection)
        self._known_leaders = read_newest_leaders(connection, [topic])
        self._make_lane = partial(_ShareConsumerThread, group, topic, self)
        self._stopping = threading.Event()
        self._on_lease = on_lease
        self._turn = threading.Lock()
        self._capacity = max_leases
        self._capacity_changed = threading.Condition()
        self._num_first_lanes = max_leases if first_lanes is None else first_lanes
        self._max_lanes = max(self._num_first_lanes, most_lanes or max_leases)
        self.group_full_text = (
            f"share group {group} has no room for the first {self._num_first_lanes} share "
            "consumers of this worker: group.share.max.size of the brokers bounds the share "
            "consumers of all workers together; lower engine.max_prompt_groups, run fewer rollout "
            "workers, or raise group.share.max.size (1000 is Kafka's most)"
        )
        self._joining = threading.Lock()
        self._lanes = [self._make_lane() for _ in range(self._num_first_lanes)]
        for lane in self._lanes:
            lane.join_group()
        with self._joining:
            for lane in self._lanes:
                lane.thread.start()

    def stop(self) -> None:
        """See `LeaseSource.stop`."""
        self._stopping.set()
        self.add_capacity(0)

    def close(self) -> None:
        """See `LeaseSource.close`."""
        self.stop()
        with self._joining:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.release_all()
        for lane in lanes:
            lane.thread.join(LEAVE_SECONDS)

    @property
    def stopping(self) -> bool:
        """Whether the source takes no more leases."""
        return self._stopping.is_set()

    @contextmanager
    def polling_turn(self) -> Iterator[None]:
        """Let one thread poll during the block, once there is capacity for a record."""
        with self._turn:
            with self._capacity_changed:
                self._capacity_changed.wait_for(lambda: self._capacity > 0 or self.stopping)
            yield

    def add_capacity(self, num_records: int) -> None:
        """See `LeaseSource.add_capacity`. Settled records add capacity, received ones remove it. It
        may become negative, because the broker decides how many records it returns. A lane joins in
        its own thread, which retries.
        """
        with self._capacity_changed:
            self._capacity += num_records
            self._capacity_changed.notify_all()
        with self._joining:
            is_short = self._capacity > 0 and all(lane.is_busy for lane in self._lanes)
            if is_short and len(self._lanes) < self._max_lanes and not self.stopping:
                self._lanes.append(self._make_lane())
                self._lanes[-1].thread.start()

    def remove(self, lane: _ShareConsumerThread) -> bool:
        """Do without a lane for which the group has no room, unless it is one of the first; return
        whether that is so.
        """
        with self._joining:
            if lane in self._lanes[: self._num_first_lanes]:
                return False
            self._lanes.remove(lane)
            self._max_lanes = len(self._lanes)
            return True

    def dismiss(self, lane: _ShareConsumerThread) -> bool:
        """Do without a lane that has settled its records if `NUM_IDLE_LANES` others are idle,
        unless it is one of the first; return whether that is so.
        """
        with self._joining:
            num_idle = sum(not one.is_busy for one in self._lanes if one is not lane)
            is_surplus = num_idle >= NUM_IDLE_LANES and lane in self._lanes[self._num_first_lanes :]
            if is_surplus:
                self._lanes.remove(lane)
            return is_surplus

    def check_leader(self) -> None:
        """Replace `connection` if the queue has had another leader for a while: each consumer
        rejoins by the new one before it polls. A share consumer does not say which leader it knows.
        """
        if not self._leaders.is_due:
            return
        if newer := self._leaders.find_newer_leaders(
            self._known_leaders.keys(), lambda: self._known_leaders
        ):
            log.warning("lanes.rejoin", reason="the queue has another leader", topic=self._topic)
            self._known_leaders |= newer
            self.connection = leave_out_outdated_brokers(replace(self.connection), [self._topic])

    def pause(self) -> None:
        """Pause before a retry; `stop` ends the pause."""
        self._stopping.wait(POLL_SECONDS / 10)

    def deliver(self, lease: Lease) -> None:
        """Pass a lease to the worker."""
        self._on_lease(lease)


class _ShareConsumerThread:
    """One share consumer and its thread."""

    def __init__(self, group: str, topic: str, source: ShareGroupLeases) -> None:
        self._group, self._topic, self._source = group, topic, source
        self._connection = source.connection
        self._consumer: Any | None = None
        self._numbers = itertools.count()
        self._held: dict[int, Any] = {}
        self._settled: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._refused_at: float | None = None
        self._is_removed = False
        self.thread = threading.Thread(target=self._run, name="lane", daemon=True)

    @property
    def is_busy(self) -> bool:
        """Whether it holds records, and so can't poll."""
        return bool(self._held)

    @property
    def _has_ended(self) -> bool:
        return self._is_removed or self._source.stopping

    def release_all(self) -> None:
        """Release all records that this consumer holds, from any thread."""
        for number in list(self._held):
            self._settled.put((number, False))

    def join_group(self) -> Any:
        """Join the share group with a new client, and return it."""
        self._connection = self._source.connection
        consumer = ShareConsumer(
            self._connection.lasting_settings(
                report_seconds=LANE_REPORT_SECONDS,
                group_id=self._group,
                share_acknowledgement_mode="explicit",
                max_poll_records=1,
                max_poll_interval_ms=READER_SETTINGS["max_poll_interval_ms"],
            )
        )
        consumer.subscribe([self._topic])
        self._consumer = consumer
        return consumer

    def _run(self) -> None:
        while not self._has_ended:
            self._step()
            self._is_removed = self._is_removed or self._source.dismiss(self)
        self._leave()

    def _step(self) -> None:
        try:
            self._poll()
            if self._consumer is not None:
                self._deliver_held(self._consumer)
        except KafkaException as exception:
            self._handle_error(extract_error(exception))
            self._source.pause()
        finally:
            num_lost = len(self._held)
            self._held.clear()
            self._source.add_capacity(num_lost)

    def _poll(self) -> None:
        """Wait for the polling turn, then poll until a record arrives or the source stops.

        On a stop the consumer leaves the group at once, because it would receive the records that
        others release. A poll usually returns one record; released neighbours and records of one
        batch arrive together.
        """
        with self._source.polling_turn():
            while not self._has_ended:
                self._source.check_leader()
                if self._connection is not self._source.connection:
                    self._leave()
                consumer = self.join_group() if self._consumer is None else self._consumer
                polled = consumer.poll(POLL_SECONDS)
                for message in polled:
                    self._handle_error(message.error())
                if messages := [message for message in polled if message.error() is None]:
                    self._refused_at = None
                    self._held.update({next(self._numbers): message for message in messages})
                    self._source.add_capacity(-len(messages))
                    return
                if self._source.stopping:
                    self._leave()

    def _deliver_held(self, consumer: Any) -> None:
        """Deliver the held records, and acknowledge each when its work is done."""
        for number, message in list(self._held.items()):
            if self._source.stopping:
                self._settle(number, False)
            else:
                self._source.deliver(
                    Lease(
                        Record.from_message(message),
                        message.delivery_count() or 1,
                        partial(self._settle, number),
                    )
                )
        while self._held and self._consumer is not None:
            settled = self._take_settled()
            if self._source.stopping and not all(accepted for _, accepted in settled):
                with self._source.polling_turn():  # no thread polls any more
                    pass
            self._acknowledge(consumer, settled)

    def _take_settled(self) -> list[tuple[Any, bool]]:
        """Wait for a settled record, and briefly for the others that are held; return the messages,
        and whether each is done.
        """
        entries, deadline = list[tuple[Any, bool]](), None
        with suppress(queue.Empty):
            while self._held:
                number, accepted = self._settled.get(
                    timeout=None if deadline is None else deadline.remaining_seconds
                )
                if (message := self._held.pop(number, None)) is None:
                    continue  # it was settled before
                deadline = deadline or Deadline(SETTLE_SECONDS)
                entries.append((message, accepted))
                self._source.add_capacity(1)
        return entries

    def _acknowledge(self, consumer: Any, settled: list[tuple[Any, bool]]) -> None:
        """Acknowledge records; after a failure the broker redelivers them, and other held records
        stay held.
        """
        try:
            for message, accepted in settled:
                consumer.acknowledge(
                    message, AcknowledgeType.ACCEPT if accepted else AcknowledgeType.RELEASE
                )
            errors = consumer.commit_sync(COMMIT_SECONDS) or {}
        except KafkaException as exception:
            self._handle_error(extract_error(exception))
            return
        for partition, error in errors.items():
            if error is not None:
                log.warning("lease.expired", partition=str(partition), error=str(error))

    def _settle(self, number: int, accepted: bool) -> None:
        self._settled.put((number, accepted))

    def _leave(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _handle_error(self, error: KafkaError | None) -> None:
        """Ignore transient errors, and rejoin the group after fatal ones.

        A missing permission ends the worker, because its queue would stay silent for ever; so does
        a share group that stays full.
        """
        if error is None:
            return
        log.debug("lane.failed", error=error.name())
        if error.code() == KafkaError.GROUP_MAX_SIZE_REACHED:
            self._handle_full_group()
            return
        if error.fatal() or error.code() == KafkaError._FATAL:
            log.warning("lane.rejoined", error=error.str())
            self._leave()
            return
        if isinstance(refused := translate(error, "leasing records"), AccessDenied):
            self._connection.auth_failures.report_fatal(refused)
            self._source.stop()

    def _handle_full_group(self) -> None:
        """Retry while a dead worker may still occupy the group; after `FULL_SECONDS`, do without
        this lane, or end the worker if it is one of the first.
        """
        self._leave()
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        log.warning(
            "lane.rejected",
            reason="the share group is full",
            seconds=round(now - self._refused_at, 1),
        )
        if now - self._refused_at <= FULL_SECONDS:
            return
        self._is_removed = self._source.remove(self)
        if not self._is_removed:
            self._connection.auth_failures.report_fatal(BrokerRefused(self._source.group_full_text))
            self._source.stop()
