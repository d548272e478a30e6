"""What pages show of a run's state: curves, shares, alarms, idle time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from event_samples import ended
from run_events import make_heartbeat, run_config, train_step

from relax_events.errors import ConfigError
from relax_events.events.parts import Command, Outcome
from relax_events.events.types import MetricsReported, RunCommanded
from relax_events.packages.dashboard.app import parse_query
from relax_events.packages.dashboard.details import rounds
from relax_events.packages.dashboard.run_fold import RunFold
from relax_events.packages.dashboard.run_reader import ReaderStatus
from relax_events.packages.dashboard.sample_columns import NewSample, SampleTable, encode_group
from relax_events.packages.dashboard.score_join import read_source
from relax_events.packages.dashboard.views import group_curves, list_marks, thin
from relax_events.projections.alarms import find_alarms
from relax_events.projections.base import STOPPED_BY
from relax_events.projections.run_status import decide_status
from relax_events.projections.run_view import read_alarm_settings
from relax_events.runtime.run_description import build_run_description


def make_fold(*, steps: int = 0, seconds: float = 1.0) -> RunFold:
    """Return the state of a run after so many steps."""
    fold = RunFold(config=run_config())
    for step in range(steps):
        fold.apply(train_step(step, at_seconds=1000 + seconds * step))
    return fold


def names(fold: RunFold, *, at_seconds: float, num_dead_letters: int = 0) -> dict[str, str]:
    """Return the alarms at a time, with their severity."""
    alarms = find_alarms(
        read_alarm_settings(fold.config),
        fold,
        now=int(at_seconds * 1e6),
        num_dead_letters=num_dead_letters,
    )
    return {alarm.name: alarm.severity for alarm in alarms}


def test_curves_have_a_value_a_step() -> None:
    curves = make_fold(steps=3, seconds=2.0).curves
    assert list(curves.steps) == [0, 1, 2]
    assert list(curves.columns["tokens_per_second"]) == [200.0] * 3
    assert curves.staleness_counts == [3, 3]


def test_resumes_and_changed_settings_are_marks_at_their_train_steps() -> None:
    fold = make_fold()
    fold.apply(build_run_description(fold.config))
    for second, worker_id in ((999, None), (1001, None), (1002, "rollout-0")):
        fold.apply(
            RunCommanded(
                command=Command.RESUME,
                reason="",
                worker_id=worker_id,
                commanded_at=second * 1_000_000,
            )
        )
    fold.apply(train_step(0, at_seconds=1000))
    fold.apply(train_step(1, at_seconds=1003))
    fold.apply(build_run_description(run_config(num_steps=9), from_version=2))
    assert list_marks(fold) == [
        {"step": 1, "name": "resumed", "text": ""},
        {"step": 2, "name": "changed", "text": "run.num_steps: 4 -> 9"},
    ]


def test_run_is_not_called_interrupted_for_what_the_reader_has_not_read_yet() -> None:
    fold = make_fold()
    fold.apply(make_heartbeat("trainer-0", at_seconds=1000))
    status = ReaderStatus(read_until=1_001_000_000)
    much_later = 5_000_000_000
    workers = fold.config.workers
    assert decide_status(fold, workers, now=status.known_now(much_later)) == "running"
    status.read_until = much_later
    assert decide_status(fold, workers, now=status.known_now(much_later)) == "interrupted"
    assert ReaderStatus().known_now(7) == 7


def test_metric_that_comes_later_is_missing_before() -> None:
    fold = make_fold(steps=2)
    fold.apply(train_step(2, at_seconds=1002, entropy=0.5))
    assert [math.isnan(value) for value in fold.curves.columns["entropy"]] == [True, True, False]


def test_spread_of_a_component_is_by_version() -> None:
    fold = make_fold()
    for reward in (0.0, 1.0):
        fold.add_score(3, {"reward": reward, "format": 1.0})
    assert fold.components["reward"][3].as_list() == [2, 0.5, 0.5, 0.0, 1.0]
    assert fold.components["format"][3].as_list() == [2, 1.0, 0.0, 1.0, 1.0]


def test_reports_of_a_worker_are_bounded() -> None:
    fold = make_fold()
    for second in range(2000):
        fold.apply(
            MetricsReported(
                worker_id="reward-0",
                role="reward",
                values={"busy_ratio": 0.5},
                reported_at=second * 1_000_000,
            )
        )
    assert len(fold.reports["reward-0"]) == 720
    assert fold.reports["reward-0"][-1].seconds == 1.0


def test_shares_of_groups_without_signal_and_of_truncated_samples() -> None:
    table = SampleTable()
    for group, rewards in (("000000-0000-0", (1, 1)), ("000000-0001-0", (0, 1))):
        for index, reward in enumerate(rewards):
            row = table.add(
                NewSample(
                    index,
                    encode_group(group),
                    index,
                    0,
                    0,
                    5,
                    "length" if index else "stop",
                    "rollout-0",
                    "",
                    0,
                    0,
                    0,
                )
            )
            table.set_reward(row, reward)
    assert group_curves(table) == {"steps": [0], "signalless": [0.5], "truncated": [0.5]}


def test_healthy_run_has_no_alarm() -> None:
    fold = make_fold(steps=5)
    for role in fold.config.roles():
        fold.apply(make_heartbeat(f"{role}-0", at_seconds=1005))
    assert names(fold, at_seconds=1006) == {}


def test_silent_worker_and_its_role_are_named() -> None:
    fold = make_fold(steps=5)
    for role in fold.config.roles():
        at_seconds = 1005 if role == "reward" else 1095
        fold.apply(make_heartbeat(f"{role}-0", at_seconds=at_seconds))
    assert names(fold, at_seconds=1060 + 36) == {
        "worker_silent": "critical",
        "role_without_worker": "critical",
        "run_stalled": "critical",
    }


def test_failed_groups_dead_letters_and_collapse_are_named() -> None:
    fold = make_fold()
    for step in range(60):
        ended_so = {"samples_ended/finished": 1.0, "samples_ended/truncated": 1.0}
        reward = 0.9 - 0.015 * step
        fold.apply(
            train_step(
                step,
                at_seconds=1000 + step,
                reward_mean=reward,
                equal_reward_ratio=0.75,
                **ended_so,
            )
        )
    fold.apply(replace(ended("000060-0000-0", Outcome.FAILED), reason="no engine"))
    assert names(fold, at_seconds=1061, num_dead_letters=2) == {
        "groups_failing": "critical",
        "reward_collapsed": "critical",
        "truncated": "warning",
        "no_signal": "warning",
        "dead_letters": "warning",
        "trainer_starved": "info",
        "reward_flat": "info",
    }


def test_many_lost_refused_and_late_samples_are_named() -> None:
    def find(**counts: float) -> dict[str, tuple[str, str]]:
        fold = make_fold()
        for step in range(30):
            metrics = {f"samples_ended/{name}": count for name, count in counts.items()}
            fold.apply(train_step(step, at_seconds=1000 + step, **metrics))
        return {
            alarm.name: (alarm.severity, alarm.runbook)
            for alarm in find_alarms(read_alarm_settings(fold.config), fold, now=1_031_000_000)
            if alarm.name.startswith("samples_")
        }

    assert find(finished=90, truncated=0, lost=5, refused=0, late=5) == {}
    assert find(finished=70, truncated=0, lost=8, refused=8, late=14) == {
        "samples_lost": ("warning", "RelaxSamplesLostOrLate"),
        "samples_refused": ("warning", "RelaxSamplesRefused"),
        "samples_late": ("warning", "RelaxSamplesLostOrLate"),
    }
    assert find() == {}


@pytest.mark.parametrize(
    ("succeeded", "arguments", "found"),
    [
        (True, {}, {}),
        (False, {}, {"run_failed": "critical"}),
        (False, {STOPPED_BY: "relax runs stop"}, {}),
    ],
)
def test_ended_run_has_only_the_alarm_of_its_failure(
    succeeded: bool, arguments: dict[str, str], found: dict[str, str]
) -> None:
    fold = make_fold(steps=5)
    fold.apply(
        RunCommanded(command=Command.STOP, reason="over", succeeded=succeeded, arguments=arguments)
    )
    assert names(fold, at_seconds=9000) == found


@pytest.mark.parametrize(("length", "count"), [(0, 0), (1, 1), (1500, 1500), (100_000, 1493)])
def test_thinned_curve_keeps_its_last_point(length: int, count: int) -> None:
    kept = list(range(length))[thin(length)]
    assert len(kept) == count
    assert kept[-1:] == list(range(length))[-1:]


def test_positions_are_read_in_spans_one_a_partition_and_round() -> None:
    assert rounds([(0, 5), (0, 7), (0, 900), (1, 3)]) == [
        {0: (5, 8), 1: (3, 4)},
        {0: (900, 901)},
    ]
    assert rounds([]) == []


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ("{}", ""),
        ('{"task": "sums"}', "sums"),
        ('{"data_source": "gsm8k", "task": "x"}', "gsm8k"),
        ("[1]", ""),
        ("no json", ""),
        ('{"source": 3}', ""),
    ],
)
def test_source_is_what_the_metadata_names(metadata: str, source: str) -> None:
    assert read_source(metadata) == source


def test_query_is_parsed_from_an_address() -> None:
    query = parse_query({"reward": "0.5..", "sort": "-reward", "first": "50", "outcome": "trained"})
    assert (query.bounds, query.sort, query.descending) == (
        {"reward": (0.5, math.inf)},
        "reward",
        True,
    )
    assert (query.first, query.outcome) == (50, "trained")


@pytest.mark.parametrize("given", [{"reward": "high"}, {"first": "-1"}, {"count": "5000"}])
def test_malformed_query_is_refused_by_name(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        parse_query(given)
