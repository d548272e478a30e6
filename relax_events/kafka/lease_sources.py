"""Opens the lease source that a run file names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from relax_events.kafka.connection import Connection
from relax_events.kafka.group_leases import ConsumerGroupLeases
from relax_events.kafka.leases import Lease, LeaseSource
from relax_events.kafka.share_leases import ShareGroupLeases


def open_lease_source(
    kind: Literal["share_group", "consumer_group"],
    connection: Connection,
    *,
    group: str,
    topic: str,
    max_leases: int,
    first_lanes: int,
    most_lanes: int,
    on_lease: Callable[[Lease], None],
) -> LeaseSource:
    """Join the group, and lease records of the queue until the source is closed.

    Args:
        kind: `broker.prompt_queue`.
        connection: The brokers.
        group: The share group, or consumer group.
        topic: The queue.
        max_leases: How many records may be held.
        first_lanes: Share consumers that join at once.
        most_lanes: Share consumers that may join.
        on_lease: Called with each lease, from other threads.
    """
    if kind == "consumer_group":
        return ConsumerGroupLeases(
            connection, group=group, topic=topic, max_leases=max_leases, on_lease=on_lease
        )
    return ShareGroupLeases(
        connection,
        group=group,
        topic=topic,
        max_leases=max_leases,
        first_lanes=first_lanes,
        most_lanes=most_lanes,
        on_lease=on_lease,
    )
