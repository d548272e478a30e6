"""Restarts the embedded broker of a run when it dies."""

from __future__ import annotations

import signal
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import structlog

from relax_events.errors import BrokerError, RelaxError
from relax_events.kafka.embedded import BrokerBusy, EmbeddedBroker
from relax_events.launcher.memory_kills import MemoryKills

log = structlog.get_logger()
MAX_DEATHS = 6
SERVICE_SECONDS = 60.0
"""A broker that has served for so long is healthy: its earlier deaths are forgotten."""
MAX_NOTE = 400
"""Maximum characters of a cause on the console; the log has all of it."""


class BrokerKeeper:
    """Restarts an embedded broker that dies: at once, then after 1, 2, 4 and 8 seconds.

    A start takes seconds, so it runs in a thread of its own, and the caller's loop supervises
    workers meanwhile. A broker that dies during its start counts as another death. After
    `MAX_DEATHS` without `SERVICE_SECONDS` of service in between the last cause is raised. A machine
    that lacks something, such as disk space or the port, needs a person: that is raised at once.
    """

    def __init__(self, broker: EmbeddedBroker, *, executor: Executor | None = None) -> None:
        """Take over a running broker.

        Args:
            broker: The broker; the caller keeps it in use.
            executor: Runs the restarts, by default one thread.
        """
        self._broker = broker
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="broker")
        self._restart: Future[None] | None = None
        self._restart_at: float | None = None
        self._num_deaths, self._serves_since = 0, 0.0
        self._kills = MemoryKills.read()

    def tend(self, now: float) -> str | None:
        """Take the next step, without waiting; return a line for the console where there is news.

        Args:
            now: Monotonic seconds.
        Raises:
            EnvironmentProblem: The machine lacks something that the broker needs.
            BrokerError: The broker died too often; the text has the last cause.
        """
        if self._restart is not None:
            if not self._restart.done():
                return None
            restart, self._restart = self._restart, None
            return self._take_result(restart, now)
        if self._restart_at is None:
            if not self._broker.is_running:
                return self._count_death(self._broker.explain_death(), now)
            if now - self._serves_since >= SERVICE_SECONDS:
                self._num_deaths = 0
        elif now >= self._restart_at:
            self._restart = self._executor.submit(self._broker.restart)
        return None

    def _take_result(self, restart: Future[None], now: float) -> str | None:
        try:
            restart.result()
        # another process may still be stopping it, or starts it: try again at the next turn
        except BrokerBusy as error:
            log.info("broker.unavailable", error=str(error))
            return None
        except BrokerError as error:
            return self._count_death(error, now)
        self._restart_at, self._serves_since = None, now
        self._kills = MemoryKills.read()
        return None

    def _count_death(self, error: RelaxError, now: float) -> str:
        """Schedule the next restart, and return a line for the console."""
        self._num_deaths += 1
        cause = str(error)
        if self._broker.exit_code == -signal.SIGKILL and (memory := self._kills.explain()):
            cause += f", {memory}"
        log.warning("broker.died", error=cause, num_deaths=self._num_deaths)
        if self._num_deaths >= MAX_DEATHS:
            raise BrokerError(
                f"the embedded broker died {self._num_deaths} times in a row without serving for "
                f"{SERVICE_SECONDS:g} s: {cause}"
            )
        delay = 2 ** (self._num_deaths - 2) if self._num_deaths > 1 else 0
        self._restart_at = now + delay
        when = f" in {delay} s" if delay else ""
        return f"the broker died and is restarted{when}: {cause[:MAX_NOTE]}"
