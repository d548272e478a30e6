"""The data of each page that needs only the reader's state: plain values, no I/O."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from relax_events.api.events import FinishReason, now_micros
from relax_events.api.runs import (
    RunStatus,
    RunView,
    WorkerTable,
    compute_silence_limit,
    decide_status,
    find_alarms,
    find_live_workers,
    read_alarm_settings,
)
from relax_events.packages.dashboard.run_fold import Report, RunFold
from relax_events.packages.dashboard.run_reader import RunReader
from relax_events.packages.dashboard.sample_columns import (
    ATTEMPT_BITS,
    FINISH_REASONS,
    INDEX_BITS,
    OUTCOMES,
    SampleQuery,
    SampleTable,
)

MAX_POINTS = 1500
MICROS = 1e6
IDLE_CAUSES = {
    "prompter": "next_version",
    "rollout": "prompt_groups",
    "trainer": "training_samples",
    "evaluator": "next_version",
}
"""What an idle worker of a role waits for; the others wait for samples."""


def thin(length: int, limit: int = MAX_POINTS) -> slice:
    """Return a slice of at most so many points, evenly spaced and with the last one."""
    stride = max(math.ceil(length / limit), 1)
    return slice((length - 1) % stride if length else 0, None, stride)


def to_json(values: Sequence[float]) -> list[float | None]:
    """Return floats with None for those that are not finite."""
    return [round(value, 9) if math.isfinite(value) else None for value in values]


def build_summary(reader: RunReader) -> dict[str, Any]:
    """Return the head of every page: the run's status and how far the reader is."""
    now = reader.status.known_now(now_micros())
    with reader.lock:
        view = asdict(RunView.from_state(reader.fold.config, reader.fold, now=now))
        return view | {
            "num_samples": len(reader.table),
            "reader": {
                name: value
                for name, value in asdict(reader.status).items()
                if name != "read_until"  # moves on without news
            },
        }


def build_overview(reader: RunReader) -> dict[str, Any]:
    """Return the curves of the run by train step, its evaluations and its staleness."""
    with reader.lock:
        curves, fold = reader.fold.curves, reader.fold
        part = thin(len(curves.steps))
        columns = {name: to_json(column[part]) for name, column in curves.columns.items()}
        document = {
            "steps": list(curves.steps[part]),
            "committed_at": [at // 1000 for at in curves.committed_at[part]],
            "columns": columns,
            "phases": {name: to_json(column[part]) for name, column in curves.phases.items()},
            "marks": list_marks(fold),
            "staleness_counts": list(curves.staleness_counts),
            "components": {
                name: _spreads({version: spread.as_list() for version, spread in spreads.items()})
                for name, spreads in fold.components.items()
            },
            "evaluations": [
                {
                    "policy_version": event.policy_version,
                    "dataset": event.dataset,
                    "reward_mean": event.reward_mean,
                    "reward_stderr": event.reward_stderr,
                    "num_prompts": event.num_prompts,
                    "pass_at_k": event.pass_at_k,
                    "at": event.evaluated_at // 1000,
                }
                for event in fold.evaluations.values()
            ],
        }
    return document | {"groups": reader.remember("groups", lambda: group_curves(reader.table))}


def list_marks(fold: RunFold) -> list[dict[str, Any]]:
    """Return the train steps before which a run that had ended or was paused was resumed, or its
    run file was changed.
    """
    steps, committed = fold.curves.steps, fold.curves.committed_at
    marks = [
        {"step": version, "name": "changed", "text": "; ".join(map(str, changes))}
        for version, changes in fold.changes
    ]
    marks += [
        {"step": steps[at - 1] + 1, "name": "resumed", "text": ""}
        for resumed_at in fold.resumes
        if (at := bisect_right(committed, resumed_at))
    ]
    return sorted(marks, key=lambda mark: mark["step"])


def _spreads(spreads: dict[int, list[float]]) -> dict[str, Any]:
    versions = sorted(spreads)
    part = thin(len(versions))
    names = ("count", "mean", "std", "min", "max")
    return {
        "versions": versions[part],
        **{
            name: to_json([spreads[version][at] for version in versions[part]])
            for at, name in enumerate(names)
        },
    }


def group_curves(table: SampleTable) -> dict[str, Any]:
    """Return, by the train step that prompt groups were issued for, the share of groups whose
    rewards are all equal and the share of truncated samples.
    """
    table.settle()
    groups = table.columns["group"].copy()
    rewards = table.columns["reward"][: len(groups)]
    truncated = table.columns["finish"][: len(groups)] == FINISH_REASONS.index(FinishReason.LENGTH)
    used = (groups >= 0) & ((groups >> ATTEMPT_BITS & ((1 << INDEX_BITS) - 1)) < 1_000_000)
    groups, rewards, truncated = groups[used], rewards[used], truncated[used]
    if not len(groups):
        return {"steps": [], "signalless": [], "truncated": []}
    order = np.argsort(groups, kind="stable")
    groups, rewards = groups[order], rewards[order]
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    low, high = np.minimum.reduceat(rewards, starts), np.maximum.reduceat(rewards, starts)
    counts = np.diff(np.r_[starts, len(groups)])
    scored = np.isfinite(low) & np.isfinite(high) & (counts > 1)
    steps = groups[starts] >> (INDEX_BITS + ATTEMPT_BITS)
    names, at = np.unique(steps, return_inverse=True)
    num_scored = np.bincount(at, weights=scored)
    equal = np.bincount(at, weights=scored & (low == high))
    long = np.bincount(at, weights=np.add.reduceat(truncated[order].astype(np.int64), starts))
    samples = np.bincount(at, weights=counts)
    with np.errstate(invalid="ignore", divide="ignore"):
        signalless, shares = equal / num_scored, long / samples
    part = thin(len(names))
    return {
        "steps": names[part].tolist(),
        "signalless": to_json(signalless[part].tolist()),
        "truncated": to_json(shares[part].tolist()),
    }


def list_alarms(reader: RunReader, dead_letters: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the alarms of a run that is read, the severe ones first; `since` in milliseconds.

    Args:
        reader: Of the run.
        dead_letters: Of the run.
    """
    unresolved = [letter for letter in dead_letters if not letter["resolution"]]
    with reader.lock:
        fold = reader.fold
        alarms = find_alarms(
            read_alarm_settings(fold.config),
            fold,
            now=reader.status.known_now(now_micros()),
            interventions=fold.health.interventions,
            num_dead_letters=len(unresolved),
            oldest_dead_letter_at=min((letter["written_at"] for letter in unresolved), default=0)
            * 1000,
        )
    return [asdict(alarm) | {"since": alarm.since // 1000} for alarm in alarms]


def build_fleet(reader: RunReader) -> dict[str, Any]:
    """Return a row for each worker: its state, its heartbeat, its work, its engine."""
    now = reader.status.known_now(now_micros())
    with reader.lock:
        fold = reader.fold
        newest = max((heartbeat.sent_at for heartbeat in fold.workers.values()), default=0)
        workers = fold.config.workers
        is_running = decide_status(fold, workers, now=now) is RunStatus.RUNNING
        since = (now if is_running else newest) - 20 * compute_silence_limit(workers)
        alive = dict.fromkeys(find_live_workers(fold, workers, now=now), True)
        rows = WorkerTable(fold.config, since_micros=since).rows(fold, alive=alive, now_micros=now)
        return {
            "is_running": is_running,
            "workers": [
                asdict(row)
                | {
                    "host": heartbeat.host
                    if (heartbeat := fold.workers.get(row.worker_id))
                    else "",
                    "pid": heartbeat.pid if heartbeat else None,
                    "heartbeat_at": heartbeat.sent_at // 1000 if heartbeat else None,
                    "role": heartbeat.role if heartbeat else row.worker_id.rpartition("-")[0],
                    "engine": dict(row.engine),
                    "state": row.state if is_running or not heartbeat else heartbeat.state.value,
                    "in_work": heartbeat.prompt_groups_in_flight[:32] if heartbeat else [],
                }
                for row in rows
            ],
        }


def build_timeline(reader: RunReader, *, seconds: float) -> dict[str, Any]:
    """Return the lanes of the newest part of a run: trainer phases, how busy each worker was, when
    versions were published and loaded, and the idle time by cause.
    """
    with reader.lock:
        fold = reader.fold
        ends = [reports[-1].at for reports in fold.reports.values() if reports]
        ends += fold.curves.committed_at[-1:]
        stop = max(ends, default=now_micros())
        start = stop - int(seconds * MICROS)
        lanes = [_trainer_lane(fold, start)]
        idle: dict[str, float] = {}
        for worker_id in sorted(fold.reports):
            role = worker_id.rpartition("-")[0]
            reports = [report for report in fold.reports[worker_id] if report.at > start]
            if role != "trainer" and reports:
                lanes.append({"worker": worker_id, "spans": _worker_spans(role, reports)})
        for lane in lanes:
            for span in lane["spans"]:
                if span["cause"]:
                    idle[span["cause"]] = idle.get(span["cause"], 0.0) + span["idle_seconds"]
        versions = [
            {"version": version, "at": at // 1000}
            for version, at in fold.published_at.items()
            if at > start
        ]
        commands = [
            {
                "name": command.command.value,
                "at": command.commanded_at // 1000,
                "why": command.reason,
            }
            for command in fold.commands
            if command.commanded_at > start
        ]
    return {
        "start": start // 1000,
        "stop": stop // 1000,
        "lanes": lanes,
        "versions": versions[-500:],
        "commands": commands,
        "idle_seconds": dict(sorted(idle.items(), key=lambda item: -item[1])),
    }


PHASE_ORDER = ("wait", "decode", "forward_backward", "update", "weights", "commit")


def _trainer_lane(fold: RunFold, start: int) -> dict[str, Any]:
    curves = fold.curves
    spans: list[dict[str, Any]] = []
    names = [name for name in PHASE_ORDER if name in curves.phases]
    names += [name for name in curves.phases if name not in names]
    for at in range(len(curves.steps) - 1, -1, -1):
        if curves.committed_at[at] <= start or len(spans) > 4000:
            break
        stop = curves.committed_at[at] / 1000
        for name in reversed(names):
            took = curves.phases[name][at]
            if math.isfinite(took) and took > 0:
                spans.append(
                    {
                        "start": stop - took * 1000,
                        "stop": stop,
                        "phase": name,
                        "busy": 0.0 if name == "wait" else 1.0,
                        "cause": IDLE_CAUSES["trainer"] if name == "wait" else "",
                        "idle_seconds": took if name == "wait" else 0.0,
                        "step": curves.steps[at],
                    }
                )
                stop -= took * 1000
    return {"worker": "trainer", "spans": spans[::-1]}


def _worker_spans(role: str, reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Return a span for each report: how busy the worker was, and why it was not."""
    spans = []
    for report in reports:
        values = report.values
        busy = values.get("generating_ratio", values.get("busy_ratio", 0.0))
        loading = values.get("loading_ratio", 0.0)
        idle = max(1.0 - busy - loading, 0.0)
        spans.append(
            {
                "start": (report.at - report.seconds * MICROS) / 1000,
                "stop": report.at / 1000,
                "phase": "generating" if "generating_ratio" in values else "busy",
                "busy": min(busy, 1.0),
                "loading": loading,
                "cause": IDLE_CAUSES.get(role, "samples") if idle > 0 else "",
                "idle_seconds": idle * report.seconds,
                "version": report.policy_version,
            }
        )
    return spans


def build_tails(reader: RunReader) -> dict[str, Any]:
    """Return the newest reports of every worker: a series for each of its metrics."""
    with reader.lock:
        tails = {}
        for worker_id, reports in sorted(reader.fold.reports.items()):
            kept = list(reports)[-240:]
            names = sorted({name for report in kept for name in report.values})
            tails[worker_id] = {
                "at": [report.at // 1000 for report in kept],
                "series": {
                    name: to_json([report.values.get(name, math.nan) for report in kept])
                    for name in names
                },
            }
    return {"workers": tails}


def build_samples(table: SampleTable, query: SampleQuery) -> dict[str, Any]:
    """Return a page of the sample list."""
    page = table.select(query)
    return {
        "rows": table.describe(page.rows),
        "num_matching": page.num_matching,
        "num_samples": len(table),
        "choices": build_choices(table),
    }


def build_choices(table: SampleTable) -> dict[str, list[str]]:
    """Return what samples can be filtered by."""
    return {
        "outcome": list(OUTCOMES),
        "finish": list(FINISH_REASONS),
        "source": [name for name in table.sources.names if name],
        "worker": list(table.workers.names),
    }
