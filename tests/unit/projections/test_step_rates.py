"""Rates of a run: worked out by hand, and the same on every page, line and report."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest

from relax_events.config import RunConfig
from relax_events.events.types import TrainStepCommitted
from relax_events.packages.dashboard.run_reader import RunReader
from relax_events.packages.dashboard.views import build_overview, build_summary
from relax_events.projections.ledger import Ledger
from relax_events.projections.run_state import RunState
from relax_events.projections.step_rates import compute_rates
from relax_events.reports.report_files import build_report
from relax_events.reports.terminal import ProgressDisplay
from tests.unit.run_events import run_config, train_step

NIGHT = 36_000.0
"""Seconds between the two sessions of the run."""


def make_steps() -> list[TrainStepCommitted]:
    """Return five slow steps of one session, and twenty of the next, ten hours later: of half a
    second and 100 tokens, the last one of a whole second and 800 tokens.
    """
    slow = {"wait": 9.0, "update": 1.0}
    steps = [
        replace(train_step(step, at_seconds=10.0 * step), phase_seconds=slow) for step in range(5)
    ]
    steps += [train_step(step, at_seconds=NIGHT + step) for step in range(5, 24)]
    last = train_step(24, at_seconds=NIGHT + 24, num_tokens=800.0)
    return [*steps, replace(last, phase_seconds={"wait": 0.875, "update": 0.125})]


def test_rates_are_those_of_the_newest_twenty_steps() -> None:
    rates = compute_rates(make_steps())  # 19 steps of 0.5 s and one of 1 s: 10.5 s
    assert rates.step_seconds == pytest.approx(0.525)
    assert rates.tokens_per_second == pytest.approx((19 * 100 + 800) / 10.5)
    assert rates.samples_per_second == pytest.approx(40 / 10.5)
    assert rates.phase_ratios == pytest.approx({"wait": 8.0 / 10.5, "update": 2.5 / 10.5})


def test_rates_are_unknown_without_time_or_tokens() -> None:
    nothing = compute_rates([])
    assert (nothing.step_seconds, nothing.tokens_per_second, nothing.phase_ratios) == (
        None,
        None,
        {},
    )
    step = train_step(0, at_seconds=1.0)
    assert compute_rates([replace(step, phase_seconds={})]).samples_per_second is None
    del step.metrics["num_tokens"]
    assert compute_rates([step]).tokens_per_second is None
    assert compute_rates([step]).samples_per_second == 4.0


def read_lines(config: RunConfig, state: RunState) -> str:
    """Return what `relax run` writes into a log."""
    stream = StringIO()
    with ProgressDisplay(config, tty=False, stream=stream) as display:
        display.update(state, lag={}, alive={})
    return stream.getvalue()


def test_page_terminal_status_and_report_show_the_same_rates() -> None:
    """A page that was opened after the night had counted it as one step."""
    config, steps = run_config(num_steps=45), make_steps()
    reader, ledger = RunReader(config), Ledger(max_staleness=2)
    for step in steps:
        reader.fold.apply(step)
    head, curves = build_summary(reader), build_overview(reader)["columns"]
    report = build_report(
        config,
        reader.fold,
        ledger,
        wall_seconds=30.0,
        succeeded=True,
        reason="done",
        ended_at=int((NIGHT + 24) * 1e6),
    )
    tokens_per_second, samples_per_second = 2700 / 10.5, 40 / 10.5
    assert head["tokens_per_second"] == pytest.approx(tokens_per_second)
    assert head["samples_per_second"] == pytest.approx(samples_per_second)
    assert head["remaining_seconds"] == pytest.approx(20 * 0.525)
    assert report["tokens_per_second"] == pytest.approx(tokens_per_second)
    assert report["samples_per_second"] == pytest.approx(samples_per_second)
    assert "tokens/s 257" in read_lines(config, reader.fold)
    by_step = [10.0] * 5 + [0.5] * 19 + [1.0]
    assert curves["step_seconds"] == report["curves"]["step_seconds"] == by_step
    tokens = [10.0] * 5 + [200.0] * 19 + [800.0]
    assert curves["tokens_per_second"] == report["curves"]["tokens_per_second"] == tokens
    assert report["train_seconds"] == 60.5
