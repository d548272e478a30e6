"""The progress display of a run: metrics, workers, the live panel, and log lines."""

import math
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from relax_events.events.parts import Command, Outcome, WorkerState
from relax_events.events.types import MetricsReported, RunCommanded
from relax_events.projections.run_state import RunState
from relax_events.projections.run_view import RunView, WorkerRow, WorkerTable
from relax_events.reports.terminal import ProgressDisplay, format_clock
from relax_events.reports.terminal_panel import (
    ProgressPanel,
    draw_phases,
    select_workers,
    sparkline,
)
from tests.unit.run_events import make_heartbeat, run_config, train_step

LAG = {"reward": {0: 1, 1: 2}, "trainer": {1: 9}}


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def state_of(*steps: float, since: float = 100.0) -> RunState:
    """Return a state with steps committed so many seconds after `since`."""
    state = RunState(policy_version=len(steps))
    for index, seconds in enumerate(steps):
        state.apply(train_step(index, at_seconds=since + seconds, reward_mean=index / 10))
    return state


def compute_view(state: RunState, *, num_steps: int = 4) -> RunView:
    return RunView.from_state(run_config(num_steps=num_steps), state, now=0, lag=LAG)


def test_run_view_are_computed_from_the_steps() -> None:
    status = compute_view(state_of(1.0, 2.0, 5.0), num_steps=7)
    assert (status.step, status.num_steps, status.policy_version, status.num_lagging) == (
        3,
        7,
        3,
        12,
    )
    assert (status.reward, status.loss, status.kl_estimate) == (0.2, 0.25, 0.003)
    assert status.rewards == (0.0, 0.1, 0.2)
    assert (status.staleness_mean, status.staleness_max) == (0.5, 1)
    assert status.tokens_per_second == pytest.approx(200.0)  # 300 tokens in 1.5 s
    assert status.samples_per_second == pytest.approx(4.0)
    assert status.remaining_seconds == pytest.approx(2.0)  # four steps of half a second


def test_run_view_show_only_learning_metrics_of_the_step() -> None:
    state = state_of(1.0)
    assert list(compute_view(state).learning_metrics) == ["reward", "loss", "kl"]
    for name in ("reward_mean", "kl_estimate"):
        del state.steps[0].metrics[name]
    assert compute_view(state).learning_metrics == {"loss": 0.25}
    assert list(compute_view(state_of()).learning_metrics) == ["reward", "loss", "kl"]


def test_run_view_are_none_before_the_first_step_or_without_reports() -> None:
    empty = RunView.from_state(run_config(), RunState(), now=0)
    assert (
        empty.step,
        empty.reward,
        empty.staleness_max,
        empty.tokens_per_second,
        empty.remaining_seconds,
    ) == (0, None, None, None, None)
    state = state_of(1.0)
    state.steps[0].metrics.clear()
    bare = compute_view(state)
    assert (bare.reward, bare.loss, bare.rewards, bare.tokens_per_second) == (None, None, (), None)


def test_workers_of_an_ended_run_wait_for_nothing() -> None:
    table, state = WorkerTable(run_config(), since_micros=int(50e6)), RunState()
    assert {row.state for row in table.rows(state, alive={}, now_micros=0)} == {"waiting"}
    state.apply(RunCommanded(command=Command.STOP, reason="over", succeeded=True))
    assert {row.state for row in table.rows(state, alive={}, now_micros=0)} == {"ended"}


def test_only_workers_of_this_host_are_down_when_their_processes_are_gone() -> None:
    hosts = run_config().hosts.model_copy(update={"addresses": ("a", "b")})
    config = run_config().model_copy(update={"hosts": hosts})
    table, state = WorkerTable(config, since_micros=0), RunState()
    for worker_id in ("rollout-0", "rollout-1"):
        state.apply(make_heartbeat(worker_id, at_seconds=99.0))
    table.rows(state, alive={"rollout-0": True}, now_micros=int(100e6))
    rows = table.rows(state, alive={}, now_micros=int(100e6))
    states = {row.worker_id: row.state for row in rows}
    assert (states["rollout-0"], states["rollout-1"]) == ("down", "working")
    assert states["prompter-0"] == "waiting"


def test_worker_table_distinguishes_states() -> None:
    table = WorkerTable(run_config(), since_micros=int(50e6))
    state = RunState()
    for worker_id, at, kind in (
        ("rollout-0", 99.5, WorkerState.WORKING),
        ("reward-0", 60.0, WorkerState.WORKING),
        ("trainer-0", 99.0, WorkerState.WORKING),
        ("trainer-1", 99.0, WorkerState.IDLE),
        ("controller-0", 99.0, WorkerState.STOPPED),
        ("prompter-0", 10.0, WorkerState.WORKING),
        ("advantage-3", 10.0, WorkerState.WORKING),
    ):
        state.apply(make_heartbeat(worker_id, at_seconds=at, state=kind))
    state.apply(
        MetricsReported(worker_id="rollout-0", role="rollout", values={"records_per_second": 12.5})
    )
    alive = dict.fromkeys(["rollout-0", "reward-0", "prompter-0", "rollout-9"], True)
    rows = {row.worker_id: row for row in table.rows(state, alive=alive, now_micros=int(100e6))}
    assert {name: row.state for name, row in rows.items()} == {
        "controller-0": "stopped",
        "metrics-0": "waiting",
        "prompter-0": "starting",  # its heartbeat is of an earlier session
        "rollout-0": "working",
        "rollout-9": "starting",
        "reward-0": "silent",
        "advantage-0": "waiting",
        "trainer-0": "down",
        "trainer-1": "idle",  # a rank: this process did not start it itself
    }
    assert list(rows) == [
        *(
            "controller-0",
            "metrics-0",
            "prompter-0",
            "rollout-0",
            "rollout-9",
            "reward-0",
            "advantage-0",
        ),
        *("trainer-0", "trainer-1"),
    ]
    reported = rows["rollout-0"]
    assert (
        reported.num_processed,
        reported.num_in_flight,
        reported.policy_version,
        reported.records_per_second,
    ) == (7, 3, 2, 12.5)
    assert reported.heartbeat_age_seconds == pytest.approx(0.5)
    assert [name for name, row in rows.items() if not row.is_healthy] == ["reward-0", "trainer-0"]


def test_worker_table_counts_a_restart_when_another_process_sends_heartbeats() -> None:
    table, state = WorkerTable(run_config(), since_micros=0), RunState()
    counts = []
    for pid in (1, 1, 2, 3):
        state.apply(make_heartbeat("rollout-0", at_seconds=1, pid=pid))
        rows = table.rows(state, alive={"rollout-0": True}, now_micros=int(1e6))
        counts.append(next(row.num_restarts for row in rows if row.worker_id == "rollout-0"))
    assert counts == [0, 0, 1, 2]


ENGINE = {
    "decoding_samples": 12.0,
    "waiting_samples": 3.0,
    "capacity_samples": 64.0,
    "tokens_per_second": 812.4,
    "generating_ratio": 0.75,
    "loading_ratio": 0.02,
    "cached_ratio": 0.875,
    "recomputed_tokens": 40.0,
}


def sampled(
    width: int,
    height: int,
    *,
    num_workers: int = 4,
    num_slots: int = 4,
    encoding: str = "utf-8",
    engine: Mapping[str, float] = {},
    phases: Mapping[str, float] = {},
    address: str = "",
) -> list[str]:
    """Return the panel's lines in a window of this size."""
    workers = [
        WorkerRow(
            worker_id=f"rollout-{index}",
            state="down" if index == 40 else "working",
            is_healthy=index != 40,
            engine=engine if index == 1 else {},
        )
        for index in range(num_workers)
    ]
    panel = ProgressPanel(
        view=replace(compute_view(state_of(1.0, 2.0)), phase_ratios=phases, workers=workers),
        elapsed_seconds=61,
        num_slots=num_slots,
        address=address,
    )
    stream = StringIO()
    console = Console(
        file=stream,
        width=width,
        height=height,
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
    )
    options = console.options.update()
    options.encoding = encoding
    return [
        "".join(segment.text for segment in line).rstrip()
        for line in console.render_lines(panel, options, pad=False)
    ]


def test_panel_shows_metrics_workers_and_lag_in_a_default_window() -> None:
    lines = sampled(100, 30)
    text = "\n".join(lines)
    for part in (
        "relax run shown",
        "step 2/4",
        "50%",
        "reward 0.1",
        "loss 0.25",
        "kl 0.003",
        "policy version 2",
        "max 1",
        "tokens/s 200",
        "0:01:01",
    ):
        assert part in text
    assert next(line for line in lines if "lag in records" in line).split() == [
        "lag",
        "in",
        "records",
        "slot",
        "0",
        "slot",
        "1",
        "slot",
        "2",
        "*v2",
        "slot",
        "3",
    ]
    assert next(line for line in lines if line.strip().startswith("trainer")).split() == [
        "trainer",
        "-",
        "9",
        "-",
        "-",
    ]
    assert len(lines) <= 30


@pytest.mark.parametrize(
    ("width", "cells"),
    [
        (44, ["rollout-1", "12/64", "812"]),
        (80, ["rollout-1", "12/64", "812", "75%", "2%", "88%"]),
        (100, ["rollout-1", "12/64", "3", "812", "75%", "2%", "88%", "40"]),
    ],
)
def test_panel_shows_engine_metrics(width: int, cells: list[str]) -> None:
    lines = sampled(width, 30, engine=ENGINE)
    head = next(
        head_index for head_index, line in enumerate(lines) if line.strip().startswith("engine of")
    )
    assert [line.split() for line in lines[head:] if "rollout-1" in line] == [cells]
    low = "\n".join(sampled(width, 19, engine=ENGINE))
    assert "engine of" not in low  # where rows are few, workers and lag come first
    assert "lag in records" in low


def test_worker_table_takes_engine_metrics_from_their_reports() -> None:
    state = RunState()
    for worker_id in ("rollout-0", "reward-0"):
        state.apply(make_heartbeat(worker_id, at_seconds=1))
    state.apply(
        MetricsReported(
            worker_id="rollout-0", role="rollout", values=ENGINE | {"records_per_second": 1.0}
        )
    )
    state.apply(
        MetricsReported(worker_id="reward-0", role="reward", values={"records_per_second": 1.0})
    )
    rows = WorkerTable(run_config(), since_micros=0).rows(state, alive={}, now_micros=int(1e6))
    assert {row.worker_id: row.engine.get("tokens_per_second") for row in rows if row.engine} == {
        "rollout-0": 812.4
    }


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (44, ["worker", "state", "processed"]),
        (80, ["worker", "state", "version", "processed", "heartbeat", "restarts"]),
        (
            100,
            [
                "worker",
                "state",
                "version",
                "processed",
                "in",
                "flight",
                "per",
                "s",
                "heartbeat",
                "restarts",
            ],
        ),
    ],
)
def test_panel_leaves_columns_out_where_the_window_is_narrow(
    width: int, columns: list[str]
) -> None:
    assert (
        next(line for line in sampled(width, 30) if line.strip().startswith("worker")).split()
        == columns
    )


@pytest.mark.parametrize("width", [40, 72, 100])
@pytest.mark.parametrize("height", [8, 20, 30])
@pytest.mark.parametrize("num_slots", [2, 30])
def test_panel_fits_its_window(width: int, height: int, num_slots: int) -> None:
    lines = sampled(width, height, num_workers=50, num_slots=num_slots)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any("step 2/4" in line for line in lines)


def test_panel_shows_unhealthy_workers_first_when_not_all_fit() -> None:
    text = "\n".join(sampled(100, 30, num_workers=50))
    assert "rollout-40" in text
    assert "rollout-39" not in text
    assert "more" in text


def test_panel_uses_ascii_on_an_ascii_terminal() -> None:
    assert "\n".join(sampled(100, 30, encoding="ascii")).isascii()


def test_select_workers_counts_hidden_rows() -> None:
    rows = [
        WorkerRow(worker_id=f"reward-{index}", state="idle", is_healthy=True) for index in range(10)
    ]
    shown, num_hidden = select_workers(rows, 4)
    assert ([row.worker_id for row in shown], num_hidden) == (
        ["reward-0", "reward-1", "reward-2"],
        7,
    )
    assert select_workers(rows, 10) == (rows, 0)


def test_sparkline_spans_the_values() -> None:
    assert sparkline([0.0, 0.5, 1.0], blocks="01234567") == "047"
    assert sparkline([3.0, 3.0], blocks="01234567") == "44"
    assert sparkline([]) == ""


def test_clock_writes_hours_minutes_seconds() -> None:
    assert [format_clock(None), format_clock(0.4), format_clock(3661), format_clock(360_000)] == [
        "-",
        "0:00:00",
        "1:01:01",
        "100:00:00",
    ]


def test_progress_lines_appear_for_the_first_and_last_step_and_rarely_between() -> None:
    stream, hand = StringIO(), Hand()
    state = RunState()
    shown_at = []
    with ProgressDisplay(run_config(num_steps=100), stream=stream, clock=hand) as display:
        for index in range(25):
            state.apply(train_step(index, at_seconds=time.time() + index))
            hand.seconds += 0.5
            before = stream.tell()
            display.update(state, lag=LAG, alive={})
            if stream.tell() > before:
                shown_at.append(index + 1)
    lines = stream.getvalue().splitlines()
    verdict = lines.pop(3)  # said once, when it holds
    assert re.match(r"\d\d:\d\d:\d\d  slow: The trainer waits for samples 75% ", verdict)
    assert shown_at == [1, 11, 21]  # five seconds, or a tenth of the run
    rates = r"tokens/s \d+  \S+ s a step  ETA \d:\d\d:\d\d \(.*\d\d:\d\d\)"
    learned = "reward 0.5  loss 0.25  kl 0.003  staleness 0.5 max 1"
    assert re.match(rf"\d\d:\d\d:\d\d  step 1/100  {learned}  {rates}  lag 12$", lines[0])
    assert re.match(r"\d\d:\d\d:\d\d  step 25/100  ", lines[-1])
    assert len(lines) == 4


def test_progress_lines_are_two_seconds_apart_in_a_fast_run() -> None:
    stream, hand = StringIO(), Hand()
    state = RunState()
    with ProgressDisplay(run_config(num_steps=12), stream=stream, clock=hand) as display:
        for index in range(12):
            state.apply(train_step(index, at_seconds=time.time() + index))
            hand.seconds += 0.5
            display.update(state, lag={}, alive={})
    assert "ETA" not in stream.getvalue().splitlines()[-1], "the goal is reached"
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == [
        "1/12",
        "5/12",
        "9/12",
        "12/12",
    ]


def test_progress_lines_report_no_step_yet_and_unhealthy_workers() -> None:
    stream, hand = StringIO(), Hand()
    state = RunState()
    with ProgressDisplay(run_config(), stream=stream, clock=hand) as display:
        state.apply(make_heartbeat("rollout-0", at_seconds=time.time() + 5))
        display.update(state, lag={}, alive={})
        assert stream.getvalue() == ""
        hand.seconds += 31
        display.update(state, lag={}, alive={})
        display.update(state, lag={}, alive={})
    _, _, line = stream.getvalue().partition("  ")
    assert line == "step 0/4  no train step yet  workers 1/7 ready  lag 0  rollout-0 down\n"


def test_display_handles_missing_and_non_finite_metrics() -> None:
    state = state_of(1.0, 2.0)
    state.steps[0].metrics.clear()
    state.steps[1].metrics["reward_mean"] = math.nan
    for tty in (True, False):
        stream = StringIO()
        with ProgressDisplay(run_config(), tty=tty, stream=stream) as display:
            display.update(state, lag={}, alive={})
        assert "step 2/4" in stream.getvalue()


def test_display_draws_a_panel_on_a_terminal_and_restores_the_cursor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    stream = StringIO()
    state = state_of(1.0)
    state.outcomes[Outcome.TRAINED.value] = 5
    with ProgressDisplay(run_config(), tty=True, stream=stream) as display:
        display.print_line("broker started [at] 127.0.0.1")
        assert stream.getvalue() == "broker started [at] 127.0.0.1\n"
        display.update(state, lag=LAG, alive={"rollout-0": True})
        display.print_line("a worker died")
        state.apply(train_step(1, at_seconds=102.0))
    text = stream.getvalue()
    assert "a worker died" in text
    assert "trained 5" in text
    assert "step 1/4" in text
    assert "step 2/4" in text  # closing shows what came last
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_display_restores_the_terminal_when_the_run_fails() -> None:
    stream = StringIO()

    def fail() -> None:
        with ProgressDisplay(run_config(), tty=True, stream=stream) as display:
            display.update(RunState(), lag={}, alive={})
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert "\x1b[?25h" in stream.getvalue()


def test_display_writes_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(run_config()) as display:
        display.print_line("hello")
    assert capsys.readouterr().err == "hello\n"


def test_panel_draws_phases_and_the_address_of_the_page() -> None:
    phases = {"wait": 0.25, "forward_backward": 0.5, "commit": 0.25}
    lines = sampled(100, 24, phases=phases, address="http://127.0.0.1:8321/?run=shown")
    bar = next(line for line in lines if "wait 25%" in line)
    assert "forward+backward 50%" in bar
    assert bar.count("\u2588") == 40
    assert any("http://127.0.0.1:8321/?run=shown" in line for line in lines)
    assert len(lines) <= 24


def test_phases_keep_their_order_and_lengths_in_a_narrow_ascii_window() -> None:
    line = draw_phases({"wait": 0.5, "commit": 0.25, "update": 0.25}, width=30, ascii_only=True)
    bar, _, legend = line.plain.partition("  ")
    assert bar == "." * round(len(bar) / 2) + "#" * round(len(bar) / 4) + "=" * round(len(bar) / 4)
    assert legend.startswith("wait 50%")
    assert line.cell_len <= 30
