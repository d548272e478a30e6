"""A consumer that subscribes to topics as a member of a consumer group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from relax_events.deadline import Deadline
from relax_events.errors import BrokerUnavailable, ClientFailed
from relax_events.events.parts import TopicOffset
from relax_events.kafka.base_consumer import (
    HANDOVER_SECONDS,
    LEADER_CHANGE_SECONDS,
    BaseConsumer,
    build_reader_settings,
)
from relax_events.kafka.connection import Connection, extract_error, retry_while_unavailable
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.kafka.workarounds.lost_assignments import MembershipMonitor
from relax_events.kafka.workarounds.silent_members import STATISTICS_SECONDS, HeartbeatMonitor
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()

OnRevoked = Callable[[list[TopicOffset], Deadline], None]


class SubscribedConsumer(BaseConsumer):
    """A consumer that subscribes to topics as a member of a consumer group (KIP-848).

    The range assignor gives a member the same partitions of all its topics. Without a committed
    offset it starts at the beginning. Partitions are revoked only inside `fetch`, which calls
    `on_revoked` first, with the revoked partitions and one deadline for all handover work. The
    deadline is well below the session timeout, after which the broker reassigns the partitions in
    any case.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        consumer_group: str,
        topics: Sequence[str],
        on_assigned: Callable[[list[TopicOffset]], None] = lambda _: None,
        on_revoked: OnRevoked = lambda _offsets, _deadline: None,
    ) -> None:
        self._heartbeats = HeartbeatMonitor()
        settings = connection.lasting_settings(
            group_id=consumer_group,
            group_protocol="consumer",
            group_remote_assignor="range",
            socket_timeout_ms=int(HANDOVER_SECONDS * 1000),
            on_commit=_log_commit_error,
            report_seconds=STATISTICS_SECONDS,
            stats_cb=self._heartbeats.update,
            **build_reader_settings(),
        )
        super().__init__(Consumer(settings), connection)
        self._connection, self._on_assigned, self._on_revoked = connection, on_assigned, on_revoked
        self._consumer_group, self._is_leaving, self._is_paused = consumer_group, False, False
        self._membership = MembershipMonitor(connection, consumer_group)
        self._consumer.subscribe(
            list(topics),
            on_assign=self._handle_assigned,
            on_revoke=self._handle_revoked,
            on_lost=self._handle_lost,
        )

    def fetch(self, max_records: int = 500, *, timeout_seconds: float) -> list[Record]:
        """See `BaseConsumer.fetch`; also takes part in rebalances.

        Raises:
            ClientFailed: The client stopped working; the worker must restart to get a new one.
        """
        records = super().fetch(max_records, timeout_seconds=timeout_seconds)
        if self._heartbeats.is_silent:
            raise ClientFailed(
                f"this client's heartbeats for {self._consumer_group} have stopped; restart "
                "the worker"
            )
        if records:
            self._membership.mark_active()
        elif self._membership.is_due:
            self._membership.check_assignment(self._consumer.memberid(), frozenset(self.positions))
            unread = {} if self._is_paused else self._find_unread()
            if self._membership.check_unread(unread):
                self._check_fetch_stalled(unread)
        held = [record for record in records if (record.topic, record.partition) in self.positions]
        for record in held:
            self.positions[record.topic, record.partition] = record.offset + 1
        return held

    def commit(self, offsets: Iterable[TopicOffset], *, wait: Deadline | None = None) -> None:
        """Commit the next positions, asynchronously unless `wait` is given.

        A lost commit only means redelivery, which event ids make harmless. After the deadline
        nothing is committed. One commit is bounded by the client's request timeout, which for group
        members equals the handover deadline.
        """
        partitions = [
            ClientPartition(offset.topic, offset.partition, offset.offset) for offset in offsets
        ]
        if not partitions:
            return
        if wait is not None and wait.passed:
            log.warning("offset_commit.overdue", num_partitions=len(partitions))
            return
        try:
            self._consumer.commit(offsets=partitions, asynchronous=wait is None)
        except KafkaException as exception:
            log.warning("offset_commit.rejected", error=extract_error(exception).name())

    def pause(self) -> None:
        """Stop receiving records. `fetch` must still be called: it keeps the membership and handles
        rebalances.
        """
        if not self._is_paused:
            self._is_paused = True
            self._consumer.pause(self._consumer.assignment())

    def resume(self) -> None:
        """Receive records again."""
        if self._is_paused:
            self._is_paused = False
            self._consumer.resume(self._consumer.assignment())

    def _find_unread(self) -> dict[TopicPartition, int]:
        """Return the partitions that have unread records, with their positions; empty while the
        broker is down.
        """
        ends = self._look_up(self.positions, OFFSET_END)
        behind = {at: self.positions[at] for at, end in ends.items() if end > self.positions[at]}
        begins = self._look_up(behind, OFFSET_BEGINNING)
        return {
            at: position
            for at, position in behind.items()
            if at in begins and ends[at] > begins[at]  # else all of it is purged
        }

    def _check_fetch_stalled(self, unread: Mapping[TopicPartition, int]) -> None:
        """Check with a second client whether unread records exist: the offsets may hold only
        transaction markers, which consumers never receive.

        Raises:
            ClientFailed: The second client receives a record, so this one has stopped fetching.
        """
        reader = LogReader(self._connection, start=unread)
        try:
            records = reader.fetch(1, timeout_seconds=self._metadata_seconds)
        finally:
            reader.close()
        if records:
            raise ClientFailed(
                "this client does not fetch the record at "
                f"{records[0].topic}[{records[0].partition}]@{records[0].offset}; restart the "
                "worker"
            )

    def close(self) -> None:
        """Leave the group and close the consumer."""
        self._is_leaving = True
        super().close()

    def _handle_assigned(self, consumer: Any, partitions: list[ClientPartition]) -> None:
        if self._is_leaving:
            return  # a member that is leaving gets no positions
        committed = self._read_committed(consumer, partitions)
        self._find_beginnings([at for at in committed if at.offset < 0])
        for partition in committed:
            self.positions[partition.topic, partition.partition] = max(partition.offset, 0)
        consumer.incremental_assign(committed)
        (consumer.pause if self._is_paused else consumer.resume)(
            committed
        )  # a partition that was revoked while paused is assigned as paused
        self._on_assigned([TopicOffset(p.topic, p.partition, max(p.offset, 0)) for p in committed])

    def _read_committed(
        self, consumer: Any, partitions: list[ClientPartition]
    ) -> list[ClientPartition]:
        """Read committed offsets, retrying until the request timeout: one request is bounded by the
        handover deadline, and a busy coordinator may need longer.
        """

        def request() -> list[ClientPartition]:
            try:
                committed: list[ClientPartition] = consumer.committed(
                    partitions, timeout=self._timeout_seconds
                )
            except KafkaException as exception:
                raise self._connection.translate(
                    extract_error(exception), "reading committed offsets"
                ) from exception
            return committed

        try:
            return retry_while_unavailable(
                request, Deadline(self._timeout_seconds), pause_seconds=LEADER_CHANGE_SECONDS
            )
        except BrokerUnavailable as error:
            # the client would wait for an assignment without end
            raise ClientFailed(f"{error}; restart the worker") from error

    def _handle_revoked(self, consumer: Any, partitions: list[ClientPartition]) -> None:
        self._on_revoked(self._drop_positions(partitions), Deadline(HANDOVER_SECONDS))
        consumer.incremental_unassign(partitions)

    def _handle_lost(self, consumer: Any, partitions: list[ClientPartition]) -> None:
        log.warning("partitions.lost", num_partitions=len(partitions))
        self._handle_revoked(consumer, partitions)

    def _drop_positions(self, partitions: list[ClientPartition]) -> list[TopicOffset]:
        return [
            TopicOffset(p.topic, p.partition, self.positions.pop((p.topic, p.partition), 0))
            for p in partitions
        ]


def _log_commit_error(error: KafkaError | None, _: Any) -> None:
    if error is not None:
        log.debug("offset_commit.rejected", error=error.name())
