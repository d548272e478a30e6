"""Each illness of a run is its verdict, by a series of steps that shows it, and healthy runs are
called learning or learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_samples import ended
from run_events import make_heartbeat, train_step
from small_settings import small_run

from relax_events.config import RunConfig
from relax_events.events.parts import Outcome, WorkerState
from relax_events.events.types import MetricsReported, TrainStepCommitted
from relax_events.packages.dashboard.registry import find_runbook
from relax_events.projections.alarm_texts import TEXTS
from relax_events.projections.run_state import RunState
from relax_events.projections.run_view import read_alarm_settings
from relax_events.projections.verdict import Verdict, decide_verdict
from relax_events.staleness import describe_left

ROOT = Path(__file__).parents[3]
RUNS = json.loads((ROOT / "tests" / "data" / "healthy_runs.json").read_text())
"""Curves of real runs by name, as `report.json` has them; each with its `max_staleness`."""
Curve = Callable[[float], float]
ENVIRONMENT = {"function": "lookup", "max_turns": 2}
WORKING = {"wait": 0.2, "forward_backward": 0.8}


def build_config(**run: Any) -> RunConfig:
    """Return a run of many steps."""
    tree = {"id": "ill", "num_steps": 400, "max_staleness": 2} | run
    config: RunConfig = small_run(
        {"run": tree, "model": {"path": "model"}, "data": {"source": "jsonl:rows"}}
    )
    return config


def make_steps(
    count: int = 60,
    *,
    phases: Mapping[str, float] | None = None,
    **curves: Any,
) -> list[TrainStepCommitted]:
    """Return steps of a healthy run in which these metrics follow these curves.

    Args:
        count: Number of steps.
        phases: Seconds of each.
        curves: By metric, as a number, or a function of the share of the run that is over, 0 to
            1; each value has a noise of a hundredth.
    """
    noise = np.random.default_rng(0)
    healthy: dict[str, Curve | float] = {
        "reward_mean": lambda x: 0.2 + 0.4 * x,
        "reward_std": 0.45,
        "equal_reward_ratio": 0.2,
        "entropy": lambda x: 0.8 - 0.3 * x,
        "kl_estimate": lambda x: 0.02 * x,
        "grad_norm": 0.5,
        "clip_fraction": 0.02,
        "mismatch_kl": 0.001,
        "effective_sample_ratio": 0.98,
        "learning_rate": 1e-6,
        "staleness_mean": 1.0,
        "completion_tokens_mean": 300.0,
        "samples_ended/finished": 95.0,
        "samples_ended/truncated": 5.0,
    }
    steps = []
    for step in range(count):
        metrics = {
            name: float(curve(step / count) if callable(curve) else curve)
            * (1 + 0.01 * noise.standard_normal())
            for name, curve in (healthy | curves).items()
        }
        made = train_step(step, at_seconds=1000 + step, **metrics)
        steps.append(replace(made, phase_seconds=dict(phases or WORKING)))
    return steps


def decide(
    steps: list[TrainStepCommitted], *others: Any, config: RunConfig | None = None
) -> Verdict:
    """Return the verdict a second after the last step."""
    state = RunState()
    for event in [*steps, *others]:
        state.apply(event)
    now = (steps[-1].committed_at if steps else 1_000_000_000) + 1_000_000
    return decide_verdict(read_alarm_settings(config or build_config()), state, now=now)


def report(worker_id: str, **values: float) -> MetricsReported:
    """Return a worker's report at the end of the steps."""
    return MetricsReported(
        worker_id=worker_id,
        role=worker_id.rpartition("-")[0],
        values=values,
        reported_at=1_059_000_000,
    )


def end_groups(**counts: int) -> list[Any]:
    """Return ends of prompt groups by outcome."""
    names = [name for name, count in counts.items() for _ in range(count)]
    return [
        replace(ended(f"{number:06d}-0000-0", Outcome(name))) for number, name in enumerate(names)
    ]


FLAT = 0.4
WAITING = {"wait": 0.75, "forward_backward": 0.25}
NEVER_WAITING = {"wait": 0.01, "forward_backward": 0.99}
ILLNESSES: dict[str, tuple[str, list[TrainStepCommitted], list[Any]]] = {
    "entropy collapse": (
        "entropy_collapsed",
        make_steps(reward_mean=FLAT, entropy=lambda x: 0.8 * 0.5 ** (10 * x)),
        [],
    ),
    "length explosion": (
        "length_growing",
        make_steps(
            **{
                "reward_mean": FLAT,
                "completion_tokens_mean": lambda x: 300 * 4**x,
                "samples_ended/truncated": lambda x: 30 * x,
            }
        ),
        [],
    ),
    "all-equal groups": ("no_signal", make_steps(reward_mean=0.02, equal_reward_ratio=0.9), []),
    "filtered groups": (
        "no_signal",
        make_steps(reward_mean=0.02),
        end_groups(trained=10, filtered=90),
    ),
    "truncation": (
        "truncated",
        make_steps(**{"samples_ended/truncated": 60.0}),
        [],
    ),
    "expired samples": ("samples_expired", make_steps(), end_groups(trained=80, expired=20)),
    "stale samples": (
        "samples_stale",
        make_steps(staleness_mean=2.0, effective_sample_ratio=lambda x: 0.9 - 0.7 * x),
        [],
    ),
    "starved trainer": (
        "trainer_starved",
        make_steps(phases=WAITING),
        [report("rollout-0", generating_ratio=0.99), report("reward-0", busy_ratio=0.3)],
    ),
    "slow reward": (
        "slow_reward",
        make_steps(phases=WAITING),
        [report("rollout-0", generating_ratio=0.4), report("reward-0", busy_ratio=0.97)],
    ),
    "starved rollout": (
        "rollout_starved",
        make_steps(phases=NEVER_WAITING),
        [report("rollout-0", generating_ratio=0.2), report("reward-0", busy_ratio=0.1)],
    ),
    "memory of the trainer": ("memory_short", make_steps(prompt_groups_too_large=1.0), []),
    "mismatch": (
        "engine_mismatch",
        make_steps(staleness_mean=0.0, mismatch_kl=lambda x: 0.001 + 0.1 * x),
        [],
    ),
    "learning rate too high": (
        "learning_rate_high",
        make_steps(
            reward_mean=lambda x: 0.2 + 0.8 * x if x < 0.6 else 0.3,
            grad_norm=lambda x: 0.5 if x < 0.55 else 9.0,
            clip_fraction=lambda x: 0.02 if x < 0.55 else 0.4,
        ),
        [],
    ),
    "collapse": (
        "reward_collapsed",
        make_steps(reward_mean=lambda x: 0.2 + 0.8 * x if x < 0.6 else 0.1),
        [],
    ),
    "stuck": ("reward_flat", make_steps(reward_mean=FLAT), []),
}


@pytest.mark.parametrize("illness", ILLNESSES)
def test_verdict_names_each_illness(illness: str) -> None:
    name, steps, others = ILLNESSES[illness]
    verdict = decide(steps, *others)
    assert verdict.name == name
    assert not verdict.is_good
    assert re.search(r"\d", verdict.text)
    assert verdict.remedy
    assert find_runbook(verdict.runbook)
    assert "{" not in verdict.line


def test_dead_sessions_of_programs_are_named_while_workers_live() -> None:
    config = small_run(
        {
            "run": {"id": "ill", "num_steps": 400, "max_staleness": 2},
            "model": {"path": "model"},
            "data": {"source": "jsonl:rows"},
            "environment": {"command": ["program"]},
        }
    )
    steps = make_steps()
    alive = [make_heartbeat(f"{role}-0", at_seconds=1059) for role in config.roles()]

    def name(busy_seconds: float) -> str:
        heartbeats = [
            replace(one, busy_since=one.sent_at - int(busy_seconds * 1e6))
            if one.role == "rollout"
            else one
            for one in alive
        ]
        return decide(steps, *heartbeats, config=config).name

    assert name(30) == "reward_rises"
    assert name(90) == "sessions_dead"


def test_spares_that_no_step_needed_are_no_illness() -> None:
    ends = end_groups(trained=80, expired=20)
    spares = [
        replace(end, reason=describe_left(7)) if end.outcome is Outcome.EXPIRED else end
        for end in ends
    ]
    steps = make_steps(reward_mean=lambda x: 0.2 + 0.6 * x)
    assert decide(steps, *ends).name == "samples_expired"
    assert decide(steps, *spares).name == "reward_rises"
    state = RunState()
    for end in [*spares, *spares]:
        state.apply(end)
    assert state.outcomes == {"trained": 80, "expired": 20}


@pytest.mark.parametrize("run", RUNS)
def test_healthy_runs_have_no_illness_at_any_step(run: str) -> None:
    """Runs that learned, recorded by real processes: async, sync, and trained again from the log."""
    curves = RUNS[run]["curves"]
    phases = curves.get("phase_seconds", {})
    config = build_config(max_staleness=RUNS[run]["max_staleness"])
    state, names = RunState(), []
    for at, step in enumerate(curves["train_step"]):
        metrics = {
            name: values[at]
            for name, values in curves.items()
            if name not in ("train_step", "phase_seconds") and values[at] is not None
        }
        made = train_step(step, at_seconds=1000 + step, **metrics)
        made = replace(made, phase_seconds={name: values[at] for name, values in phases.items()})
        state.apply(made)
        names.append(decide_verdict(read_alarm_settings(config), state, now=made.committed_at + 1))
    assert {verdict.state for verdict in names} <= {"starting", "learning", "learned"}, [
        verdict.line for verdict in names if not verdict.is_good
    ][:3]
    assert "learning" in {verdict.state for verdict in names}


def test_role_that_never_had_a_worker_is_missing_once_steps_are_trained() -> None:
    alive = make_heartbeat("prompter-0", at_seconds=1000.5)
    assert decide([], alive).name == "few_steps"
    assert decide(make_steps(1), alive).name == "role_without_worker"


def test_workers_that_drain_at_the_end_of_a_session_are_not_missing() -> None:
    steps = make_steps()
    stopped = [
        make_heartbeat(f"{role}-0", at_seconds=1059, state=WorkerState.STOPPED)
        for role in ("controller", "prompter")
    ]
    alive = [
        make_heartbeat(f"{role}-0", at_seconds=1059)
        for role in build_config().roles()
        if role not in ("controller", "prompter")
    ]
    draining = replace(alive[-1], state=WorkerState.DRAINING)
    controller_alone = [stopped[0], make_heartbeat("prompter-0", at_seconds=1059)]
    assert decide(steps, *alive, *controller_alone).name == "role_without_worker"
    assert decide(steps, *alive, *controller_alone, draining).name == "reward_rises"
    assert decide(steps, *alive, *stopped).name == "reward_rises"


@pytest.mark.parametrize("count", [0, 9])
def test_few_steps_have_no_verdict(count: int) -> None:
    steps = make_steps(count, reward_mean=0.0, equal_reward_ratio=1.0)
    assert decide(steps).state == "starting"


@pytest.mark.parametrize(
    ("name", "curves"),
    [
        ("reward_rises", {}),
        ("reward_level", {"reward_mean": 0.97, "reward_std": 0.15, "equal_reward_ratio": 0.9}),
        ("no_rise_yet", {"reward_mean": 0.4, "count": 30}),
        ("reward_rises", {"completion_tokens_mean": lambda x: 300 * 4**x}),
        ("reward_rises", {"entropy": 0.01}),
    ],
)
def test_healthy_series_are_judged_by_their_reward(name: str, curves: dict[str, Any]) -> None:
    assert decide(make_steps(**curves)).name == name


def test_run_without_rewards_is_judged_by_its_loss() -> None:
    def build(loss: Curve) -> str:
        steps = make_steps(loss=loss)
        for step in steps:
            del step.metrics["reward_mean"]
        return decide(steps).name

    assert build(lambda x: 2.0 - x) == "loss_falls"
    assert build(lambda _: 0.7) == "loss_level"


def test_sync_run_waits_for_its_samples_by_design() -> None:
    steps = make_steps(phases=WAITING)
    assert decide(steps, config=build_config(max_staleness=0, mode="sync")).name == "reward_rises"


def test_worker_without_heartbeat_comes_before_what_steps_show() -> None:
    steps = make_steps(equal_reward_ratio=0.9, reward_mean=0.02)
    silent = make_heartbeat("trainer-0", at_seconds=900)
    assert decide(steps, silent).name == "worker_silent"


def test_every_text_is_in_the_table_of_the_page() -> None:
    """The page formats the numbers by its own language; its English is that of the terminal."""
    table = (
        ROOT / "relax_events" / "packages" / "dashboard" / "static" / "js" / "strings.js"
    ).read_text()
    rows = dict(
        re.findall(r'^  ((?:alarm|remedy)_\w+): \["(.*)", "[^"]+"\],$', table, re.MULTILINE)
    )
    english = {f"alarm_{name}": text.text for name, text in TEXTS.items()}
    english |= {f"remedy_{name}": text.remedy for name, text in TEXTS.items() if text.remedy}
    assert rows == english
