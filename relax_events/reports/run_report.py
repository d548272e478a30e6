"""Writes the report of a run from its log and its folder: when `relax run` ends, however it ends,
and again later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_events.config import RunConfig
from relax_events.events.parts import now_micros
from relax_events.history.ledger import OnProgress, read_ledger
from relax_events.history.run_log import RunLog
from relax_events.history.runs.replay import read_source_curves
from relax_events.plugins import REPORTS, load_installed
from relax_events.projections.base import apply_events
from relax_events.projections.ledger import Ledger
from relax_events.projections.run_state import RunState
from relax_events.projections.verdict import Verdict
from relax_events.reports.report_files import build_report, write_report
from relax_events.session.records import SESSIONS_FILE, parse_sessions, session_seconds
from relax_events.topics.names import COMMANDS, EVALUATIONS, METRICS, POLICY_VERSIONS, TRAIN_STEPS

REPORTED_ENTITIES = (
    POLICY_VERSIONS,
    TRAIN_STEPS,
    EVALUATIONS,
    *METRICS.values(),
    COMMANDS,
)


def read_state(config: RunConfig) -> RunState:
    """Return every step of a run without its samples, every evaluation, its descriptions, how it
    ended, and the available metrics of the critic.

    Raises:
        BrokerUnavailable: The log could not be read.
    """
    state = RunState(keeps_all=True)
    with RunLog(config, name="report") as log:
        apply_events(log.read_control_events(*REPORTED_ENTITIES), state)
    return state


MICROS = 1e6
NOT_ENDED = "it has not ended: this is its current state"
TotalSeconds = Callable[[Sequence[int]], float]


def write_final_report(
    config: RunConfig,
    *,
    wall_seconds: float,
    total_seconds: TotalSeconds,
    succeeded: bool,
    reason: str,
    on_progress: OnProgress,
) -> tuple[dict[str, Any], Ledger]:
    """Check the ledger of a run that ends now, write its report, and return both.

    Args:
        config: The run, with the broker's address filled in.
        wall_seconds: How long this invocation took.
        total_seconds: Returns how long all invocations took, given when train steps were committed.
        succeeded: Whether the goal was reached.
        reason: Why the run ended.
        on_progress: As for `read_ledger`.
    """
    ledger, state = read_ledger(config, on_progress=on_progress), read_state(config)
    report = build_report(
        config,
        state,
        ledger,
        wall_seconds=wall_seconds,
        succeeded=succeeded,
        reason=reason,
        ended_at=now_micros(),
        total_seconds=total_seconds([step.committed_at for step in state.steps]),
        source=read_source_curves(config, [step.train_step for step in state.steps]),
    )
    _write_files(config, report)
    return report, ledger


def rewrite_report(config: RunConfig, *, on_progress: OnProgress) -> tuple[dict[str, Any], Ledger]:
    """Write the report of a run from its log: how it ended, or its current state. Times are of the
    newest `relax run` in its folder.

    Args:
        config: The run, with the broker's address filled in.
        on_progress: As for `read_ledger`.
    """
    ledger, state = read_ledger(config, on_progress=on_progress), read_state(config)
    commits = [step.committed_at for step in state.steps]
    path = config.run_directory / SESSIONS_FILE
    sessions = parse_sessions(path.read_bytes()) if path.exists() else []
    until = max(
        [
            now_micros() if state.ended is None else 0,
            *commits,
            *(session.ended_at or 0 for session in sessions),
        ],
        default=now_micros(),
    )
    seconds = session_seconds(sessions, commits, until=until) or [
        (until - min(commits, default=until)) / MICROS
    ]
    ended_at = sessions[-1].started_at + int(seconds[-1] * MICROS) if sessions else until
    ended = state.ended
    report = build_report(
        config,
        state,
        ledger,
        wall_seconds=seconds[-1],
        succeeded=ended is not None and ended.succeeded,
        reason=ended.reason if ended else NOT_ENDED,
        total_seconds=sum(seconds),
        ended_at=ended_at,
        source=read_source_curves(config, [step.train_step for step in state.steps]),
    )
    _write_files(config, report)
    return report, ledger


def _write_files(config: RunConfig, report: Mapping[str, Any]) -> None:
    write_report(config, report)
    for write in load_installed(REPORTS):
        write(config, report)


def find_report(folder: Path) -> Path:
    """Return the report to open: the page, or its data where no package has written a page."""
    page = folder / "report.html"
    return page if page.exists() else folder / "report.json"


def format_closing_line(report: Mapping[str, Any], folder: Path) -> str:
    """Return the result of a run in one line: its rewards, or its loss where nothing is rewarded,
    over all its steps and sessions. A second line has the verdict on a run that is not well.

    Args:
        report: As in `report.json`.
        folder: The report's.
    """
    name, curve = ("loss", "loss") if report["reward_first"] is None else ("reward", "reward_mean")
    first, last = report["curves"][curve][0], report["curves"][curve][-1]
    text = (
        f"{name} {first:.3f} -> {last:.3f} in {report['steps']} steps, "
        f"{report['total_seconds']:.0f} s"
    )
    if report["steps_of_session"] < report["steps"]:
        text += (
            f" ({report['steps_of_session']} steps in {report['wall_seconds']:.0f} s since it "
            "was resumed)"
        )
    verdict = Verdict(**report["verdict"])
    line = "" if verdict.is_good else f"\n{verdict.line}"
    return f"{text}; report: {find_report(folder)}{line}"
