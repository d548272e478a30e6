"""The status of a run, for a user who did not start it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self, TextIO

import structlog

from relax_events.config import RunConfig
from relax_events.errors import BrokerError
from relax_events.events.parts import now_micros
from relax_events.history.live_run import RunFollower
from relax_events.kafka.admin import Admin
from relax_events.ops.consumer_lag import read_slot_lag
from relax_events.projections.run_status import compute_silence_limit
from relax_events.projections.run_view import RunView, WorkerTable
from relax_events.reports.terminal import ProgressDisplay

log = structlog.get_logger()
LAG_TIMEOUT_SECONDS = 5.0


class StatusReader(RunFollower):
    """Reads a run's status from its control log, any number of times while it is entered."""

    def __init__(self, config: RunConfig) -> None:
        """Read nothing yet.

        Args:
            config: The run, with the broker's address and the principal filled in.
        """
        super().__init__(config, name="status")

    def __enter__(self) -> Self:
        self._admin = Admin(replace(self.connection, request_timeout_seconds=LAG_TIMEOUT_SECONDS))
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._admin.close()
        super().__exit__(kind, error, trace)

    def read(self) -> RunView:
        """Return the run as it is now."""
        lag = self._lag()
        with self.lock:
            alive, now = dict.fromkeys(self.alive(), True), now_micros()
            table = WorkerTable(self.config, since_micros=self._heartbeats_since())
            workers = table.rows(self.state, alive=alive, now_micros=now)
            return RunView.from_state(self.config, self.state, now=now, workers=workers, lag=lag)

    def show(self, stream: TextIO, *, turn_seconds: float) -> None:
        """Draw the run on a terminal until it has ended.

        Args:
            stream: The terminal.
            turn_seconds: Interval between two updates.
        """
        with ProgressDisplay(
            self.config, tty=True, stream=stream, heartbeats_since=self._heartbeats_since()
        ) as display:
            while True:
                lag = self._lag()
                with self.lock:
                    display.update(self.state, lag=lag, alive=dict.fromkeys(self.alive(), True))
                if self.wait_for(
                    lambda: self.state.ended is not None, timeout_seconds=turn_seconds
                ):
                    return

    def _heartbeats_since(self) -> int:
        """Return the oldest time of a heartbeat that is shown: the log keeps the last heartbeat of
        every worker that ever ran.
        """
        return now_micros() - compute_silence_limit(self.config.workers)

    def _lag(self) -> Mapping[str, Mapping[int, int]]:
        try:
            return read_slot_lag(self.config, self._admin)
        except BrokerError as error:
            log.debug("consumer_lag.read_failed", error=str(error))
            return {}
