"""Fixtures over the session's broker: a connection, an admin client, topics of each test, and runs
with the plan applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from relax_events.config import RunConfig
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.ops.topic_apply import apply_topics
from relax_events.topics import TopicPlan, TopicSpec

QUICK_GROUP = {"consumer.session.timeout.ms": "3000", "consumer.heartbeat.interval.ms": "100"}
QUICK_SHARE_GROUP = {
    "share.auto.offset.reset": "earliest",
    "share.isolation.level": "read_committed",
    "share.record.lock.duration.ms": "60000",
    "share.session.timeout.ms": "3000",
    "share.heartbeat.interval.ms": "500",
}


@pytest.fixture
def connection(bootstrap_servers: str, run_id: str) -> Connection:
    """Return how this test reaches the broker."""
    return Connection(bootstrap_servers, request_timeout_seconds=20.0, client_id=run_id)


@pytest.fixture
def admin(connection: Connection) -> Admin:
    """Return an admin client."""
    return Admin(connection)


@pytest.fixture
def producer(connection: Connection) -> Iterator[RecordProducer]:
    """Yield a producer that sends at once."""
    opened = RecordProducer(connection)
    yield opened
    opened.close()


@pytest.fixture
def make_topic(admin: Admin, run_id: str) -> Callable[..., str]:
    """Return a maker of topics: `make_topic("work", 2)` gives the full name."""

    def make(entity: str, num_partitions: int = 1, **config: str) -> str:
        name = f"{run_id}.{entity}"
        admin.create(
            [
                TopicSpec(
                    name,
                    num_partitions,
                    1,
                    "of a test",
                    {key.replace("_", "."): value for key, value in config.items()},
                )
            ]
        )
        return name

    return make


@pytest.fixture
def make_group(admin: Admin, run_id: str) -> Callable[[str], str]:
    """Return a maker of consumer groups that notice a dead member fast."""

    def make(role: str) -> str:
        admin.alter_group(f"{run_id}.{role}", QUICK_GROUP)
        return f"{run_id}.{role}"

    return make


@pytest.fixture
def make_share_group(admin: Admin, run_id: str) -> Callable[[str], str]:
    """Return a maker of share groups that read from the beginning and assign fast."""

    def make(role: str) -> str:
        admin.alter_group(f"{run_id}.{role}", QUICK_SHARE_GROUP)
        return f"{run_id}.{role}"

    return make


@pytest.fixture
def apply_run(
    bootstrap_servers: str, make_run_config: Callable[..., RunConfig], admin: Admin
) -> Callable[..., RunConfig]:
    """Return a maker of runs on the session's broker, with their topics and groups in place."""

    def make(**sections: dict[str, Any]) -> RunConfig:
        sections["broker"] = {"bootstrap_servers": bootstrap_servers} | sections.get("broker", {})
        config = make_run_config(**sections)
        apply_topics(config, admin)
        for role in ("reward", "reference", "actor-forward", "critic", "teacher", "advantage"):
            admin.alter_group(TopicPlan.from_config(config).consumer_group(role), QUICK_GROUP)
        return config

    return make
