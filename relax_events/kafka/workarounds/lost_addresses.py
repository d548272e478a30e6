"""librdkafka drops all broker addresses, and never looks for a broker again.

Seen with: librdkafka 2.16.0. Report: https://github.com/confluentinc/librdkafka/issues/5301.

A client that receives metadata without brokers, for example from a controller that takes the only
broker for dead, drops even its bootstrap addresses; 2.16 does so in group consumers. During a mere
outage a client keeps the addresses and retries. This file recognizes it in the client's statistics;
`ControlFollower` replaces its reader instead, which holds no membership.
"""

from __future__ import annotations

import time

import orjson
import structlog

from relax_events.errors import ClientFailed
from relax_events.kafka.auth_errors import AuthFailureTracker

log = structlog.get_logger()
LOST_SECONDS = 60.0
"""A client that has known no broker's address for so long will know none again."""
REPORT_SECONDS = 20.0
"""How often a client reports which brokers it knows; its reports stay in its memory until it is
polled."""
ADDRESSES = {"configured", "learned"}


class AddressMonitor:
    """Detects from a client's statistics that it has lost all broker addresses, and ends the
    worker: a new client finds the brokers.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        auth_failures: AuthFailureTracker,
        *,
        report_seconds: float = REPORT_SECONDS,
    ) -> None:
        self._bootstrap_servers, self._auth_failures, self._report_seconds = (
            bootstrap_servers,
            auth_failures,
            report_seconds,
        )
        self._noted_at: float | None = None
        self._lost_seconds = 0.0

    def update(self, statistics: str) -> None:
        """Process the client's statistics; reports that were delivered late are ignored."""
        parsed = orjson.loads(statistics)
        now, is_late = (
            parsed["ts"] / 1e6,
            time.time() - parsed["time"] > 2 * self._report_seconds + 1.0,
        )  # `time` is in whole seconds
        is_lost = not any(broker["source"] in ADDRESSES for broker in parsed["brokers"].values())
        if not is_lost or is_late or self._noted_at is None:
            self._lost_seconds = 0.0
        else:  # a suspended process has missed reports: its client had no time to recover
            self._lost_seconds += min(now - self._noted_at, 2 * self._report_seconds)
        self._noted_at = now
        if self._lost_seconds >= LOST_SECONDS:
            what = (
                f"a client of {self._bootstrap_servers} has known no broker for "
                f"{self._lost_seconds:.0f} s"
            )
            log.error(
                "client.lost", bootstrap_servers=self._bootstrap_servers, client=parsed["name"]
            )
            self._auth_failures.report_fatal(
                ClientFailed(f"{what} and never looks for one again; restart the worker")
            )
