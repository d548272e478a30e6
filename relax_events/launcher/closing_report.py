"""The end of a `relax run`: the ledger is checked, and the report written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from relax_events.config import RunConfig
from relax_events.errors import (
    BrokerError,
    BrokerRefused,
    CheckFailed,
    Interrupted,
    RelaxError,
    RunFailed,
)
from relax_events.events.types import RunCommanded
from relax_events.history.ledger import OnProgress
from relax_events.projections.ledger import Ledger
from relax_events.reports.reading_progress import ReadingProgress
from relax_events.reports.run_report import write_final_report
from relax_events.reports.terminal import ProgressDisplay
from relax_events.runtime.drain import Drain
from relax_events.session.records import RunSessions

log = structlog.get_logger()
NUM_TRIES, PAUSE_SECONDS, TURN_SECONDS = 3, 20.0, 0.5
"""How often a run that reached its goal is checked while the broker does not answer, how long the
run waits before it tries again, and how often it tends the embedded broker meanwhile."""


@dataclass(frozen=True, slots=True)
class ClosingReport:
    """What the end of a run needs.

    Attributes:
        config: The run, with the broker's address and all defaults filled in.
        sessions: All `relax run` of the run.
        drain: Of this process: a signal that comes while the ledger is checked ends the check.
        display: Shows how far the check is.
        tend_broker: Restarts the embedded broker if it has died, without waiting.
    """

    config: RunConfig
    sessions: RunSessions
    drain: Drain
    display: ProgressDisplay
    tend_broker: Callable[[], None] = lambda: None

    def finish(self, ended: RunCommanded | None, wall_seconds: float) -> dict[str, Any] | None:
        """Check the ledger, write the report and return it; None where the goal was reached and the
        broker did not answer: that is printed, and no failure of the run.

        Args:
            ended: How the run ended, None if it was interrupted.
            wall_seconds: How long this invocation took.
        Raises:
            CheckFailed: The ledger found a broken promise.
            RunFailed: The goal was not reached; the text names the reason.
            Interrupted: Likewise, by a signal, or a signal ended the check.
            BrokerError: The broker refused the check, or did not answer where the goal was not
                reached.
        """
        succeeded = ended is not None and ended.succeeded
        reason = ended.reason if ended else "interrupted; the same command resumes the run"
        try:
            report, ledger = self._write_patiently(wall_seconds, succeeded=succeeded, reason=reason)
        except BrokerError as error:
            if not succeeded or isinstance(error, BrokerRefused):
                raise
            log.warning("ledger.not_checked", error=str(error))
            self.display.print_line(
                f"run {self.config.run.id} reached its goal, but its log was not checked and it "
                f"has no report, since the broker did not answer ({error}): {self._later}"
            )
            return None
        if problems := ledger.problems():
            raise CheckFailed("the ledger found broken promises:\n" + "\n".join(problems))
        if not succeeded:
            text = f"run {self.config.run.id} ended before its goal: {reason}"
            raise (
                RunFailed(text)
                if ended is not None or self.drain.signal is None
                else Interrupted(text, signal_number=self.drain.signal)
            )
        return report

    def abort(self, error: RelaxError, wall_seconds: float) -> None:
        """Write the report of a run that an error ends, if that succeeds."""
        if isinstance(error, BrokerError):
            return  # nothing can be read
        try:
            self._write(wall_seconds, succeeded=False, reason=str(error))
        except (RelaxError, OSError) as second:
            log.warning("report.not_written", error=str(second))

    def _write_patiently(
        self, wall_seconds: float, *, succeeded: bool, reason: str
    ) -> tuple[dict[str, Any], Ledger]:
        """As `_write`, which is repeated where the goal was reached and the broker does not
        answer.
        """
        for _ in range(NUM_TRIES - 1 if succeeded else 0):
            try:
                return self._write(wall_seconds, succeeded=succeeded, reason=reason)
            except BrokerRefused:
                raise
            except BrokerError as error:
                log.warning("ledger.read_failed", error=str(error))
            self._wait()
        return self._write(wall_seconds, succeeded=succeeded, reason=reason)

    def _wait(self) -> None:
        """Tend the broker until the next try; a signal ends the pause."""
        over = time.monotonic() + PAUSE_SECONDS
        self.tend_broker()
        while time.monotonic() < over and not self.drain.wait(TURN_SECONDS):
            self.tend_broker()

    def _write(
        self, wall_seconds: float, *, succeeded: bool, reason: str
    ) -> tuple[dict[str, Any], Ledger]:
        return write_final_report(
            self.config,
            wall_seconds=wall_seconds,
            total_seconds=partial(self.sessions.total_seconds, wall_seconds),
            succeeded=succeeded,
            reason=reason,
            on_progress=self._make_progress(),
        )

    @property
    def _later(self) -> str:
        return f"`relax report` with the run file checks run {self.config.run.id} at any time"

    def _make_progress(self) -> OnProgress:
        """Return what shows how far the check is, and ends it after a signal: nothing else runs any
        more.
        """
        show = ReadingProgress(
            self.display.print_line, hint=f"; Ctrl-C leaves it out: {self._later}"
        )
        was_interrupted = self.drain.requested

        def show_or_leave(num_read: int, num_records: int) -> None:
            show(num_read, num_records)
            if self.drain.signal is not None and not was_interrupted:
                raise Interrupted(
                    f"run {self.config.run.id} is over, but its log was not checked and it has no "
                    f"report: {self._later}",
                    signal_number=self.drain.signal,
                )

        return show_or_leave
