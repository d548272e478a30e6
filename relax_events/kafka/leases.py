"""Leases on a work queue: one worker holds a record until it is done, and the record is redelivered
when the worker dies.

Two implementations keep these promises: `share_leases` by a share group, and `group_leases` by a
consumer group, for brokers without share groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from relax_events.errors import BrokerError
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.records import Record

log = structlog.get_logger()
DEFAULT_DELIVERY_LIMIT = 5
SHARE_GROUP_SIZE_KEY = "group.share.max.size"
POLL_SECONDS = 1.0
LEAVE_SECONDS = POLL_SECONDS + 5


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease on one record of the queue, held until `done` or `release` is called from any
    thread.
    """

    record: Record
    delivery_count: int
    settle: Callable[[bool], None]

    def done(self) -> None:
        """Remove the record from the queue: its work is finished and its results are durable."""
        self.settle(True)

    def release(self) -> None:
        """Return the record to the queue: another worker may lease it at once."""
        self.settle(False)


def read_delivery_limit(connection: Connection, group: str) -> int:
    """Read after how many deliveries the broker drops a record of a share group; Kafka's default if
    the broker does not report it.
    """
    try:
        settings = Admin(connection).group_settings(group)
    except BrokerError as error:
        log.info("delivery_limit.read_failed", error=str(error), assumed=DEFAULT_DELIVERY_LIMIT)
        return DEFAULT_DELIVERY_LIMIT
    return int(settings.get("share.delivery.count.limit", DEFAULT_DELIVERY_LIMIT))


def read_share_group_size(admin: Admin) -> int | None:
    """Read how many members the brokers allow a share group; None where they do not report it."""
    try:
        size = admin.broker_settings().get(SHARE_GROUP_SIZE_KEY)
    except BrokerError as error:
        log.info("share_group_size.read_failed", error=str(error))
        return None
    return int(size) if size else None


class LeaseSource(Protocol):
    """Passes leases to `on_lease` from its own threads, at most `max_leases` and the added capacity
    at a time.
    """

    def add_capacity(self, num_records: int) -> None:
        """Let so many more records be held, or fewer if negative; open leases stay open."""

    def stop(self) -> None:
        """Take no more leases; open leases stay open."""

    def close(self) -> None:
        """Stop, release all open leases, leave the group."""
