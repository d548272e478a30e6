"""Lists and deletes the topics and groups under a name prefix, and counts unhealthy partitions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from relax_events.deadline import Deadline
from relax_events.errors import BrokerRefused, BrokerUnavailable
from relax_events.kafka.admin import PartitionState
from relax_events.kafka.connection import (
    Connection,
    extract_error,
    retry_while_unavailable,
    translate,
)
from relax_events.kafka.workarounds.omitted_share_groups import list_group_names

GROUP_SETTINGS = (
    "consumer.session.timeout.ms",
    "consumer.heartbeat.interval.ms",
    "share.auto.offset.reset",
    "share.isolation.level",
    "share.record.lock.duration.ms",
    "share.delivery.count.limit",
)
POLL_SECONDS = 0.2
"""The pause between two requests while the broker applies a change or loads its groups."""


class Inventory:
    """Lists and deletes topics and groups. Deleting missing ones succeeds, so that an interrupted
    removal can be repeated.
    """

    def __init__(self, connection: Connection) -> None:
        self._client = AdminClient(connection.settings())
        self._timeout_seconds = connection.request_timeout_seconds

    def topics(self, prefix: str) -> dict[str, int]:
        """Return the topics whose names begin with the prefix, with their numbers of partitions."""
        try:
            topics = self._client.list_topics(timeout=self._timeout_seconds).topics
        except KafkaException as exception:
            raise translate(extract_error(exception), "listing topics") from exception
        return {
            name: len(topic.partitions)
            for name, topic in sorted(topics.items())
            if name.startswith(prefix)
        }

    def groups(self, prefix: str) -> list[str]:
        """Return the names of groups of all kinds that begin with the prefix: classic, consumer and
        share groups.

        Retries until the request timeout, because a broker that has just started loads its groups
        first.
        """
        names = retry_while_unavailable(
            partial(list_group_names, self._client, timeout_seconds=self._timeout_seconds),
            Deadline(self._timeout_seconds),
            pause_seconds=POLL_SECONDS,
        )
        return sorted(name for name in names if name.startswith(prefix))

    def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics with all their records, and wait until the broker no longer lists them: it
        learns of the deletion after the controller.

        Raises:
            BrokerUnavailable: The broker still lists a topic after the request timeout.
        """
        if not names:
            return
        futures = self._client.delete_topics(list(names), operation_timeout=self._timeout_seconds)
        self._await_results(futures, "deleting topic", gone=KafkaError.UNKNOWN_TOPIC_OR_PART)
        deadline = Deadline(self._timeout_seconds)
        while left := sorted(set(names) & set(self.topics(""))):
            if deadline.passed:
                raise BrokerUnavailable(
                    f"topic {left[0]} is deleted and still listed after "
                    f"{self._timeout_seconds:g} s; check that all brokers run"
                )
            time.sleep(POLL_SECONDS)

    def delete_groups(self, names: Sequence[str]) -> None:
        """Delete groups with their offsets, leases and settings.

        Raises:
            BrokerRefused: A group has members; the state of the other groups is unknown.
        """
        if names:
            futures = self._client.delete_consumer_groups(
                list(names), request_timeout=self._timeout_seconds
            )
            self._await_results(futures, "deleting group", gone=KafkaError.GROUP_ID_NOT_FOUND)

    def delete_group_settings(self, names: Iterable[str]) -> None:
        """Delete the settings of groups, which the broker stores apart from the groups."""
        entries = [
            ConfigEntry(key, None, incremental_operation=AlterConfigOpType.DELETE)
            for key in GROUP_SETTINGS
        ]
        if resources := [
            ConfigResource(ResourceType.GROUP, name, incremental_configs=entries) for name in names
        ]:
            futures = self._client.incremental_alter_configs(resources)
            self._await_results(
                {resource.name: future for resource, future in futures.items()},
                "deleting settings of group",
            )

    def _await_results(
        self, futures: Mapping[str, Future[Any]], what: str, *, gone: int | None = None
    ) -> None:
        for name, future in futures.items():
            try:
                future.result(self._timeout_seconds)
            except KafkaException as exception:
                error = extract_error(exception)
                if error.code() == KafkaError.NON_EMPTY_GROUP:
                    raise BrokerRefused(
                        f"{what} {name}: it still has members; end the run's workers first"
                    ) from exception
                if error.code() != gone:
                    raise translate(error, f"{what} {name}") from exception
            except TimeoutError:
                raise BrokerUnavailable(
                    f"{what} {name}: no response within {self._timeout_seconds:g} s"
                ) from None


OFFLINE, UNDER_REPLICATED = "offline", "under_replicated"


def count_unhealthy_partitions(partitions: Iterable[PartitionState]) -> dict[str, int]:
    """Count offline partitions (no leader, so not readable or writable) and under-replicated ones
    (a leader, but replicas out of sync).
    """
    states = [
        OFFLINE
        if partition.leader < 0
        else UNDER_REPLICATED
        if len(partition.in_sync) < len(partition.replicas)
        else ""
        for partition in partitions
    ]
    return {state: states.count(state) for state in (OFFLINE, UNDER_REPLICATED)}
