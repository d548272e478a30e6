"""Reads and changes offsets and consumer groups of a Kafka cluster."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
)
from confluent_kafka import TopicPartition as ClientPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from relax_events.deadline import STALL_SECONDS, Deadline
from relax_events.errors import BrokerRefused, BrokerUnavailable
from relax_events.events.parts import TopicOffset
from relax_events.kafka.connection import (
    Connection,
    extract_error,
    retry_while_unavailable,
    translate,
)
from relax_events.kafka.workarounds.aborting_requests import open_offset_reader
from relax_events.kafka.workarounds.stale_offset_requests import check_answered, renew_client
from relax_events.topics.partitions import TopicPartition

LEADER_CHANGE_SECONDS = 0.2
# A request that was in flight when the broker died gets no response, and the client does not repeat
# it.
LIST_OFFSETS_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class ConsumerGroupMember:
    """A live member of a consumer group and its assigned partitions."""

    client_id: str
    host: str
    partitions: tuple[TopicPartition, ...]
    member_id: str = ""


@dataclass(frozen=True, slots=True)
class ConsumerGroupState:
    """A consumer group's current state."""

    name: str
    state: str
    members: tuple[ConsumerGroupMember, ...]


class OffsetAdmin:
    """Reads and changes offsets and consumer groups; every call is bounded by the connection's
    request timeout.
    """

    def __init__(self, connection: Connection) -> None:
        self._timeout_seconds = connection.request_timeout_seconds
        self._connection = connection
        self._client = AdminClient(connection.settings())
        self._offset_readers: dict[str, Any] = {}

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the beginning offset of each partition."""
        return self._offsets(partitions, OffsetSpec.earliest())

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the end offset of each partition."""
        return self._offsets(partitions, OffsetSpec.latest())

    def last_stable_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the last stable offset of each partition; it is below the end offset while a
        transaction is open.
        """
        return self._offsets(
            partitions, OffsetSpec.latest(), isolation_level=IsolationLevel.READ_COMMITTED
        )

    def offsets_at(
        self, partitions: Iterable[TopicPartition], *, timestamp_ms: int
    ) -> dict[TopicPartition, int]:
        """Return the first offset at or after a time in each partition; the end offset where all
        records are older.

        Args:
            partitions: The partitions to look up.
            timestamp_ms: Milliseconds since the epoch.
        """
        offsets = self._offsets(partitions, OffsetSpec.for_timestamp(timestamp_ms))
        return offsets | self.end_offsets(
            partition for partition, offset in offsets.items() if offset < 0
        )

    def delete_records(self, offsets: Iterable[TopicOffset]) -> None:
        """Delete the records below these offsets permanently."""
        requested = [
            ClientPartition(offset.topic, offset.partition, offset.offset) for offset in offsets
        ]
        if requested:
            for entry, future in self._client.delete_records(
                requested, request_timeout=self._timeout_seconds
            ).items():
                self._result(
                    future,
                    f"deleting records below {entry.topic}[{entry.partition}]@{entry.offset}",
                )

    def committed_offsets(
        self, consumer_group: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the committed offsets of a consumer group, for those partitions where it has
        committed.

        """
        if consumer_group not in self._offset_readers:
            self._offset_readers[consumer_group] = open_offset_reader(
                self._connection, consumer_group
            )
        entries = self._read_committed(
            consumer_group, [ClientPartition(*partition) for partition in partitions]
        )
        return {
            (p.topic, p.partition): p.offset for p in entries if p.error is None and p.offset >= 0
        }

    def set_committed_offsets(self, consumer_group: str, offsets: Iterable[TopicOffset]) -> None:
        """Set the committed offsets of a consumer group.

        Raises:
            BrokerError: The group has members, which would overwrite these offsets.
        """
        partition_offsets = [
            ClientPartition(offset.topic, offset.partition, offset.offset) for offset in offsets
        ]
        retry_while_unavailable(
            lambda: self._try_to_commit(consumer_group, partition_offsets),
            Deadline(self._timeout_seconds),
            pause_seconds=LEADER_CHANGE_SECONDS,
        )

    def groups(self, prefix: str) -> dict[str, ConsumerGroupState]:
        """Return the consumer groups, without share groups, whose names begin with `prefix`, with
        their members.

        Retries until the request timeout, because a broker that has just started loads its groups
        first.
        """
        return retry_while_unavailable(
            lambda: self._describe_groups(prefix),
            Deadline(self._timeout_seconds),
            pause_seconds=LEADER_CHANGE_SECONDS,
        )

    def close(self) -> None:
        """Close the clients."""
        while self._offset_readers:
            self._offset_readers.popitem()[1].close()

    def _offsets(
        self,
        partitions: Iterable[TopicPartition],
        spec: OffsetSpec,
        *,
        isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[TopicPartition, int]:
        """List offsets, retrying until the request timeout, each time by a new client."""
        requested = {ClientPartition(*partition): spec for partition in partitions}
        if not requested:
            return {}
        was_suspended = False

        def request() -> dict[TopicPartition, int]:
            nonlocal was_suspended
            timeout_seconds = min(
                LIST_OFFSETS_SECONDS, deadline.remaining_seconds + LEADER_CHANGE_SECONDS
            )
            started = time.monotonic()
            try:
                return self._list_offsets(
                    requested, isolation_level, timeout_seconds=timeout_seconds
                )
            except BrokerUnavailable:
                was_suspended = time.monotonic() - started > timeout_seconds + STALL_SECONDS
                self._client = renew_client(self._connection)
                raise

        deadline = Deadline(self._timeout_seconds)
        try:
            return retry_while_unavailable(request, deadline, pause_seconds=LEADER_CHANGE_SECONDS)
        except BrokerUnavailable:
            if not was_suspended:
                raise
        deadline = Deadline(self._timeout_seconds)  # the broker had no time to answer
        return retry_while_unavailable(request, deadline, pause_seconds=LEADER_CHANGE_SECONDS)

    def _list_offsets(
        self,
        requested: dict[ClientPartition, OffsetSpec],
        isolation_level: IsolationLevel,
        *,
        timeout_seconds: float,
    ) -> dict[TopicPartition, int]:
        client = self._client  # kept while it is asked: another thread may replace it
        futures = client.list_offsets(
            requested, isolation_level=isolation_level, request_timeout=timeout_seconds
        )
        offsets = {}
        for entry, future in futures.items():
            what = f"reading the offset of {entry.topic}[{entry.partition}]"
            offset = self._result(future, what, timeout_seconds=timeout_seconds).offset
            offsets[entry.topic, entry.partition] = check_answered(offset, what)
        return offsets

    def _read_committed(
        self, consumer_group: str, partitions: list[ClientPartition]
    ) -> list[ClientPartition]:
        """Read committed offsets, retrying until the request timeout while the coordinator starts
        or moves.
        """
        reader = self._offset_readers[consumer_group]

        def request() -> list[ClientPartition]:
            try:
                entries: list[ClientPartition] = reader.committed(
                    partitions, timeout=self._timeout_seconds
                )
            except KafkaException as exception:
                # without an assignment, a poll can only return the reason for a denial
                message = reader.poll(0)
                cause = (
                    extract_error(exception)
                    if message is None or message.error() is None
                    else message.error()
                )
                raise self._connection.translate(
                    cause, f"reading the committed offsets of {consumer_group}"
                ) from exception
            return entries

        return retry_while_unavailable(
            request, Deadline(self._timeout_seconds), pause_seconds=LEADER_CHANGE_SECONDS
        )

    def _try_to_commit(self, consumer_group: str, partition_offsets: list[ClientPartition]) -> None:
        """Set offsets once. A coordinator that has just started reports errors per partition in an
        otherwise successful response.
        """
        requested, what = (
            [ConsumerGroupTopicPartitions(consumer_group, partition_offsets)],
            f"setting the offsets of {consumer_group}",
        )
        for future in self._client.alter_consumer_group_offsets(
            requested, request_timeout=self._timeout_seconds
        ).values():
            for entry in self._result(future, what).topic_partitions:
                if entry.error is not None:
                    raise self._connection.translate(
                        entry.error, f"{what} at {entry.topic}[{entry.partition}]"
                    )

    def _describe_groups(self, prefix: str) -> dict[str, ConsumerGroupState]:
        what = "listing consumer groups"
        listed = self._result(
            self._client.list_consumer_groups(request_timeout=self._timeout_seconds), what
        )
        if listed.errors:  # one of several brokers failed; its groups are missing from the result
            raise translate(extract_error(listed.errors[0]), what)
        names = [group.group_id for group in listed.valid if group.group_id.startswith(prefix)]
        if not names:
            return {}
        futures = self._client.describe_consumer_groups(
            names, request_timeout=self._timeout_seconds
        )
        return {
            name: _to_group_state(self._result(future, f"describing consumer group {name}"))
            for name, future in futures.items()
        }

    def _result(
        self,
        future: Future[Any],
        what: str,
        *,
        ignore: Collection[int] = (),
        timeout_seconds: float | None = None,
    ) -> Any:
        try:
            return future.result(timeout_seconds or self._timeout_seconds)
        except KafkaException as exception:
            error = extract_error(exception)
            if error.code() in ignore:
                return None
            if error.code() == KafkaError.INVALID_REPLICATION_FACTOR:
                raise BrokerRefused(
                    f"{what}: {error.str()}; set broker.replication_factor to the number of "
                    "brokers or less"
                ) from exception
            raise translate(error, what) from exception
        except TimeoutError:
            raise BrokerUnavailable(
                f"{what}: no response within {timeout_seconds or self._timeout_seconds:g} s"
            ) from None


def _to_group_state(described: Any) -> ConsumerGroupState:
    members = tuple(
        ConsumerGroupMember(
            member.client_id,
            member.host.removeprefix("/"),
            tuple(
                sorted(
                    (entry.topic, entry.partition)
                    for entry in (member.assignment.topic_partitions if member.assignment else ())
                )
            ),
            member.member_id,
        )
        for member in described.members
    )
    return ConsumerGroupState(described.group_id, described.state.name.lower(), members)
