"""Topics, groups and offsets as an operator sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerRefused, BrokerUnavailable
from relax_events.events.parts import TopicOffset
from relax_events.kafka.connection import Connection, error_of, translate
from relax_events.topics.plan import TopicSpec

VISIBLE_EVERY_SECONDS = 0.02
LEADER_CHANGE_SECONDS = 0.2
PING_SECONDS = 1.0
# no request, but the broker's making of all the files: 10 s were not enough once, on a loaded
# machine
SHOWN_SECONDS = 60.0
# a request that was under way when the broker died is not answered, and not repeated by the client
ASK_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as it is."""

    name: str
    num_partitions: int
    replication_factor: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Where a partition lies: leader (-1 when nobody leads it), all replicas, and those in sync, by
    broker id.
    """

    topic: str
    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A live member of a consumer group, and the (topic, partition) places that it holds."""

    client_id: str
    host: str
    places: tuple[tuple[str, int], ...]
    member_id: str = ""


@dataclass(frozen=True, slots=True)
class GroupState:
    """A consumer group as it is."""

    name: str
    state: str
    members: tuple[GroupMember, ...]


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
            BrokerRefused: One is there and does not let us in; said as soon as it says so.
        """
        deadline = Deadline(timeout_seconds)
        while True:
            try:
                return len(
                    self._client.list_topics(
                        timeout=min(PING_SECONDS, max(deadline.remaining_seconds, 0.01))
                    ).brokers
                )
            except KafkaException as exception:
                self._client.poll(0)  # only now does it tell why
                if deadline.passed or self._connection.refusals.latest is not None:
                    failure = self._unreachable(exception, timeout_seconds)
                    if deadline.passed or isinstance(failure, BrokerRefused):
                        raise failure from exception
                time.sleep(VISIBLE_EVERY_SECONDS)

    def _unreachable(self, exception: KafkaException, timeout_seconds: float) -> BrokerError:
        translated = self._connection.translate(
            error_of(exception), f"reaching {self._bootstrap_servers}"
        )
        if isinstance(translated, BrokerUnavailable):
            text = (
                f"no broker answered at {self._bootstrap_servers} within {timeout_seconds:g} s; "
                "start it, or set broker.bootstrap_servers"
            )
            return BrokerUnavailable(text)
        return translated

    def topics(self, prefix: str) -> dict[str, TopicState]:
        """Return the topics whose names begin with `prefix`, with the settings that differ from the
        broker's defaults.
        """
        try:
            found = {
                name: topic
                for name, topic in self._client.list_topics(
                    timeout=self._timeout_seconds
                ).topics.items()
                if name.startswith(prefix)
            }
        except KafkaException as exception:
            raise translate(error_of(exception), "listing topics") from exception
        if not found:
            return {}
        futures = self._client.describe_configs(
            [ConfigResource(ResourceType.TOPIC, name) for name in found],
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
            for name, topic in found.items()
        }

    def create(self, specs: Sequence[TopicSpec]) -> None:
        """Create topics and return once the broker shows them to clients; one that exists is left
        as it is.
        """
        if not specs:
            return
        new = [
            NewTopic(spec.name, spec.num_partitions, spec.replication_factor, config=spec.settings)
            for spec in specs
        ]
        for name, future in self._client.create_topics(
            new, operation_timeout=self._timeout_seconds
        ).items():
            self._result(future, f"creating topic {name}", ignore=KafkaError.TOPIC_ALREADY_EXISTS)
        self._await_shown(
            lambda shown: {spec.name for spec in specs} - shown, "was created but is not shown"
        )

    def _await_shown(self, amiss: Callable[[set[str]], set[str]], what: str) -> None:
        """Ask until nothing is amiss with what is shown: the controller answers a few milliseconds
        before the brokers know, who tell nobody.
        """
        deadline = Deadline(SHOWN_SECONDS)
        while names := amiss(set(self._client.list_topics(timeout=self._timeout_seconds).topics)):
            if deadline.passed:
                raise BrokerUnavailable(
                    f"topic {min(names)} {what} after {SHOWN_SECONDS:g} s; see that all "
                    "brokers run, and their logs"
                )
            time.sleep(VISIBLE_EVERY_SECONDS)

    def grow(self, name: str, num_partitions: int) -> None:
        """Give a topic more partitions; its records stay where they are."""
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
        """Return the settings of a consumer group or share group, the broker's own where none were
        made.
        """
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
        """Return the settings of one broker of the cluster; those that concern the cluster are
        alike on all.
        """
        try:
            brokers = self._client.list_topics(timeout=self._timeout_seconds).brokers
        except KafkaException as exception:
            raise translate(error_of(exception), "listing brokers") from exception
        resource = ConfigResource(ResourceType.BROKER, str(min(brokers)))
        (future,) = self._client.describe_configs(
            [resource], request_timeout=self._timeout_seconds
        ).values()
        found = self._result(future, f"describing broker {min(brokers)}")
        return {key: entry.value for key, entry in found.items() if entry.value is not None}

    def _alter(self, kind: Any, name: str, settings: Mapping[str, str]) -> None:
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in settings.items()
        ]
        for future in self._client.incremental_alter_configs(
            [ConfigResource(kind, name, incremental_configs=entries)]
        ).values():
            self._result(future, f"changing settings of {name}")

    def delete(self, names: Sequence[str]) -> None:
        """Delete topics and return once the broker shows them to nobody."""
        if not names:
            return
        for name, future in self._client.delete_topics(
            list(names), operation_timeout=self._timeout_seconds
        ).items():
            self._result(future, f"deleting topic {name}")
        self._await_shown(lambda shown: set(names) & shown, "was deleted but is still shown")

    def partitions(self, prefix: str) -> list[PartitionState]:
        """Return where the partitions of the topics lie whose names begin with `prefix`,
        ordered.
        """
        try:
            found = self._client.list_topics(timeout=self._timeout_seconds).topics
        except KafkaException as exception:
            raise translate(error_of(exception), "listing partitions") from exception
        return [
            PartitionState(
                name, number, partition.leader, tuple(partition.replicas), tuple(partition.isrs)
            )
            for name, topic in sorted(found.items())
            if name.startswith(prefix)
            for number, partition in sorted(topic.partitions.items())
        ]

    def begin_offsets(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the oldest offset that is left in each (topic, partition)."""
        return self._offsets(places, OffsetSpec.earliest())

    def offsets_at(
        self, places: Iterable[tuple[str, int]], *, timestamp_ms: int
    ) -> dict[tuple[str, int], int]:
        """Return the first offset at or after a time in each (topic, partition); the next offset
        where nothing is so young.

        Args:
            places: Which partitions.
            timestamp_ms: Milliseconds since the epoch.
        """
        found = self._offsets(places, OffsetSpec.for_timestamp(timestamp_ms))
        return found | self.end_offsets(place for place, offset in found.items() if offset < 0)

    def delete_records(self, offsets: Iterable[TopicOffset]) -> None:
        """Delete the records below these offsets, for good."""
        asked = [
            TopicPartition(offset.topic, offset.partition, offset.offset) for offset in offsets
        ]
        if asked:
            for place, future in self._client.delete_records(
                asked, request_timeout=self._timeout_seconds
            ).items():
                self._result(
                    future,
                    f"deleting records below {place.topic}[{place.partition}]@{place.offset}",
                )

    def groups(self, prefix: str) -> dict[str, GroupState]:
        """Return the consumer groups whose names begin with `prefix`, with their members; share
        groups are not among them.

        A broker that has just come up loads them first, and is asked again until the request
        timeout.
        """
        deadline = Deadline(self._timeout_seconds)
        while True:
            try:
                return self._described_groups(prefix)
            except BrokerUnavailable:
                if deadline.passed:
                    raise
                time.sleep(LEADER_CHANGE_SECONDS)

    def _described_groups(self, prefix: str) -> dict[str, GroupState]:
        what = "listing consumer groups"
        listed = self._result(
            self._client.list_consumer_groups(request_timeout=self._timeout_seconds), what
        )
        if (
            listed.errors
        ):  # of one broker among several; its groups are missing from the others' answers
            raise translate(error_of(listed.errors[0]), what)
        names = [group.group_id for group in listed.valid if group.group_id.startswith(prefix)]
        if not names:
            return {}
        futures = self._client.describe_consumer_groups(
            names, request_timeout=self._timeout_seconds
        )
        return {
            name: _group_state(self._result(future, f"describing consumer group {name}"))
            for name, future in futures.items()
        }

    def set_committed(self, consumer_group: str, offsets: Iterable[TopicOffset]) -> None:
        """Set a group's committed offsets.

        Raises:
            BrokerError: The group has members, who would write their own over these.
        """
        wanted = [
            TopicPartition(offset.topic, offset.partition, offset.offset) for offset in offsets
        ]
        deadline = Deadline(self._timeout_seconds)
        while True:
            try:
                self._try_to_commit(consumer_group, wanted)
            except BrokerUnavailable:
                if deadline.passed:
                    raise
                time.sleep(LEADER_CHANGE_SECONDS)
            else:
                return

    def _try_to_commit(self, consumer_group: str, wanted: list[TopicPartition]) -> None:
        """Set offsets, or say why not: a coordinator that has just come up refuses partition by
        partition, in an answer that looks well.
        """
        asked, what = (
            [ConsumerGroupTopicPartitions(consumer_group, wanted)],
            f"setting the offsets of {consumer_group}",
        )
        for future in self._client.alter_consumer_group_offsets(
            asked, request_timeout=self._timeout_seconds
        ).values():
            for place in self._result(future, what).topic_partitions:
                if place.error is not None:
                    raise self._connection.translate(
                        place.error, f"{what} at {place.topic}[{place.partition}]"
                    )

    def end_offsets(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the next offset of each (topic, partition)."""
        return self._offsets(places, OffsetSpec.latest())

    def stable_offsets(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return up to where readers of committed records get in each (topic, partition); below its
        end a transaction is open there.
        """
        return self._offsets(
            places, OffsetSpec.latest(), isolation_level=IsolationLevel.READ_COMMITTED
        )

    def _offsets(
        self,
        places: Iterable[tuple[str, int]],
        spec: OffsetSpec,
        *,
        isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[tuple[str, int], int]:
        """Ask for offsets, until the request timeout.

        A broker that has come back refuses what the client remembers of its partitions, and the
        client does not learn: a new one asks again.
        """
        asked = {TopicPartition(topic, partition): spec for topic, partition in places}
        deadline = Deadline(self._timeout_seconds)
        while asked:
            try:
                timeout_seconds = min(
                    ASK_SECONDS, deadline.remaining_seconds + LEADER_CHANGE_SECONDS
                )
                return self._ask_for_offsets(
                    asked, isolation_level, timeout_seconds=timeout_seconds
                )
            except BrokerUnavailable:
                if deadline.passed:
                    raise
                time.sleep(LEADER_CHANGE_SECONDS)
                self._client = AdminClient(self._connection.settings())
        return {}

    def _ask_for_offsets(
        self,
        asked: dict[TopicPartition, OffsetSpec],
        isolation_level: IsolationLevel,
        *,
        timeout_seconds: float,
    ) -> dict[tuple[str, int], int]:
        futures = self._client.list_offsets(
            asked, isolation_level=isolation_level, request_timeout=timeout_seconds
        )
        found = {}
        for place, future in futures.items():
            what = f"asking for the end of {place.topic}[{place.partition}]"
            found[place.topic, place.partition] = self._result(
                future, what, timeout_seconds=timeout_seconds
            ).offset
        return found

    def committed(
        self, consumer_group: str, places: Iterable[tuple[str, int]]
    ) -> dict[tuple[str, int], int]:
        """Return the group's committed offsets at these (topic, partition); where it never
        committed there is none.

        A consumer asks, which joins nothing: the admin client's own request for it aborts the whole
            process when the broker
        dies under it (librdkafka, pull request 5397).
        """
        if consumer_group not in self._asking:
            self._asking[consumer_group] = Consumer(
                self._connection.settings(group_id=consumer_group, enable_auto_commit=False)
            )
        found = self._ask_for_committed(
            consumer_group, [TopicPartition(*place) for place in places]
        )
        return {
            (p.topic, p.partition): p.offset for p in found if p.error is None and p.offset >= 0
        }

    def _ask_for_committed(
        self, consumer_group: str, asked: list[TopicPartition]
    ) -> list[TopicPartition]:
        """Ask until the request timeout: a group's coordinator that has just come up, or moved,
        says so and has to be asked again.
        """
        asking, deadline = self._asking[consumer_group], Deadline(self._timeout_seconds)
        while True:
            try:
                found: list[TopicPartition] = asking.committed(asked, timeout=self._timeout_seconds)
            except KafkaException as exception:
                heard = asking.poll(
                    0
                )  # nothing is assigned, so all that may come is why it was denied
                cause = (
                    error_of(exception) if heard is None or heard.error() is None else heard.error()
                )
                error = self._connection.translate(
                    cause, f"asking for the offsets of {consumer_group}"
                )
                if not isinstance(error, BrokerUnavailable) or deadline.passed:
                    raise error from exception
                time.sleep(LEADER_CHANGE_SECONDS)
            else:
                return found

    def close(self) -> None:
        """Leave the broker."""
        while self._asking:
            self._asking.popitem()[1].close()

    def _result(
        self,
        future: Future[Any],
        what: str,
        *,
        ignore: int | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        try:
            return future.result(timeout_seconds or self._timeout_seconds)
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() == ignore:
                return None
            if error.code() == KafkaError.INVALID_REPLICATION_FACTOR:
                raise BrokerRefused(
                    f"{what}: {error.str()}; set broker.replication_factor to the number of "
                    "brokers or less"
                ) from exception
            raise translate(error, what) from exception
        except TimeoutError:
            raise BrokerUnavailable(
                f"{what}: no answer within {timeout_seconds or self._timeout_seconds:g} s"
            ) from None


def _group_state(described: Any) -> GroupState:
    members = tuple(
        GroupMember(
            member.client_id,
            member.host.removeprefix("/"),
            tuple(
                sorted(
                    (place.topic, place.partition)
                    for place in (member.assignment.topic_partitions if member.assignment else ())
                )
            ),
            member.member_id,
        )
        for member in described.members
    )
    return GroupState(described.group_id, described.state.name.lower(), members)
