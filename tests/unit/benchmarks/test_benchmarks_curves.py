"""The learning curves: every algorithm has a run file, existing results are kept, and the page
follows from the reports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import curve_materials, curve_rewards, curves, quickstart
from relax_events.algorithms.description import installed_algorithms
from relax_events.config import load_run_config
from relax_events.config.engine import TinyModelConfig
from relax_events.data.sources import GeneratedSource, open_stream
from relax_events.examples.model_preparation import make_tiny_for
from relax_events.rewards.scores import parse_score

NAMES = [spec.name for spec in installed_algorithms()]


def report_of(
    rewards: list[float | None], evaluations: list[tuple[int, float]] | None = None
) -> dict[str, Any]:
    rows = [
        {"policy_version": version, "reward_mean": reward} for version, reward in evaluations or []
    ]
    steps = list(range(len(rewards)))
    return {"curves": {"train_step": steps, "reward_mean": rewards}, "evaluations": rows}


@pytest.mark.parametrize("name", NAMES)
def test_algorithm_settings_are_valid_for_the_quickstart(name: str) -> None:
    config = load_run_config(
        quickstart.CONFIG,
        [curves.START, f"algorithm.name={name}", *curves.SETTINGS.get(name, ())],
        environment={},
    )
    assert config.algorithm.name == name
    assert not (
        config.algorithm.spec.components and config.reward.function == "reasoning_gym"
    )  # which gives one number


def test_curve_uses_evaluation_rewards_or_else_step_rewards() -> None:
    steps = curves.read_learning_curve(report_of([0.2, None, 0.9]), "grpo", 0)
    assert (list(steps.curve.steps), steps.first, steps.num_steps_to_aim) == ([0, 1, 2], 0.2, 2)
    assert steps.last == pytest.approx((0.2 + 0.9) / 2)
    evaluated = curves.read_learning_curve(
        report_of([0.1, 0.9], [(0, 0.25), (10, 0.75)]), "grpo", 0
    )
    assert (
        list(evaluated.curve.steps),
        list(evaluated.curve.rewards),
        evaluated.num_steps_to_aim,
    ) == ([0, 10], [0.25, 0.75], None)
    with pytest.raises(ValueError, match="the run of grpo with seed 3 reports neither"):
        curves.read_learning_curve(report_of([None]), "grpo", 3)


def test_finished_run_is_reused_until_its_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(folder: Path, run_id: str, overrides: list[str]) -> dict[str, Any]:
        folder.mkdir()
        ran.append([run_id, *overrides])
        return report_of([0.2, 0.4])

    monkeypatch.setattr(quickstart, "run", run)
    monkeypatch.setitem(curve_materials.MAKERS, "model", lambda path: path.mkdir())
    once = curves.run("dr_grpo", 1, 2, tmp_path)
    assert curves.run("dr_grpo", 1, 2, tmp_path) == once
    assert ran == [
        [
            "dr-grpo-2-1",
            f"model.path={tmp_path}/materials/model",
            "algorithm.name=dr_grpo",
            "run.num_steps=2",
            "run.seed=1",
        ]
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dr-grpo-2-1.json", "materials"]
    monkeypatch.setitem(curves.SETTINGS, "dr_grpo", ("algorithm.clip_low=0.1",))
    curves.run("dr_grpo", 1, 2, tmp_path)
    assert len(ran) == 2


def test_page_reports_which_algorithms_learned_the_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = [
        curves.read_learning_curve(report_of(rewards), name, 0)
        for name, rewards in {"grpo": [0.2, 0.9], "dapo": [0.2, 0.7]}.items()
    ]
    curves.publish(learned, num_steps=2, num_seeds=1, folder=tmp_path)
    page = (tmp_path / "curves.md").read_text()
    assert capsys.readouterr().out.strip() == page.strip()
    assert "| grpo | 0.20 | 0.550 | 1 |  |" in page
    assert "| dapo | 0.20 | 0.450 | never | `overlong_ratio=0` |" in page
    assert "1 of 2 algorithms reach a reward of 0.8 with every seed; not so dapo." in page
    assert json.loads((tmp_path / "curves.json").read_text())["data"][0]["rewards"] == [0.2, 0.9]


def test_reward_components_score_correctness_and_length_separately() -> None:
    config = load_run_config(quickstart.CONFIG, environment={})
    row = GeneratedSource("string_insertion", config.data, seed=0).row(0)
    wrong = "".join("Z" if letter != "Z" else "A" for letter in row.answer)
    given = [
        curve_rewards.in_parts(
            text, answer=row.answer, metadata=json.loads(row.metadata), prompt=""
        )
        for text in (row.answer, wrong, "")
    ]
    assert [parse_score(value).reward for value in given] == [
        1.0,
        given[1]["right"],
        given[2]["right"],
    ]
    assert [value["length"] for value in given] == [1.0, 1.0, 0.0]
    assert given[1]["right"] < 1


def test_benchmark_materials_are_created_once_and_only_when_referenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(path: Path) -> None:
        made.append(path.name)
        path.mkdir()

    monkeypatch.setattr(
        curve_materials, "MAKERS", dict.fromkeys(["model", "teacher", "pairs.jsonl"], make)
    )
    wanted = [
        "model.path={materials}/model",
        "teacher.model_path={materials}/teacher",
        "run.seed=1",
    ]
    for _ in range(2):
        assert curve_materials.provide(wanted, tmp_path) == [
            f"model.path={tmp_path}/model",
            f"teacher.model_path={tmp_path}/teacher",
            "run.seed=1",
        ]
    assert made == ["model", "teacher"]


def test_preference_pairs_hold_the_right_answer_and_a_sampled_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run_config(
        quickstart.CONFIG, [f"model.path={tmp_path / 'model'}"], environment={}
    )
    make_tiny_for(
        config.data, tmp_path / "model", tiny=TinyModelConfig(hidden_size=32, num_layers=1), seed=0
    )
    monkeypatch.setattr(curve_materials, "NUM_PROMPTS", 12)
    curve_materials.make_pairs(tmp_path / "pairs.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    stream = open_stream(config.data, seed=0)
    answers = {stream[number].messages[0].text: stream[number].answer for number in range(12)}
    assert 0 < len(rows) <= 12
    for row in rows:
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert row["chosen"] == answers[row["prompt"][0]["content"]] != row["rejected"]
        assert row["rejected"].strip()
