"""Makes the report of a run from its log and its folder: at the end of `relax run`, however it came, and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from relax_events.config import RunConfig
from relax_events.control.ledger import Ledger, read_ledger
from relax_events.control.report.reading import read_state
from relax_events.control.report.writing import write_report
from relax_events.control.runs.replay import source_curves
from relax_events.control.samples.page import report_samples
from relax_events.control.sessions import FILE, seconds_of, sessions_in
from relax_events.events.parts import now_micros

MICROS = 1e6
STANDS = "it has not ended: this is how it stands"
TotalSeconds = Callable[[Sequence[int]], float]


def make_report(
    config: RunConfig, *, wall_seconds: float, total_seconds: TotalSeconds, succeeded: bool, reason: str
) -> tuple[dict[str, Any], Ledger]:
    """Prove the books of a run that ends now, write its report, and return both.

    Args:
        config: The run, with the broker's address filled in.
        wall_seconds: How long this invocation took.
        total_seconds: Gives how long all took, from when train steps were committed.
        succeeded: Whether the goal was reached.
        reason: Why the run ended.
    """
    ledger, state = read_ledger(config), read_state(config)
    steps = [step.train_step for step in state.steps]
    extras: dict[str, Any] = {"source": source_curves(config, steps), "samples": report_samples(config, steps)}
    extras["total_seconds"] = total_seconds([step.committed_at for step in state.steps])
    return write_report(config, state, ledger, wall_seconds=wall_seconds, succeeded=succeeded, reason=reason, **extras), ledger


def remake_report(config: RunConfig) -> tuple[dict[str, Any], Ledger]:
    """Write the report of a run as its log has it: how it ended, or how it stands. Times are those of the newest `relax run` in its folder."""
    ledger, state = read_ledger(config), read_state(config)
    steps, commits = [step.train_step for step in state.steps], [step.committed_at for step in state.steps]
    path = config.run_directory / FILE
    sessions = sessions_in(path.read_bytes()) if path.exists() else []
    until = max([now_micros() if state.ended is None else 0, *commits, *(session.ended_at or 0 for session in sessions)], default=now_micros())
    seconds = seconds_of(sessions, commits, until=until) or [(until - min(commits, default=until)) / MICROS]
    ended_at = sessions[-1].started_at + int(seconds[-1] * MICROS) if sessions else until
    ended = state.ended
    report = write_report(
        config,
        state,
        ledger,
        wall_seconds=seconds[-1],
        succeeded=ended is not None and ended.succeeded,
        reason=ended.reason if ended else STANDS,
        total_seconds=sum(seconds),
        ended_at=ended_at,
        source=source_curves(config, steps),
        samples=report_samples(config, steps),
    )
    return report, ledger
