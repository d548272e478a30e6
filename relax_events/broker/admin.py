"""Topics, groups and offsets as an operator sees them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from relax_events.broker.connection import Connection, error_of, translate
from relax_events.broker.deadline import Deadline
from relax_events.errors import BrokerRefused, BrokerUnavailable
from relax_events.topics.plan import TopicSpec

VISIBLE_EVERY_SECONDS = 0.02
LEADER_CHANGE_SECONDS = 0.2
ASK_SECONDS = 3.0  # a request that was under way when the broker died is not answered, and not repeated by the client


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as it is."""

    name: str
    num_partitions: int
    replication_factor: int
    settings: Mapping[str, str]


class Admin:
    """Reads and changes what lies on the broker; every call has the connection's deadline."""

    def __init__(self, connection: Connection) -> None:
        self._bootstrap_servers = connection.bootstrap_servers
        self._timeout_seconds = connection.request_timeout_seconds
        self._connection = connection
        self._client = AdminClient(connection.settings())
        self._asking: dict[str, Any] = {}

    def ping(self, *, timeout_seconds: float) -> int:
        """Return the number of brokers.

        Raises:
            BrokerUnavailable: None answered; the text names the addresses and the remedy.
        """
        try:
            return len(self._client.list_topics(timeout=timeout_seconds).brokers)
        except KafkaException as exception:
            translated = translate(error_of(exception), f"reaching {self._bootstrap_servers}")
            if isinstance(translated, BrokerUnavailable):
                text = f"no broker answered at {self._bootstrap_servers} within {timeout_seconds:g} s; start it, or set broker.bootstrap_servers"
                raise BrokerUnavailable(text) from exception
            raise translated from exception

    def topics(self, prefix: str) -> dict[str, TopicState]:
        """Return the topics whose names begin with `prefix`, with the settings that differ from the broker's defaults."""
        try:
            found = {name: topic for name, topic in self._client.list_topics(timeout=self._timeout_seconds).topics.items() if name.startswith(prefix)}
        except KafkaException as exception:
            raise translate(error_of(exception), "listing topics") from exception
        if not found:
            return {}
        futures = self._client.describe_configs([ConfigResource(ResourceType.TOPIC, name) for name in found], request_timeout=self._timeout_seconds)
        settings = {resource.name: self._result(future, f"describing {resource.name}") for resource, future in futures.items()}
        return {
            name: TopicState(
                name,
                len(topic.partitions),
                max((len(partition.replicas) for partition in topic.partitions.values()), default=0),
                {key: entry.value for key, entry in settings[name].items()},
            )
            for name, topic in found.items()
        }

    def create(self, specs: Sequence[TopicSpec]) -> None:
        """Create topics and return once the broker shows them to clients; one that exists is left as it is."""
        if not specs:
            return
        new = [NewTopic(spec.name, spec.num_partitions, spec.replication_factor, config=spec.settings) for spec in specs]
        for name, future in self._client.create_topics(new, operation_timeout=self._timeout_seconds).items():
            self._result(future, f"creating topic {name}", ignore=KafkaError.TOPIC_ALREADY_EXISTS)
        self._await_visible({spec.name for spec in specs})

    def _await_visible(self, names: set[str]) -> None:
        """Ask until all topics are shown: the controller answers a few milliseconds before the brokers know, and they tell nobody."""
        deadline = Deadline(self._timeout_seconds)
        while missing := names - self._client.list_topics(timeout=self._timeout_seconds).topics.keys():
            if deadline.passed:
                text = f"topic {min(missing)} was created but is not shown after {self._timeout_seconds:g} s; see that all brokers run"
                raise BrokerUnavailable(text)
            time.sleep(VISIBLE_EVERY_SECONDS)

    def alter_topic(self, name: str, settings: Mapping[str, str]) -> None:
        """Change settings of a topic."""
        self._alter(ResourceType.TOPIC, name, settings)

    def alter_group(self, name: str, settings: Mapping[str, str]) -> None:
        """Change settings of a consumer group or share group."""
        self._alter(ResourceType.GROUP, name, settings)

    def _alter(self, kind: Any, name: str, settings: Mapping[str, str]) -> None:
        entries = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in settings.items()]
        for future in self._client.incremental_alter_configs([ConfigResource(kind, name, incremental_configs=entries)]).values():
            self._result(future, f"changing settings of {name}")

    def delete(self, names: Sequence[str]) -> None:
        """Delete topics."""
        if names:
            for name, future in self._client.delete_topics(list(names), operation_timeout=self._timeout_seconds).items():
                self._result(future, f"deleting topic {name}")

    def end_offsets(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the next offset of each (topic, partition).

        A broker that has come back refuses what the client remembers of its partitions, and the client does not learn: a new one
        asks, until the request timeout.
        """
        asked = {TopicPartition(topic, partition): OffsetSpec.latest() for topic, partition in places}
        deadline = Deadline(self._timeout_seconds)
        while asked:
            try:
                return self._ask_for_ends(asked, timeout_seconds=min(ASK_SECONDS, deadline.remaining_seconds + LEADER_CHANGE_SECONDS))
            except BrokerUnavailable:
                if deadline.passed:
                    raise
                time.sleep(LEADER_CHANGE_SECONDS)
                self._client = AdminClient(self._connection.settings())
        return {}

    def _ask_for_ends(self, asked: dict[TopicPartition, OffsetSpec], *, timeout_seconds: float) -> dict[tuple[str, int], int]:
        futures = self._client.list_offsets(asked, request_timeout=timeout_seconds)
        ends = {}
        for place, future in futures.items():
            what = f"asking for the end of {place.topic}[{place.partition}]"
            ends[place.topic, place.partition] = self._result(future, what, timeout_seconds=timeout_seconds).offset
        return ends

    def committed(self, consumer_group: str, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the group's committed offsets at these (topic, partition); where it never committed there is none.

        A consumer asks, which joins nothing: the admin client's own request for it aborts the whole process when the broker
        dies under it (librdkafka, pull request 5397).
        """
        if consumer_group not in self._asking:
            self._asking[consumer_group] = Consumer(self._connection.settings(group_id=consumer_group, enable_auto_commit=False))
        try:
            found = self._asking[consumer_group].committed([TopicPartition(*place) for place in places], timeout=self._timeout_seconds)
        except KafkaException as exception:
            raise translate(error_of(exception), f"asking for the offsets of {consumer_group}") from exception
        return {(p.topic, p.partition): p.offset for p in found if p.error is None and p.offset >= 0}

    def close(self) -> None:
        """Leave the broker."""
        while self._asking:
            self._asking.popitem()[1].close()

    def _result(self, future: Future[Any], what: str, *, ignore: int | None = None, timeout_seconds: float | None = None) -> Any:
        try:
            return future.result(timeout_seconds or self._timeout_seconds)
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() == ignore:
                return None
            if error.code() == KafkaError.INVALID_REPLICATION_FACTOR:
                raise BrokerRefused(f"{what}: {error.str()}; set broker.replication_factor to the number of brokers or less") from exception
            raise translate(error, what) from exception
        except TimeoutError:
            raise BrokerUnavailable(f"{what}: no answer within {timeout_seconds or self._timeout_seconds:g} s") from None
