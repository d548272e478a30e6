"""What lies on a broker under a prefix, by name alone, and its removal: topics and groups of every
kind.

How well the partitions of a run are replicated, as the cluster sees them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
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
from relax_events.kafka.connection import Connection, error_of, translate

GROUP_SETTINGS = (
    "consumer.session.timeout.ms",
    "consumer.heartbeat.interval.ms",
    "share.auto.offset.reset",
    "share.isolation.level",
    "share.record.lock.duration.ms",
    "share.delivery.count.limit",
)
LOAD_SECONDS = 0.2
"""How often a broker is asked again that is loading its groups."""


class Inventory:
    """Lists and deletes. What is gone already counts as deleted, so that an interrupted removal can
    be repeated.
    """

    def __init__(self, connection: Connection) -> None:
        self._client = AdminClient(connection.settings())
        self._timeout_seconds = connection.request_timeout_seconds

    def topics(self, prefix: str) -> dict[str, int]:
        """Return the topics whose names begin with the prefix, with their numbers of partitions."""
        try:
            found = self._client.list_topics(timeout=self._timeout_seconds).topics
        except KafkaException as exception:
            raise translate(error_of(exception), "listing topics") from exception
        return {
            name: len(topic.partitions)
            for name, topic in sorted(found.items())
            if name.startswith(prefix)
        }

    def groups(self, prefix: str) -> list[str]:
        """Return the groups whose names begin with the prefix: classic, consumer and share groups.

        A broker that has just come up loads them first, and is asked again until the request
        timeout.
        """
        deadline = Deadline(self._timeout_seconds)
        while True:
            try:
                return sorted(name for name in self._list_groups() if name.startswith(prefix))
            except KafkaException as exception:
                error = translate(error_of(exception), "listing groups")
                if not isinstance(error, BrokerUnavailable) or deadline.passed:
                    raise error from exception
            time.sleep(LOAD_SECONDS)

    def _list_groups(self) -> list[str]:
        with warnings.catch_warnings():
            # The call that replaces it leaves out share groups (confluent-kafka 2.16).
            warnings.simplefilter("ignore", DeprecationWarning)
            return [
                str(group.id) for group in self._client.list_groups(timeout=self._timeout_seconds)
            ]

    def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics with all their records, and wait until the broker names none of them: it
        hears of the deletion after the controller.

        Raises:
            BrokerUnavailable: It did not within the request timeout.
        """
        if not names:
            return
        futures = self._client.delete_topics(list(names), operation_timeout=self._timeout_seconds)
        self._settle(futures, "deleting topic", gone=KafkaError.UNKNOWN_TOPIC_OR_PART)
        deadline = Deadline(self._timeout_seconds)
        while left := sorted(set(names) & set(self.topics(""))):
            if deadline.passed:
                raise BrokerUnavailable(
                    f"topic {left[0]} is deleted and still named after "
                    f"{self._timeout_seconds:g} s; see that all brokers run"
                )
            time.sleep(LOAD_SECONDS)

    def delete_groups(self, names: Sequence[str]) -> None:
        """Delete groups with their offsets, leases and settings.

        Raises:
            BrokerRefused: A group has members; nothing is known of the others.
        """
        if names:
            futures = self._client.delete_consumer_groups(
                list(names), request_timeout=self._timeout_seconds
            )
            self._settle(futures, "deleting group", gone=KafkaError.GROUP_ID_NOT_FOUND)

    def forget_group_settings(self, names: Iterable[str]) -> None:
        """Delete what was set for groups, which the broker keeps apart from the groups
        themselves.
        """
        entries = [
            ConfigEntry(key, None, incremental_operation=AlterConfigOpType.DELETE)
            for key in GROUP_SETTINGS
        ]
        if resources := [
            ConfigResource(ResourceType.GROUP, name, incremental_configs=entries) for name in names
        ]:
            futures = self._client.incremental_alter_configs(resources)
            self._settle(
                {resource.name: future for resource, future in futures.items()},
                "deleting settings of group",
            )

    def _settle(
        self, futures: Mapping[str, Future[Any]], what: str, *, gone: int | None = None
    ) -> None:
        for name, future in futures.items():
            try:
                future.result(self._timeout_seconds)
            except KafkaException as exception:
                error = error_of(exception)
                if error.code() == KafkaError.NON_EMPTY_GROUP:
                    raise BrokerRefused(
                        f"{what} {name}: it still has members; end the run's workers first"
                    ) from exception
                if error.code() != gone:
                    raise translate(error, f"{what} {name}") from exception
            except TimeoutError:
                raise BrokerUnavailable(
                    f"{what} {name}: no answer within {self._timeout_seconds:g} s"
                ) from None


OFFLINE, UNDER_REPLICATED = "offline", "under_replicated"


def amiss(partitions: Iterable[PartitionState]) -> dict[str, int]:
    """Count partitions that nobody leads, which can't be read or written, and those with a leader
    whose replicas have not all caught up.
    """
    states = [
        OFFLINE
        if one.leader < 0
        else UNDER_REPLICATED
        if len(one.in_sync) < len(one.replicas)
        else ""
        for one in partitions
    ]
    return {state: states.count(state) for state in (OFFLINE, UNDER_REPLICATED)}
