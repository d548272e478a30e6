"""Leases on a work queue: a record is held by one worker until it is done, and is free again when
the worker dies.

Two kinds keep these promises: `share_leases` by a share group, and `group_leases` by a consumer
    group, for brokers that have none of the former.
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
USUAL_DELIVERY_LIMIT = 5
POLL_SECONDS = 1.0
LEAVE_SECONDS = POLL_SECONDS + 5


@dataclass(frozen=True, slots=True)
class Lease:
    """One record of the queue, held until `done` or `release` is called, from any thread."""

    record: Record
    delivery_count: int
    settle: Callable[[bool], None]

    def done(self) -> None:
        """The work is finished and safe: the record leaves the queue."""
        self.settle(True)

    def release(self) -> None:
        """The work was not finished: another worker may have the record at once."""
        self.settle(False)


def delivery_limit(connection: Connection, group: str) -> int:
    """Return after how many deliveries the broker drops a record of a share group; what brokers do
    by themselves if it does not tell us.
    """
    try:
        settings = Admin(connection).group_settings(group)
    except BrokerError as error:
        log.info("deliveries.unknown", error=str(error), assumed=USUAL_DELIVERY_LIMIT)
        return USUAL_DELIVERY_LIMIT
    return int(settings.get("share.delivery.count.limit", USUAL_DELIVERY_LIMIT))


class LeaseSource(Protocol):
    """Hands leases to `on_lease`, at most `lanes` at a time, from threads of its own; `close`
    releases what is left.
    """

    def stop(self) -> None:
        """Take no more leases; those held stay held."""

    def close(self) -> None:
        """Stop, release what is still held, leave the group."""
