"""A run's trace follows Chrome's format, and has the right times."""

from __future__ import annotations

import json
from typing import Any

import orjson

from relax_events.events.parts import Command, ObjectRef
from relax_events.events.types import (
    Event,
    MetricsReported,
    PolicyEvaluated,
    PolicyVersionPublished,
    RunCommanded,
)
from relax_events.history.runs.timeline import TRACKS, build_entries, format_trace, track_names
from tests.unit.run_events import train_step

SECOND = 10**6
NEEDED = {"X": {"ts", "dur"}, "i": {"ts", "s"}, "C": {"ts", "args"}, "M": {"args"}}
EVENTS: list[Event] = [
    train_step(0, at_seconds=10),
    train_step(1, at_seconds=11),
    PolicyVersionPublished(policy_version=1, artifact=ObjectRef("file:///w", b"d" * 32, 1), transports=["store"], start_offsets=[],
                           published_at=10 * SECOND),
    PolicyEvaluated(policy_version=1, dataset="held", num_prompts=3, samples_per_prompt=1, reward_mean=0.5, weights_digest=b"d", seconds=2.5,
                    evaluated_at=14 * SECOND),
    RunCommanded(command=Command.RESTART, role="rollout", worker_id="rollout-0", reason="is \"stuck\"", commanded_at=12 * SECOND),
    MetricsReported(worker_id="reward-0", role="reward", values={"busy_ratio": 0.25, "records_per_second": 9.0}, reported_at=13 * SECOND),
]  # fmt: skip


def trace(events: list[Event]) -> list[dict[str, Any]]:
    entries = [*track_names(), *(entry for event in events for entry in build_entries(event))]
    whole = json.loads("".join(format_trace(orjson.dumps(entry).decode() for entry in entries)))
    assert set(whole) == {"displayTimeUnit", "traceEvents"}
    found: list[dict[str, Any]] = whole["traceEvents"]
    return found


def test_trace_follows_the_trace_event_format() -> None:
    entries = trace(EVENTS)
    for entry in entries:
        assert {"ph", "name", "pid", "tid"} | NEEDED[entry["ph"]] <= set(entry)
        assert entry.get("dur", 0) >= 0
    named = {
        entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"
    }
    assert {entry["pid"] for entry in entries} == set(named) == set(TRACKS.values())
    slices = sorted(
        (entry["ts"], -entry["dur"])
        for entry in entries
        if entry["ph"] == "X" and entry["pid"] == TRACKS["train steps"]
    )
    open_ends: list[float] = []
    for begin, negative in slices:  # slices of a thread are nested or adjacent
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or begin - negative <= open_ends[-1]
        open_ends.append(begin - negative)


def test_trace_entries_have_the_times_of_their_events() -> None:
    entries = {entry["name"]: entry for entry in trace(EVENTS) if entry["ph"] != "M"}
    step, wait, update = entries["step 1"], entries["wait"], entries["update"]
    assert (step["ts"], step["dur"]) == (10.5 * SECOND, 0.5 * SECOND)
    assert (wait["ts"], wait["dur"], update["ts"], update["dur"]) == (
        10.5 * SECOND,
        0.375 * SECOND,
        10.875 * SECOND,
        0.125 * SECOND,
    )
    assert (step["args"]["reward_mean"], entries["reward_mean"]["args"]) == (
        0.5,
        {"reward_mean": 0.5},
    )
    assert (entries["version 1 on held"]["ts"], entries["version 1 on held"]["dur"]) == (
        11.5 * SECOND,
        2.5 * SECOND,
    )
    assert (entries["restart rollout-0"]["ts"], entries["restart rollout-0"]["args"]["reason"]) == (
        12 * SECOND,
        'is "stuck"',
    )
    assert entries["reward-0"]["args"] == {"busy_ratio": 0.25}


def test_empty_trace_is_valid() -> None:
    assert json.loads("".join(format_trace([])))["traceEvents"] == []
