"""Reads and changes topics and settings of a Kafka cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerRefused, BrokerUnavailable
from relax_events.kafka.connection import extract_error, translate
from relax_events.kafka.offset_admin import OffsetAdmin
from relax_events.kafka.protocol.advertised_listeners import (
    explain_unresolved_names,
    explain_unusable_names,
)
from relax_events.kafka.protocol.partition_leaders import format_address
from relax_events.topics.plan import TopicSpec

NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""The id, of zeros, that topics have on a broker without ids."""
UNSEEN = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED)
METADATA_POLL_SECONDS = 0.02
PING_SECONDS = 1.0
# The broker creates all files within this time; 10 s were too short once on a loaded machine.
METADATA_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic's current state."""

    name: str
    num_partitions: int
    replication_factor: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PartitionState:
    """A partition's leader (-1 when it has none), replicas and in-sync replicas, by broker id."""

    topic: str
    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


class Admin(OffsetAdmin):
    """Reads and changes topics, settings, offsets and consumer groups; every call is bounded by the
    connection's request timeout.
    """

    def ping(self, *, timeout_seconds: float) -> int:
        """Return the number of brokers, once one responds.

        Raises:
            BrokerUnavailable: No broker responded, or brokers want to be reached under names that
                mean nothing here; the text names the addresses and the remedy.
            BrokerRefused: A broker denied access; raised as soon as it does.
        """
        deadline = Deadline(timeout_seconds)
        while True:
            try:
                brokers = self._client.list_topics(
                    timeout=min(PING_SECONDS, max(deadline.remaining_seconds, 0.01))
                ).brokers.values()
                names = [format_address(one.host or "", one.port) for one in brokers]
                if problem := explain_unresolved_names(self._connection, names):
                    raise BrokerUnavailable(problem)
                return len(names)
            except KafkaException as exception:
                self._client.poll(0)  # the client reports the cause only here
                if deadline.passed or self._connection.auth_failures.latest is not None:
                    failure = self._explain_unreachable(exception, timeout_seconds)
                    if deadline.passed or isinstance(failure, BrokerRefused):
                        raise failure from exception
                time.sleep(METADATA_POLL_SECONDS)

    def topics(self, prefix: str) -> dict[str, TopicState]:
        """Return the topics whose names begin with `prefix`, with their settings."""
        try:
            topics = {
                name: topic
                for name, topic in self._client.list_topics(
                    timeout=self._timeout_seconds
                ).topics.items()
                if name.startswith(prefix)
            }
        except KafkaException as exception:
            raise translate(extract_error(exception), "listing topics") from exception
        if not topics:
            return {}
        futures = self._client.describe_configs(
            [ConfigResource(ResourceType.TOPIC, name) for name in topics],
            request_timeout=self._timeout_seconds,
        )
        settings = {
            resource.name: self._result(future, f"describing {resource.name}")
            for resource, future in futures.items()
        }
        return {
            name: TopicState(
                name,
                len(topic.partitions),
                max(
                    (len(partition.replicas) for partition in topic.partitions.values()), default=0
                ),
                {key: entry.value for key, entry in settings[name].items()},
            )
            for name, topic in topics.items()
        }

    def topic_ids(self, names: Collection[str]) -> dict[str, str]:
        """Return the ids of topics by name; those that are not there, that this principal may not
        see, or that have none on this broker, are left out.
        """
        if not names:
            return {}
        futures = self._client.describe_topics(
            TopicCollection(list(names)), request_timeout=self._timeout_seconds
        )
        topics = {
            name: self._result(future, f"describing {name}", ignore=UNSEEN)
            for name, future in futures.items()
        }
        ids = {name: str(topic.topic_id) for name, topic in topics.items() if topic is not None}
        return {name: topic_id for name, topic_id in ids.items() if topic_id != NO_ID}

    def partitions(self, prefix: str) -> list[PartitionState]:
        """Return the partitions of the topics whose names begin with `prefix`, ordered."""
        try:
            topics = self._client.list_topics(timeout=self._timeout_seconds).topics
        except KafkaException as exception:
            raise translate(extract_error(exception), "listing partitions") from exception
        return [
            PartitionState(
                name, number, partition.leader, tuple(partition.replicas), tuple(partition.isrs)
            )
            for name, topic in sorted(topics.items())
            if name.startswith(prefix)
            for number, partition in sorted(topic.partitions.items())
        ]

    def create(self, specs: Sequence[TopicSpec]) -> None:
        """Create topics and return once brokers list them; existing topics stay unchanged."""
        if not specs:
            return
        new = [
            NewTopic(spec.name, spec.num_partitions, spec.replication_factor, config=spec.settings)
            for spec in specs
        ]
        for name, future in self._client.create_topics(
            new, operation_timeout=self._timeout_seconds
        ).items():
            self._result(
                future, f"creating topic {name}", ignore=(KafkaError.TOPIC_ALREADY_EXISTS,)
            )
        self._await_metadata(
            lambda listed: {spec.name for spec in specs} - listed, "was created but is not listed"
        )

    def delete(self, names: Sequence[str]) -> None:
        """Delete topics and return once brokers no longer list them."""
        if not names:
            return
        for name, future in self._client.delete_topics(
            list(names), operation_timeout=self._timeout_seconds
        ).items():
            self._result(future, f"deleting topic {name}")
        self._await_metadata(lambda listed: set(names) & listed, "was deleted but is still listed")

    def add_partitions(self, name: str, num_partitions: int) -> None:
        """Increase a topic's number of partitions; existing records stay in their partitions."""
        for future in self._client.create_partitions(
            [NewPartitions(name, num_partitions)], operation_timeout=self._timeout_seconds
        ).values():
            self._result(future, f"growing topic {name} to {num_partitions} partitions")

    def alter_topic(self, name: str, settings: Mapping[str, str]) -> None:
        """Change settings of a topic."""
        self._alter(ResourceType.TOPIC, name, settings)

    def alter_group(self, name: str, settings: Mapping[str, str]) -> None:
        """Change settings of a consumer group or share group."""
        self._alter(ResourceType.GROUP, name, settings)

    def group_settings(self, name: str) -> dict[str, str]:
        """Return the settings of a consumer group or share group, including broker defaults."""
        resource = ConfigResource(ResourceType.GROUP, name)
        (future,) = self._client.describe_configs(
            [resource], request_timeout=self._timeout_seconds
        ).values()
        return {
            key: entry.value
            for key, entry in self._result(future, f"describing group {name}").items()
            if entry.value is not None
        }

    def broker_settings(self) -> dict[str, str]:
        """Return the settings of one broker; cluster-wide settings are the same on all brokers."""
        try:
            brokers = self._client.list_topics(timeout=self._timeout_seconds).brokers
        except KafkaException as exception:
            raise translate(extract_error(exception), "listing brokers") from exception
        resource = ConfigResource(ResourceType.BROKER, str(min(brokers)))
        (future,) = self._client.describe_configs(
            [resource], request_timeout=self._timeout_seconds
        ).values()
        entries = self._result(future, f"describing broker {min(brokers)}")
        return {key: entry.value for key, entry in entries.items() if entry.value is not None}

    def _explain_unreachable(
        self, exception: KafkaException, timeout_seconds: float
    ) -> BrokerError:
        translated = self._connection.translate(
            extract_error(exception), f"reaching {self._connection.bootstrap_servers}"
        )
        if isinstance(translated, BrokerUnavailable):
            return BrokerUnavailable(
                explain_unusable_names(self._connection)
                or f"no broker answered at {self._connection.bootstrap_servers} within "
                f"{timeout_seconds:g} s; "
                "start it, or set broker.bootstrap_servers"
            )
        return translated

    def _await_metadata(self, find_pending: Callable[[set[str]], set[str]], what: str) -> None:
        """Poll the topic list until `find_pending` returns no names: brokers learn of a change a
        few milliseconds after the controller responds.
        """
        deadline = Deadline(METADATA_TIMEOUT_SECONDS)
        while names := find_pending(
            set(self._client.list_topics(timeout=self._timeout_seconds).topics)
        ):
            if deadline.passed:
                raise BrokerUnavailable(
                    f"topic {min(names)} {what} after {METADATA_TIMEOUT_SECONDS:g} s; check "
                    "that all brokers run, and read their logs"
                )
            time.sleep(METADATA_POLL_SECONDS)

    def _alter(self, kind: Any, name: str, settings: Mapping[str, str]) -> None:
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in settings.items()
        ]
        for future in self._client.incremental_alter_configs(
            [ConfigResource(kind, name, incremental_configs=entries)]
        ).values():
            self._result(future, f"changing settings of {name}")
