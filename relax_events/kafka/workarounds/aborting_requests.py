"""librdkafka's admin client aborts the process when the broker dies during a request for offsets.

Seen with: librdkafka 2.16.0. Report: https://github.com/confluentinc/librdkafka/pull/5397.

Committed offsets are read by a consumer that joins no group.
"""

from __future__ import annotations

from confluent_kafka import Consumer

from relax_events.kafka.connection import Connection


def open_offset_reader(connection: Connection, consumer_group: str) -> Consumer:
    """Return a client that reads the group's committed offsets."""
    return Consumer(connection.settings(group_id=consumer_group, enable_auto_commit=False))
