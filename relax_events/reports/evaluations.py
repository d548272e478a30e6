"""The evaluations of a run, read from its log, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_events.history.run_log import RunLog
from relax_events.projections.base import apply_events
from relax_events.projections.run_state import RunState
from relax_events.reports.report_files import evaluation_rows
from relax_events.topics.names import EVALUATIONS


def read_evaluations(log: RunLog) -> list[dict[str, Any]]:
    """Return a run's evaluations as its report shows them; nothing without the topic."""
    if log.plan.topic(EVALUATIONS) not in log.topics:
        return []
    state = RunState(keeps_all=True)
    apply_events(log.read_control_events(EVALUATIONS), state)
    return evaluation_rows(state.evaluations.values())


def build_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and cells of a table of evaluations."""
    ks = sorted({k for row in rows for k in row["pass_at_k"]}, key=int)
    heads = [
        "version",
        "dataset",
        "prompts",
        "samples",
        "reward",
        "stderr",
        *(f"pass@{k}" for k in ks),
        "tokens",
        "truncated",
        "unscored",
        "failed",
    ]
    cells = [
        [
            str(row["policy_version"]),
            row["dataset"],
            str(row["num_prompts"]),
            str(row["samples_per_prompt"]),
            _format(row["reward_mean"]),
            _format(row["reward_stderr"]),
            *(_format(row["pass_at_k"].get(k)) for k in ks),
            _format(row["completion_tokens_mean"], digits=1),
            *(str(row[f"num_{name}"]) for name in ("truncated", "unscored", "failed_prompts")),
        ]
        for row in rows
    ]
    return heads, cells


def _format(value: float | None, *, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
