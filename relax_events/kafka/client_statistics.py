"""Tells from a client's own statistics whether the member of a group that it is still says so to
the coordinator.

A client that has gone silent is polled and gives nothing, while the broker has long taken its
partitions: nothing else tells that from a log without records. Seen with librdkafka 2.16 after its
broker had stood still for longer than the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

STATISTICS_SECONDS = 2.0
SILENT_SECONDS = 12.0
"""More than twice the longest time that brokers let pass between two heartbeats, 5 s."""
COORDINATOR = "GroupCoordinator"


class HeartbeatWatch:
    """Adds up for how long no heartbeat went out although a broker could be reached. It begins with
    the first heartbeat.
    """

    def __init__(self) -> None:
        self._num_heartbeats = 0
        self._noted_at = 0.0
        self._silent_seconds = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether the client has stopped for good."""
        return self._silent_seconds > SILENT_SECONDS

    def note(self, statistics: str) -> None:
        """Take in what the client says of itself, which it does every `STATISTICS_SECONDS`."""
        figures = orjson.loads(statistics)
        brokers, now = figures["brokers"], figures["ts"] / 1e6
        num_heartbeats = _num_heartbeats(brokers.get(COORDINATOR, {}))
        is_away = not any(broker["state"] == "UP" for broker in brokers.values())
        if num_heartbeats != self._num_heartbeats or not num_heartbeats or is_away:
            self._silent_seconds = 0.0
        else:  # a process that stood still has missed reports: that is not the client's silence
            self._silent_seconds += min(now - self._noted_at, 2 * STATISTICS_SECONDS)
        self._num_heartbeats, self._noted_at = num_heartbeats, now


def _num_heartbeats(coordinator: Mapping[str, Any]) -> int:
    """Count the heartbeats sent: on this connection they are the only requests that the client does
    not list by their kind.
    """
    listed: Mapping[str, int] = coordinator.get("req", {})
    return listed.get("ConsumerGroupHeartbeat") or int(coordinator.get("tx", 0)) - sum(
        listed.values()
    )
