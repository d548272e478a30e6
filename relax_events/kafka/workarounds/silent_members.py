"""librdkafka stops sending heartbeats for its consumer group, and returns no records.

Seen with: librdkafka 2.16.0. Report: none.

After a broker was suspended for longer than the session timeout, a client without heartbeats
returned no records although the broker had long reassigned its partitions, which looks like an idle
log. This file recognizes it in librdkafka's statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

STATISTICS_SECONDS = 2.0
SILENT_SECONDS = 12.0
"""More than twice the longest heartbeat interval that brokers set, 5 s."""
COORDINATOR = "GroupCoordinator"


class HeartbeatMonitor:
    """Measures for how long a client sent no heartbeat while a broker was reachable, from the first
    heartbeat on.
    """

    def __init__(self) -> None:
        self._num_heartbeats = 0
        self._noted_at = 0.0
        self._silent_seconds = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether the client has permanently stopped sending heartbeats."""
        return self._silent_seconds > SILENT_SECONDS

    def update(self, statistics: str) -> None:
        """Process the client's statistics, which arrive every `STATISTICS_SECONDS`."""
        parsed = orjson.loads(statistics)
        brokers, now = parsed["brokers"], parsed["ts"] / 1e6
        num_heartbeats = _count_heartbeats(brokers.get(COORDINATOR, {}))
        is_away = not any(broker["state"] == "UP" for broker in brokers.values())
        if num_heartbeats != self._num_heartbeats or not num_heartbeats or is_away:
            self._silent_seconds = 0.0
        else:  # a suspended process has missed statistics: at most two intervals count as silence
            self._silent_seconds += min(now - self._noted_at, 2 * STATISTICS_SECONDS)
        self._num_heartbeats, self._noted_at = num_heartbeats, now


def _count_heartbeats(coordinator: Mapping[str, Any]) -> int:
    """Count the sent heartbeats: the only requests on this connection that the client does not list
    by kind.
    """
    listed: Mapping[str, int] = coordinator.get("req", {})
    return listed.get("ConsumerGroupHeartbeat") or int(coordinator.get("tx", 0)) - sum(
        listed.values()
    )
