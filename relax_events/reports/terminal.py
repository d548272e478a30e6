"""Shows a run's progress: a live panel on a terminal, or periodic lines in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from relax_events.config import RunConfig
from relax_events.events.parts import now_micros
from relax_events.printable import printable
from relax_events.projections.run_state import RunState
from relax_events.projections.run_view import RunView, WorkerTable
from relax_events.topics import count_slots

if TYPE_CHECKING:
    from rich.live import Live

LINE_SECONDS = 5.0
LINE_LEAST_SECONDS = 2.0
LINE_STEP_RATIO = 0.1
QUIET_SECONDS = 30.0
Lag = Mapping[str, Mapping[int, int]]
Clock = Callable[[], float]


class ProgressOutput(Protocol):
    """Where progress is shown."""

    def show(self, view: RunView, *, is_last: bool) -> None:
        """Show the run's current state; the last one stays."""

    def print_line(self, text: str) -> None:
        """Print a permanent line."""

    def show_address(self, address: str) -> None:
        """Show where the run's page is."""

    def close(self) -> None:
        """Keep the last panel, and restore the stream."""


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows a run's progress until it is closed. Unknown values are shown as a dash.

    Args:
        config: The run.
        tty: Whether to draw a live panel; by default if the stream is a terminal that can move the
            cursor.
        stream: Where to write; the process's stderr by default.
        clock: Monotonic seconds, for the interval of lines.
        heartbeats_since: Older heartbeats are ignored, microseconds since the epoch; from now on by
            default.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        tty: bool | None = None,
        stream: TextIO | None = None,
        clock: Clock = time.monotonic,
        heartbeats_since: int | None = None,
    ) -> None:
        stream = stream or sys.stderr
        tty = stream.isatty() and os.environ.get("TERM") != "dumb" if tty is None else tty
        self._config = config
        self._workers = WorkerTable(
            config, since_micros=now_micros() if heartbeats_since is None else heartbeats_since
        )
        self._surface: ProgressOutput = (
            PanelOutput(config, stream, clock) if tty else LineOutput(stream, clock)
        )
        self._newest: tuple[RunState, Lag, Mapping[str, bool]] | None = None

    def update(self, state: RunState, *, lag: Lag, alive: Mapping[str, bool]) -> None:
        """Show the run's current state.

        Args:
            state: The folded control log.
            lag: Records behind, by role and slot.
            alive: Whether a worker process of this machine runs, by worker id; missing ones do not.
        """
        self._newest = (state, lag, alive)
        self._show(is_last=False)

    def print_line(self, text: str) -> None:
        """Print a line above the live panel."""
        self._surface.print_line(text)

    def show_address(self, address: str) -> None:
        """Show where the run's page is."""
        self._surface.show_address(address)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show the last state once more and restore the terminal."""
        try:
            if self._newest is not None:
                self._show(is_last=True)
        finally:
            self._surface.close()

    def _show(self, *, is_last: bool) -> None:
        if self._newest is None:
            return
        state, lag, alive = self._newest
        now = now_micros()
        workers = self._workers.rows(state, alive=alive, now_micros=now)
        view = RunView.from_state(self._config, state, now=now, workers=workers, lag=lag)
        self._surface.show(view, is_last=is_last)


class PanelOutput:
    """A panel that is redrawn in place. It takes over the terminal with the first state, so that
    earlier steps may draw too.
    """

    def __init__(self, config: RunConfig, stream: TextIO, clock: Clock) -> None:
        from rich.console import (
            Console,  # imported only for a terminal: it takes a tenth of a second
        )

        self._config, self._clock = config, clock
        self._console = Console(file=stream, force_terminal=True)
        self._live: Live | None = None
        self._opened, self._address = clock(), ""

    def show(self, view: RunView, *, is_last: bool) -> None:
        """Redraw."""
        from rich.live import Live

        from relax_events.reports.terminal_panel import ProgressPanel

        panel = ProgressPanel(
            view=view,
            elapsed_seconds=self._clock() - self._opened,
            num_slots=count_slots(self._config.run.max_staleness),
            address=self._address,
        )
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        self._live.update(panel, refresh=not is_last)  # closing draws it once more

    def print_line(self, text: str) -> None:
        """Print a line above the panel."""
        self._console.print(printable(text), markup=False, highlight=False)

    def show_address(self, address: str) -> None:
        """Keep the address at the foot of the panel."""
        self._address = address

    def close(self) -> None:
        """Keep the last panel and restore the cursor."""
        if self._live is not None:
            self._live.stop()


class LineOutput:
    """Plain lines for a log, each with the time of day: the first step, then one every few seconds
    or tenth of the run while steps commit, and the last.

    After half a minute without a step, a line shows the current state.
    """

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream, self._clock = stream, clock
        self._shown_at = clock()
        self._shown_step, self._shown_verdict = 0, ""

    def show(self, view: RunView, *, is_last: bool) -> None:
        """Print a line if one is due, and the verdict on the run when it becomes another."""
        if self._is_due(view, is_last=is_last):
            self._shown_at, self._shown_step = self._clock(), view.step
            time_of_day = f"{datetime.now().astimezone():%H:%M:%S}"
            self.print_line(f"{time_of_day}  {format_progress(view)}")
            if view.verdict.name != self._shown_verdict and not view.verdict.is_good:
                self.print_line(f"{time_of_day}  {view.verdict.line}")
            self._shown_verdict = view.verdict.name

    def _is_due(self, view: RunView, *, is_last: bool) -> bool:
        waited = self._clock() - self._shown_at
        if view.step <= self._shown_step:
            return waited >= QUIET_SECONDS and not is_last
        if self._shown_step == 0 or is_last or view.step >= view.num_steps:
            return True
        is_far = view.step - self._shown_step >= LINE_STEP_RATIO * view.num_steps
        return waited >= (LINE_LEAST_SECONDS if is_far else LINE_SECONDS)

    def print_line(self, text: str) -> None:
        """Print a line."""
        print(printable(text), file=self._stream, flush=True)

    def show_address(self, address: str) -> None:
        """Print it."""
        self.print_line(f"watch this run: {address}")

    def close(self) -> None:
        """Leave the stream as it is."""


def format_progress(view: RunView) -> str:
    """Format a run's progress in one line; unhealthy workers are named."""
    parts = [f"step {view.step}/{view.num_steps}"]
    if view.step:
        parts += [
            f"{name} {format_decimal(value)}" for name, value in view.learning_metrics.items()
        ]
        mean, most = map(format_decimal, (view.staleness_mean, view.staleness_max))
        parts.append(f"staleness {mean} max {most}")
        tokens, left = view.tokens_per_second, view.remaining_seconds
        parts.append(f"tokens/s {'-' if tokens is None else round(tokens)}")
        parts.append(f"{format_decimal(view.step_seconds)} s a step")
        parts += [f"ETA {format_clock(left)}{format_end(left)}"] if left else []
    else:
        num_ready = sum(row.heartbeat_age_seconds is not None for row in view.workers)
        parts += ["no train step yet", f"workers {num_ready}/{len(view.workers)} ready"]
    parts.append(f"lag {view.num_lagging}")
    parts += [f"{row.worker_id} {row.state}" for row in view.workers if not row.is_healthy]
    return "  ".join(parts)


def format_decimal(value: float | None, digits: int = 3) -> str:
    """Format a metric with so many significant digits; a dash when it is unknown."""
    return "-" if value is None else f"{value:.{digits}g}"


def format_end(remaining_seconds: float | None) -> str:
    """Format the local time at which a run will end, as ` (17:42)`; nothing when it is unknown."""
    if remaining_seconds is None:
        return ""
    end = datetime.now().astimezone() + timedelta(seconds=remaining_seconds)
    is_today = end.date() == datetime.now().astimezone().date()
    return f" ({end:%H:%M})" if is_today else f" ({end:%b %d %H:%M})"


def format_clock(seconds: float | None) -> str:
    """Format a duration as h:mm:ss; a dash when it is unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
