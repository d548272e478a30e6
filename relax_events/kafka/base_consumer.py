"""The base of all consumers: polling records, and resuming behind truncated parts of a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from relax_events.deadline import Deadline
from relax_events.errors import AccessDenied, BrokerError, ClientFailed
from relax_events.kafka.connection import (
    Connection,
    extract_error,
    is_unavailable,
    retry_while_unavailable,
    translate,
)
from relax_events.kafka.records import Record
from relax_events.kafka.workarounds.altered_batches import build_fetch_settings
from relax_events.kafka.workarounds.stale_leaders import LeaderMonitor
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()

READER_SETTINGS: dict[str, Any] = {
    "enable_auto_commit": False,
    "enable_auto_offset_store": False,
    "isolation_level": "read_committed",
    "check_crcs": True,
    "auto_offset_reset": "error",
    "fetch_wait_max_ms": 500,  # a record ends the wait at once
    "fetch_message_max_bytes": 16 * 1024 * 1024,
    "queued_max_messages_kbytes": 65_536,
    # A member may process one record batch for long and must remain a member. The worker's
    # heartbeats detect a hang, and the session timeout frees the partitions of a dead process. The
    # default limit of 300 s would only evict members that are still working.
    "max_poll_interval_ms": 86_400_000,
    # The default of 1000 pauses fetching for a second once 64 MiB or 100,000 records are
    # prefetched, after a seek too.
    "fetch_queue_backoff_ms": 20,
}
LEADER_CHANGE_SECONDS = 0.05
HANDOVER_SECONDS = (
    2.5  # bounds one request and all work in a revoke callback: sessions last at least 3 s
)
STALE_METADATA = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC}
TRANSIENT = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._MAX_POLL_EXCEEDED,
    # the host name of a broker's container is unknown while the container is down
    KafkaError._RESOLVE,
}
TRUNCATED_LOG = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}


def build_reader_settings() -> dict[str, Any]:
    """Return the settings of all consumers."""
    return READER_SETTINGS | build_fetch_settings()


class BaseConsumer:
    """Polls records, resumes behind truncated parts of a log, and reads watermarks."""

    def __init__(self, consumer: Any, connection: Connection) -> None:
        self._consumer = consumer
        self._connection = connection
        self._timeout_seconds = connection.request_timeout_seconds
        self._metadata_seconds = min(HANDOVER_SECONDS, self._timeout_seconds)
        self._leaders = LeaderMonitor(connection)
        self.positions: dict[TopicPartition, int] = {}

    def lag(self) -> dict[TopicPartition, int]:
        """Return the number of records of each partition that were not fetched yet, as of the
        client's last fetch response.

        Sends no request. While the client's prefetch queue is full, the end offset is the one of
        its last fetch.
        """
        lag = {}
        for partition, position in self.positions.items():
            low, high = self._consumer.get_watermark_offsets(
                ClientPartition(*partition), cached=True
            )
            if high >= 0:  # negative before the first fetch response
                lag[partition] = max(high - max(position, low), 0)
        return lag

    def fetch(self, max_records: int = 500, *, timeout_seconds: float) -> list[Record]:
        """Return up to `max_records` records as soon as one is available; [] at the timeout.

        Raises:
            BrokerError: A record fails its checksum.
            BrokerRefused: The broker has denied access for longer than the request timeout, or
                denies reading.
            ClientFailed: This client waits for records from brokers that no longer lead.
        """
        if self._leaders.is_due:
            newer = self._leaders.find_newer_leaders(
                self.positions.keys(), self._read_known_leaders
            )
            if newer:
                self._replace_client(newer)
        first = self._consumer.poll(timeout_seconds)
        if first is None:
            if self._connection.auth_failures.seconds > self._timeout_seconds:
                self._check_access()
            return []
        messages = (
            [first, *self._consumer.consume(max_records - 1, 0)] if max_records > 1 else [first]
        )
        return [
            Record.from_message(message)
            for message in self._valid_messages(messages)
            if not is_partition_end(message)
        ]

    def _valid_messages(self, messages: Iterable[Any]) -> Iterator[Any]:
        """Yield records and partition ends."""
        return (
            message for message in messages if is_partition_end(message) or self._is_record(message)
        )

    def _read_known_leaders(self) -> dict[TopicPartition, int]:
        """Return the node ids of the leaders of the read partitions, by the metadata that this
        client gets now; empty if no broker responds.
        """
        leaders: dict[TopicPartition, int] = {}
        for topic in {topic for topic, _ in self.positions}:
            try:
                cluster = self._consumer.list_topics(topic, timeout=self._metadata_seconds)
            except KafkaException as exception:
                log.debug("leaders.read_failed", error=extract_error(exception).name())
                return {}
            for partition, metadata in cluster.topics[topic].partitions.items():
                if (topic, partition) in self.positions:
                    leaders[topic, partition] = metadata.leader
        return leaders

    def _replace_client(self, newer: Mapping[TopicPartition, int]) -> None:
        """Get another client, which finds these leaders.

        Raises:
            ClientFailed: Only a restart of the worker gets another client.
        """
        (topic, partition), node_id = next(iter(newer.items()))
        raise ClientFailed(
            f"this client does not find that broker {node_id} leads {topic}[{partition}]; restart "
            "the worker"
        )

    def _check_access(self) -> None:
        """Raise if the broker denies access; a broker that responds to a metadata request does
        not.
        """
        try:
            self._consumer.list_topics(timeout=self._metadata_seconds)
        except KafkaException as exception:
            raise self._connection.translate(
                extract_error(exception), "reading the log"
            ) from exception
        self._connection.auth_failures.clear()

    def _is_record(self, message: Any) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.code() == KafkaError._BAD_MSG:
            raise BrokerError(
                f"record {message.topic()}[{message.partition()}]@{message.offset()} fails its "
                "checksum: its bytes were altered on the broker's disk; restore the partition from "
                "a replica (delete its folder on the broker that leads it), or fork the run from "
                "an older version"
            )
        if error.code() in TRUNCATED_LOG:
            self._resume_truncated_log(message.topic(), message.partition())
        elif error.code() in TRANSIENT or error.retriable():
            log.debug("fetch.failed", error=error.name())
        elif error.code() != KafkaError._PARTITION_EOF:
            raise translate(error, f"reading {message.topic() or 'the log'}")
        return False

    def _resume_truncated_log(self, topic: str, partition: int) -> None:
        """Resume at the beginning offset after a purge above our position, and log the gap."""
        low, _ = self.watermarks(topic, partition)
        log.warning("log.truncated", topic=topic, partition=partition, resumed_at=low)
        self._reassign(topic, partition, low)

    def _reassign(self, topic: str, partition: int, offset: int) -> None:
        """Resume at `offset` by reassigning the partition: a seek fails after a fetch error."""
        start = ClientPartition(topic, partition, offset)
        try:
            self._consumer.incremental_unassign([start])
            self._consumer.incremental_assign([start])
        except KafkaException as exception:
            raise translate(
                extract_error(exception), f"reading on at {topic}[{partition}]@{offset}"
            ) from exception

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the beginning and end offset of a partition, read from the broker.

        Retries until the request timeout for a partition that was just created or whose leader is
        changing.
        """

        def request() -> tuple[int, int]:
            try:
                low, high = self._consumer.get_watermark_offsets(
                    ClientPartition(topic, partition), timeout=self._timeout_seconds
                )
            except KafkaException as exception:
                raise self._connection.translate(
                    extract_error(exception), f"reading the watermarks of {topic}[{partition}]"
                ) from exception
            return low, high

        def is_transient(error: BrokerError) -> bool:
            is_listed = self._has_partition(topic, partition)
            return is_unavailable(error) or (
                is_listed  # then the client's metadata is stale
                and isinstance(error.__cause__, KafkaException)
                and extract_error(error.__cause__).code() in STALE_METADATA
            )

        return retry_while_unavailable(
            request,
            Deadline(self._timeout_seconds),
            pause_seconds=LEADER_CHANGE_SECONDS,
            should_retry=is_transient,
        )

    def cluster_id(self, topic: str) -> str:
        """Return the cluster id from a topic's metadata; empty when the broker does not send one or
        does not respond.
        """
        try:
            return str(
                getattr(
                    self._consumer.list_topics(topic, timeout=self._metadata_seconds),
                    "cluster_id",
                    "",
                )
                or ""
            )
        except KafkaException as exception:
            log.debug("cluster_id.read_failed", error=extract_error(exception).name())
            return ""

    def _has_partition(self, topic: str, partition: int = 0) -> bool:
        """Return whether the broker lists the partition; True when the broker is unavailable.

        Raises:
            AccessDenied: This principal may not see the topic.
        """
        try:
            topic_metadata = self._consumer.list_topics(
                topic, timeout=self._metadata_seconds
            ).topics[topic]
        except KafkaException:
            return True
        if topic_metadata.error is not None and isinstance(
            denied := translate(topic_metadata.error, f"reading {topic}"), AccessDenied
        ):
            raise denied
        return partition in topic_metadata.partitions

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Continue reading a partition at `offset`."""
        try:
            self._consumer.seek(ClientPartition(topic, partition, offset))
        except KafkaException as exception:
            error = extract_error(exception)
            if error.code() != KafkaError._STATE or not self._is_assigned(topic, partition):
                raise translate(error, f"seeking {topic}[{partition}]@{offset}") from exception
            # fetching has not started yet, or has stopped with an error
            self._reassign(topic, partition, offset)
        self.positions[topic, partition] = offset

    def _is_assigned(self, topic: str, partition: int) -> bool:
        return any(
            (assigned.topic, assigned.partition) == (topic, partition)
            for assigned in self._consumer.assignment()
        )

    def group_metadata(self) -> Any:
        """Return the metadata with which a transaction commits this consumer's offsets."""
        return self._consumer.consumer_group_metadata()

    def _find_beginnings(self, partitions: Iterable[ClientPartition]) -> None:
        """Set these partitions to their beginning offsets, read in one request to each leader.

        The client would look each up by itself, and fetch from those found first: records of others
        would wait until that fetch returns, half a second where nothing is written.
        """
        unknown = {(at.topic, at.partition): at for at in partitions}
        offsets = self._look_up(unknown, OFFSET_BEGINNING)
        for partition, at in unknown.items():
            at.offset = offsets.get(partition, OFFSET_BEGINNING)

    def _look_up(
        self, partitions: Iterable[TopicPartition], offset: int
    ) -> dict[TopicPartition, int]:
        """Return the beginning or the end of each partition, in one request to each leader: a
        request waits behind the client's fetch, half a second where nothing is written.

        Args:
            partitions: The partitions.
            offset: `OFFSET_BEGINNING`, or `OFFSET_END`: what the isolation level lets be read.
        Returns:
            The offsets that a broker returned.
        """
        requests = [ClientPartition(*partition, offset) for partition in partitions]
        if not requests:
            return {}
        try:
            offsets = self._consumer.offsets_for_times(requests, timeout=self._metadata_seconds)
        except KafkaException as exception:
            log.debug("offsets.read_failed", error=extract_error(exception).name())
            return {}
        return {
            (at.topic, at.partition): at.offset
            for at in offsets
            if at.error is None and at.offset >= 0
        }

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


def is_partition_end(message: Any) -> bool:
    """Return whether a message reports the end of a partition."""
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF
