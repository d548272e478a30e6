"""A run on a time axis, in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

Read from the control log: train steps with their phases, published versions, evaluations, commands
with their reasons, and how busy each worker was. Phases of a step are sums; they are shown one
after the other, in their order within a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from relax_events.events.types import (
    Event,
    MetricsReported,
    PolicyEvaluated,
    PolicyVersionPublished,
    RunCommanded,
    TrainStepCommitted,
)
from relax_events.history.run_log import RunLog
from relax_events.projections.step_rates import compute_rates
from relax_events.topics.names import COMMANDS, EVALUATIONS, METRICS, POLICY_VERSIONS, TRAIN_STEPS

MICROS = 1e6
TRACKS = {"train steps": 1, "policy versions": 2, "evaluations": 3, "commands": 4, "workers": 5}
"""Chrome's process ids, by track."""
METRICS_SHOWN = ("reward_mean", "staleness_mean", "loss")
SHOWN: dict[str, type[Event]] = {
    TRAIN_STEPS: TrainStepCommitted,
    POLICY_VERSIONS: PolicyVersionPublished,
    EVALUATIONS: PolicyEvaluated,
    COMMANDS: RunCommanded,
    **dict.fromkeys(METRICS.values(), MetricsReported),
}
Entry = dict[str, Any]


def read_timeline(log: RunLog) -> Iterator[Entry]:
    """Yield the trace's entries, one topic after the other; nothing of the log is held in
    memory.
    """
    yield from track_names()
    for entity, kind in ((entity, kind) for entity, kind in SHOWN.items() if log.plan.has(entity)):
        for record in log.read_control(entity, kind):
            yield from build_entries(record.event)


def track_names() -> Iterator[Entry]:
    """Yield the entries that name and order the tracks."""
    for name, pid in TRACKS.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": pid,
            "tid": 0,
            "args": {"sort_index": pid},
        }


def build_entries(event: Event) -> Iterator[Entry]:
    """Yield the entries of an event; times are in microseconds, as on the log."""
    if isinstance(event, TrainStepCommitted):
        yield from _step(event)
    elif isinstance(event, PolicyVersionPublished):
        yield _instant(
            "policy versions",
            f"version {event.policy_version}",
            at=event.published_at,
            args={"transports": event.transports},
        )
    elif isinstance(event, PolicyEvaluated):
        begin = event.evaluated_at - event.seconds * MICROS
        args = {"reward_mean": event.reward_mean, "num_prompts": event.num_prompts}
        yield _slice(
            "evaluations",
            f"version {event.policy_version} on {event.dataset}",
            begin=begin,
            micros=event.seconds * MICROS,
            args=args,
        )
    elif isinstance(event, RunCommanded):
        name = " ".join(
            word for word in (event.command.value, event.worker_id or event.role) if word
        )
        yield _instant(
            "commands",
            name,
            at=event.commanded_at,
            args={"reason": event.reason, **event.arguments},
        )
    elif isinstance(event, MetricsReported) and "busy_ratio" in event.values:
        yield _counter(
            "workers",
            event.worker_id,
            at=event.reported_at,
            values={"busy_ratio": event.values["busy_ratio"]},
        )


def _step(step: TrainStepCommitted) -> Iterator[Entry]:
    """Yield a step that ended at its commit, its phases inside it, and its metrics."""
    micros = (compute_rates([step]).step_seconds or 0.0) * MICROS
    begin = step.committed_at - micros
    args = {
        "policy_version": step.policy_version,
        "num_samples": len(step.sample_ids),
        **step.metrics,
    }
    yield _slice("train steps", f"step {step.train_step}", begin=begin, micros=micros, args=args)
    for phase, seconds in step.phase_seconds.items():
        yield _slice(
            "train steps",
            phase,
            begin=begin,
            micros=seconds * MICROS,
            args={"train_step": step.train_step},
        )
        begin += seconds * MICROS
    for name in METRICS_SHOWN:
        if name in step.metrics:
            yield _counter(
                "train steps", name, at=step.committed_at, values={name: step.metrics[name]}
            )


def _slice(track: str, name: str, *, begin: float, micros: float, args: Entry) -> Entry:
    return {
        "ph": "X",
        "name": name,
        "cat": track,
        "pid": TRACKS[track],
        "tid": 0,
        "ts": begin,
        "dur": micros,
        "args": args,
    }


def _instant(track: str, name: str, *, at: int, args: Entry) -> Entry:
    return {
        "ph": "i",
        "s": "p",
        "name": name,
        "cat": track,
        "pid": TRACKS[track],
        "tid": 0,
        "ts": at,
        "args": args,
    }


def _counter(track: str, name: str, *, at: int, values: dict[str, float]) -> Entry:
    return {
        "ph": "C",
        "name": name,
        "cat": track,
        "pid": TRACKS[track],
        "tid": 0,
        "ts": at,
        "args": values,
    }


def format_trace(entries: Iterable[str]) -> Iterator[str]:
    """Yield the text of a trace file, piece by piece, from entries as JSON."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for number, entry in enumerate(entries):
        yield f",\n{entry}" if number else entry
    yield "\n]}\n"
