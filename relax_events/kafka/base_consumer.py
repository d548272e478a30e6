"""What all readers of the log share: waiting for records without spinning, and meeting a log that
was cut off or altered.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from relax_events.deadline import Deadline
from relax_events.errors import AccessDenied, BrokerUnavailable
from relax_events.kafka.batch_verification import Examiner, is_asked_for
from relax_events.kafka.connection import Connection, error_of, translate
from relax_events.kafka.corruption import damage_error, damaged_records
from relax_events.kafka.records import Record

log = structlog.get_logger()

READER_SETTINGS: dict[str, Any] = {
    "enable_auto_commit": False,
    "enable_auto_offset_store": False,
    "isolation_level": "read_committed",
    "check_crcs": True,
    "auto_offset_reset": "error",
    "fetch_wait_max_ms": 100,
    "fetch_message_max_bytes": 16 * 1024 * 1024,
    "queued_max_messages_kbytes": 65_536,
    # A member that works on one part for long must stay one. Whether it hangs is told by its
    # worker's heartbeats, whose calls have deadlines; the partitions of a process that is ended are
    # free within the session. This limit, 300 s by default, would only ever meet members that work.
    "max_poll_interval_ms": 86_400_000,
    # 1000 by default: that long nothing came after 64 MiB or 100,000 records lay fetched ahead,
    # after a seek too
    "fetch_queue_backoff_ms": 20,
}
LEADER_CHANGE_SECONDS = 0.05
HAND_OVER_SECONDS = (
    2.5  # of one request, and of all work in a revoke callback: sessions last 3 s at the least
)
BEHIND = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC}
TRANSIENT = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._MAX_POLL_EXCEEDED,
    # the name of a broker in a container goes with the container, and comes back with it
    KafkaError._RESOLVE,
}
CUT_LOG = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}

Place = tuple[str, int]


def reader_settings() -> dict[str, Any]:
    """Return what all readers set; the client leaves checksums to an `Examiner` where that is asked
    for.
    """
    return READER_SETTINGS | {"check_crcs": not is_asked_for()}


class Fetching:
    """What both kinds of readers share: waiting for records without spinning, and meeting a log
    that was cut off.
    """

    def __init__(self, consumer: Any, connection: Connection) -> None:
        self._consumer = consumer
        self._connection = connection
        self._timeout_seconds = connection.request_timeout_seconds
        self._ask_seconds = min(HAND_OVER_SECONDS, self._timeout_seconds)
        self._behind_damage: dict[Place, int] = {}
        self._examiner = (
            Examiner(self._leader, timeout_seconds=self._timeout_seconds)
            if is_asked_for()
            else None
        )
        self.positions: dict[Place, int] = {}

    def lag(self) -> dict[Place, int]:
        """Return how many records of each partition were not fetched yet, as of the last answer
        that the broker gave our client.

        Nothing is asked for it. While more lies fetched ahead than the client takes, the end of the
        partition is the one of then.
        """
        lag = {}
        for place, position in self.positions.items():
            low, high = self._consumer.get_watermark_offsets(TopicPartition(*place), cached=True)
            if high >= 0:  # else no answer has come
                lag[place] = max(high - max(position, low), 0)
        return lag

    def fetch(self, max_records: int = 500, *, timeout_seconds: float) -> list[Record]:
        """Return records as soon as there is one, with all that lie behind it up to `max_records`;
        [] at the timeout.

        A record batch that fails its checksum is passed over once and for all: records without
        values stand for it, `Record.is_damaged`.

        Raises:
            BrokerRefused: The broker has not let us in for as long as a request may take, or denies
                us what we read.
        """
        first = self._consumer.poll(timeout_seconds)
        if first is None:
            if self._connection.refusals.seconds > self._timeout_seconds:
                self._ask_whether_refused()
            return []
        messages = (
            [first, *self._consumer.consume(max_records - 1, 0)] if max_records > 1 else [first]
        )
        return [
            record_of(found)
            for found in self._sound(messages, with_damaged=True)
            if not is_end(found)
        ]

    def _sound(self, messages: Iterable[Any], *, with_damaged: bool) -> Iterator[Any]:
        """Give what is a record or an end of a partition; what the client has misread behind a
        damaged batch goes with it.
        """
        passed: set[Place] = set()
        for message in messages:
            place = (message.topic(), message.partition())
            if place in passed:
                continue
            if is_damage(message):
                if not with_damaged:
                    raise damage_error(*place, message.offset())
                passed.add(place)
                yield from self._meet_damage(message)
            elif self._is_misread(place, message):
                self._restart(*place, self._behind_damage[place])
                passed.add(place)
            elif self._is_record(message) or is_end(message):
                if place in self._behind_damage:
                    self._behind_damage[place] = message.offset() + (not is_end(message))
                yield (
                    message
                    if is_end(message)
                    else self._examined(message, with_damaged=with_damaged)
                )

    def _examined(self, message: Any, *, with_damaged: bool) -> Any:
        """Give a message, or where its record batch was altered and the client was not to look, a
        record without a value in its place.
        """
        place = message.topic(), message.partition()
        if (
            self._examiner is None
            or (altered := self._examiner.altered(*place, message.offset())) is None
        ):
            return message
        if not with_damaged:
            raise damage_error(*place, altered.start)
        return replace(Record.of(message), value=b"", is_damaged=True)

    def _leader(self, topic: str, partition: int) -> Connection:
        """Return how to reach the broker that leads a partition."""
        try:
            found = self._consumer.list_topics(topic, timeout=self._ask_seconds)
            leader = found.brokers[found.topics[topic].partitions[partition].leader]
        except KafkaException as exception:
            raise self._connection.translate(
                error_of(exception), f"asking who leads {topic}[{partition}]"
            ) from exception
        except KeyError:
            raise BrokerUnavailable(
                f"{topic}[{partition}] has no leader; see that all brokers run"
            ) from None
        return replace(self._connection, bootstrap_servers=f"{leader.host}:{leader.port}")

    def _is_misread(self, place: Place, message: Any) -> bool:
        """Tell whether this is the client's late complaint about what it took for records behind a
        damaged batch.
        """
        expected, error = self._behind_damage.get(place), message.error()
        if expected is None or error is None:
            return False
        return error.code() == KafkaError._NOT_IMPLEMENTED or (
            error.code() in CUT_LOG and message.offset() != expected
        )

    def _meet_damage(self, message: Any) -> list[Record]:
        """Go on behind a record batch that was altered on the broker's disk; the gap is said
        aloud.
        """
        topic, partition, first = message.topic(), message.partition(), message.offset()
        low, high = self.watermarks(topic, partition)
        if not low <= first < high:
            raise damage_error(topic, partition, first)
        if self._examiner is None:
            records, stop = damaged_records(
                self._connection,
                READER_SETTINGS,
                topic=topic,
                partition=partition,
                first=first,
                high=high,
            )
            log.error(
                "record_batch.damaged",
                topic=topic,
                partition=partition,
                offset=first,
                num_records=len(records),
                resumed_at=stop,
            )
        elif (altered := self._examiner.altered(topic, partition, first)) is None:
            raise damage_error(topic, partition, first)
        else:
            stop = min(altered.stop, high)
            records = [
                Record(topic, partition, offset, "", b"", {}, 0, is_damaged=True)
                for offset in range(first, stop)
            ]
        self._behind_damage[topic, partition] = stop
        self._restart(topic, partition, stop)
        return records

    def _ask_whether_refused(self) -> None:
        """Tell an idle log from one that we are kept away from; where some broker still answers, we
        are not.
        """
        try:
            self._consumer.list_topics(timeout=self._ask_seconds)
        except KafkaException as exception:
            raise self._connection.translate(error_of(exception), "reading the log") from exception
        self._connection.refusals.forget()

    def _is_record(self, message: Any) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.code() in CUT_LOG:
            self._meet_cut_log(message.topic(), message.partition())
        elif error.code() in TRANSIENT or error.retriable():
            log.debug("fetch.disturbed", error=error.name())
        elif error.code() != KafkaError._PARTITION_EOF:
            raise translate(error, f"reading {message.topic() or 'the log'}")
        return False

    def _meet_cut_log(self, topic: str, partition: int) -> None:
        """Go on at the oldest record that is left, after a purge below our position; the gap is
        said aloud.
        """
        low, _ = self.watermarks(topic, partition)
        log.warning("log.truncated", topic=topic, partition=partition, resumed_at=low)
        self._restart(topic, partition, low)

    def _restart(self, topic: str, partition: int, offset: int) -> None:
        """Go on at `offset` where reading has stopped with an error; such a partition can't be
        sought.
        """
        place = TopicPartition(topic, partition, offset)
        try:
            self._consumer.incremental_unassign([place])
            self._consumer.incremental_assign([place])
        except KafkaException as exception:
            raise translate(
                error_of(exception), f"reading on at {topic}[{partition}]@{offset}"
            ) from exception

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the oldest and the next offset of a partition, asked from the broker.

        A partition that was just made, or whose leader is changing, is asked again until the
        request timeout.
        """
        deadline = Deadline(self._timeout_seconds)
        while True:
            try:
                low, high = self._consumer.get_watermark_offsets(
                    TopicPartition(topic, partition), timeout=self._timeout_seconds
                )
            except KafkaException as exception:
                is_shown = self._is_shown(topic, partition)  # then the client's own view is behind
                error = self._connection.translate(
                    error_of(exception), f"asking for the ends of {topic}[{partition}]"
                )
                is_transient = isinstance(error, BrokerUnavailable) or (
                    is_shown and error_of(exception).code() in BEHIND
                )
                if not is_transient or deadline.passed:
                    raise error from exception
                time.sleep(LEADER_CHANGE_SECONDS)
            else:
                return low, high

    def cluster_id(self, topic: str) -> str:
        """Return the id of the cluster, asked with the metadata of one topic; empty where the
        broker tells none, or does not answer.
        """
        try:
            return str(
                getattr(
                    self._consumer.list_topics(topic, timeout=self._ask_seconds), "cluster_id", ""
                )
                or ""
            )
        except KafkaException as exception:
            log.debug("cluster.unknown", error=error_of(exception).name())
            return ""

    def _is_shown(self, topic: str, partition: int = 0) -> bool:
        """Ask for a topic by name and return whether the broker has that partition; a broker that
        is away shows nothing.

        Raises:
            AccessDenied: The topic is hidden from us.
        """
        try:
            found = self._consumer.list_topics(topic, timeout=self._ask_seconds).topics[topic]
        except KafkaException:
            return False
        if found.error is not None and isinstance(
            denied := translate(found.error, f"reading {topic}"), AccessDenied
        ):
            raise denied
        return partition in found.partitions

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on reading a partition from `offset`."""
        self._behind_damage.pop((topic, partition), None)
        try:
            self._consumer.seek(TopicPartition(topic, partition, offset))
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() != KafkaError._STATE or not self._is_assigned(topic, partition):
                raise translate(error, f"seeking {topic}[{partition}]@{offset}") from exception
            self._restart(topic, partition, offset)  # its reading has not begun yet, or has stopped
        self.positions[topic, partition] = offset

    def _is_assigned(self, topic: str, partition: int) -> bool:
        return any(
            (place.topic, place.partition) == (topic, partition)
            for place in self._consumer.assignment()
        )

    def group_metadata(self) -> Any:
        """Return what a transaction needs to commit this reader's offsets."""
        return self._consumer.consumer_group_metadata()

    def close(self) -> None:
        """Leave the group and the broker."""
        self._consumer.close()
        if self._examiner is not None:
            self._examiner.close()


def is_damage(message: Any) -> bool:
    """Tell whether a message stands for a record batch that fails its checksum."""
    return message.error() is not None and message.error().code() == KafkaError._BAD_MSG


def is_end(found: Any) -> bool:
    """Tell whether a message stands for the end of a partition."""
    return (
        not isinstance(found, Record)
        and found.error() is not None
        and found.error().code() == KafkaError._PARTITION_EOF
    )


def place_of(found: Any) -> tuple[Place, int]:
    """Return partition and offset of a message, or of a record that stands for a damaged one."""
    return (
        ((found.topic, found.partition), found.offset)
        if isinstance(found, Record)
        else ((found.topic(), found.partition()), found.offset())
    )


def record_of(found: Any) -> Record:
    """Take over a message; a record stays what it is."""
    return found if isinstance(found, Record) else Record.of(found)
