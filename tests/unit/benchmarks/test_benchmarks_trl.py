"""The comparison with TRL: the page follows from the metrics, and the settings of both sides make a
valid run file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import environment, trl
from relax_events.config import load_run_config


def outcome(
    step_seconds: float, *, rewards: list[float] | None = None, num_steps: int = 8
) -> trl.Outcome:
    return trl.Outcome(
        step_seconds=[10.0] * 5 + [step_seconds] * (num_steps - 5),
        rewards=rewards or [0.95] * num_steps,
        completion_tokens=[6.0] * num_steps,
        parts={"wait": 0.1, "training": step_seconds - 0.1},
        wall_seconds=80.0,
        samples_per_step=256,
    )


def outcomes(
    on_policy: list[float], asynchronous: list[float], theirs: list[float]
) -> trl.Outcomes:
    names = {
        "ours, on-policy, colocated": on_policy,
        "ours, async K=1": asynchronous,
        "TRL, 1 thread": [2.0] * len(theirs),
        "TRL, 2 threads": theirs,
    }
    return {name: [outcome(seconds) for seconds in measured] for name, measured in names.items()}


@pytest.mark.parametrize("side", trl.SIDES, ids=lambda side: side.slug)
@pytest.mark.parametrize("task", trl.TASKS, ids=lambda task: task.slug)
def test_overrides_of_each_side_give_a_valid_run_config(task: trl.Task, side: trl.Side) -> None:
    run_id = f"run.id={task.slug}-{side.slug}-0"
    config = load_run_config(
        task.run_file, [run_id, *trl.list_overrides(task, side, seed=1)], environment={}
    )
    assert (config.run.num_steps, config.run.seed) == (task.num_steps, 1)
    assert config.algorithm.kl_coefficient == 0
    assert not config.algorithm.needs_whole_step
    assert config.run.max_staleness == (
        1 if side.kind == "async" else 0 if side.kind == "on-policy" else 2
    )


def test_throughput_leaves_the_first_steps_out() -> None:
    assert outcome(0.5).completions_per_second == pytest.approx(512)


def test_seconds_to_reward_sum_the_steps_until_the_mean_reward_is_reached() -> None:
    rewards = [
        0.1,
        0.2,
        0.9,
        0.95,
        0.9,
        0.85,
        0.9,
        0.95,
    ]  # the mean of five is 0.9 with the seventh
    assert outcome(0.5, rewards=rewards).seconds_to_reward == pytest.approx(5 * 10 + 2 * 0.5)
    assert outcome(0.5, rewards=[0.5] * 8).seconds_to_reward is None


def test_throughput_ratios_compare_runs_of_the_same_round() -> None:
    measured = outcomes([0.5, 1.0, 2.0], [1.0] * 3, [1.0, 1.0, 1.0])
    assert trl.ratios(measured, "ours, on-policy, colocated", "TRL, 2 threads") == pytest.approx(
        [2, 1, 0.5]
    )


def test_publish_writes_benchmark_page_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trl.publish(trl.TASKS[0], outcomes([0.8], [0.5], [1.0]), tmp_path)
    page = (tmp_path / "trl-quickstart.md").read_text()
    data = json.loads((tmp_path / "trl-quickstart.json").read_text())["data"]
    assert capsys.readouterr().out.strip() == page.strip()
    assert f"TRL {environment.pinned('trl', 'trl')}: quickstart" in page
    assert "--task 'quickstart' --rounds 1`" in page
    row = next(line for line in page.splitlines() if line.startswith("| ours, async K=1"))
    assert [cell.strip() for cell in row.split("|")[2:6]] == [
        "512",
        "2.00x (2.00 to 2.00)",
        "500",
        "6.0",
    ]
    assert [cell.strip() for cell in row.split("|")[6:10]] == [
        "50.0",
        "0.950",
        "28.5",
        "training 400, wait 100",
    ]
    assert data["ours, async K=1"][0]["samples_per_step"] == 256


def test_error_names_a_package_that_is_not_pinned() -> None:
    with pytest.raises(ValueError, match=r"requirements/trl\.txt does not pin vllm"):
        environment.pinned("trl", "vllm")
