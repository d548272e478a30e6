"""Runs that are trained from Python: rows and a reward function as objects, the run's log as rows."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_line import Relax, report_of

import relax_events as rx
from relax_events.errors import ConfigError, RunFailed

ROWS = [
    {"prompt": f"spell {word} backwards", "answer": word[::-1], "length": len(word)}
    for word in ("tea", "milk", "juice", "water", "coffee", "lemon", "cocoa", "cider")
]


def spread(completion: str, *, metadata: dict[str, Any]) -> float:
    """Reward a completion by its characters: nearly every prompt group has something to learn."""
    length: int = metadata["length"]
    return sum(map(ord, completion)) % 97 / 100 + length


def small(prepared: Path, folder: Path, bootstrap_servers: str) -> dict[str, Any]:
    """Return the settings of a small run."""
    return {
        "model": prepared / "model",
        "directory": folder / ".relax",
        "run.prompts_per_step": 4,
        "run.samples_per_prompt": 4,
        "broker": {"bootstrap_servers": bootstrap_servers},
        "engine": {
            "max_context_tokens": 96,
            "max_running_samples": 16,
            "sampling": {"max_new_tokens": 6},
        },
        "trainer.learning_rate": 1e-3,
        "workers.heartbeat_seconds": 0.2,
        "scaling.api": "off",
    }


@pytest.mark.timeout(900)
def test_run_from_rows_and_a_function_is_read_back_as_rows(
    prepared: Path, bootstrap_servers: str, run_id: str, tmp_path: Path, relax: Relax
) -> None:
    settings = small(prepared, tmp_path, bootstrap_servers)
    seen: list[int] = []
    run = rx.train(
        data=ROWS,
        reward=spread,
        steps=3,
        run_id=run_id,
        on_step=lambda row: seen.append(row["train_step"]),
        **settings,
    )
    assert run.wait(timeout=600) is run
    steps = run.steps()
    assert [step["train_step"] for step in steps] == seen == [0, 1, 2]
    assert run.metrics() == steps[-1]
    assert [step["train_step"] for step in run.follow_steps()] == seen
    samples = list(run.samples())
    assert len(samples) >= 48
    for sample in samples:
        length = len(sample["prompt"].split()[1])
        expected = sum(map(ord, sample["completion"])) % 97 / 100 + length
        assert sample["reward"] == pytest.approx(expected)
    trained = [sample["reward"] for sample in run.samples(train_step=2)]
    assert sum(trained) / len(trained) == pytest.approx(steps[2]["reward_mean"])
    page = run._repr_html_()
    assert f"run {run_id} ended: step 3 of 3" in page
    assert page.count(",") >= 3
    exported = run.export(tmp_path / "exported")
    assert (exported / "config.json").is_file()

    attached = rx.attach(run.run_file)
    assert attached.wait().steps() == steps
    assert tomllib.loads(run.run_file.read_text())["run"]["num_steps"] == 3
    again = relax("run", run.run_file)
    assert (again.code, report_of(tmp_path, run_id)["steps"]) == (0, 3)
    with pytest.raises(ConfigError, match=f"{run_id} is there with another data"):
        rx.train(data=ROWS[1:], reward=spread, steps=3, run_id=run_id, **settings)
    with pytest.raises(ConfigError, match=r"run.seed: 0 -> 3"):
        rx.train(data=ROWS, reward=spread, steps=3, run_id=run_id, **settings | {"run.seed": 3})


@pytest.mark.timeout(900)
def test_stopped_run_drains_and_is_resumed_by_its_run_file(
    prepared: Path, bootstrap_servers: str, run_id: str, tmp_path: Path, relax: Relax
) -> None:
    settings = small(prepared, tmp_path, bootstrap_servers)
    run = rx.train(data=ROWS, reward=spread, steps=500, run_id=run_id, **settings)
    assert next(run.follow_steps())["train_step"] == 0
    assert rx.attach(run.run_file).view.status == "running"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=f"run {run_id} is running"):
        rx.train(data=ROWS, reward=spread, steps=500, run_id=run_id, **settings)
    assert next(run.follow_samples())["reward"] is not None
    run.stop()
    with pytest.raises(RunFailed, match=f"run {run_id} ended before its goal: interrupted"):
        run.wait()
    attached = rx.attach(run.run_file)
    num_steps = len(attached.steps())
    assert 0 < num_steps < 500
    assert len(list(attached.follow_steps())) == num_steps
    with pytest.raises(RunFailed, match=f"run {run_id} ended before its goal: interrupted at"):
        attached.wait()
    resumed = relax("run", run.run_file, f"run.num_steps={num_steps + 1}", "--accept-changes")
    assert resumed.code == 0, resumed.err
    assert [step["train_step"] for step in attached.steps()] == list(range(num_steps + 1))
    attached.wait()


SCRIPT = """
import sys
import relax_events as rx

BONUS = 1.0

def bonus(prompts, completions, level, **columns):
    assert len(prompts) == len(completions) == len(columns["completion_ids"]) == 4
    return [len(set(one)) / 10 + BONUS * part for one, part in zip(completions, level)]

run = rx.train(data=[{{"prompt": one, "level": 2**70 / 2**70}} for one in "abcd"],
               reward=bonus, steps=1, run_id={run_id!r}, **{settings!r})
run.wait(timeout=200)
print(sum(sample["reward"] >= 1.0 for sample in run.samples()))
"""


@pytest.mark.timeout(900)
def test_function_of_a_script_scores_and_a_missing_model_is_the_runs_error(
    prepared: Path, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    settings = small(prepared, tmp_path, bootstrap_servers)
    plain = {
        key: str(value) if isinstance(value, Path) else value for key, value in settings.items()
    }
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(run_id=run_id, settings=plain))
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 16
    assert "step 1/1" in ended.stderr

    run = rx.train(
        data=ROWS, reward=spread, run_id=f"{run_id}-b", **settings | {"model": tmp_path / "none"}
    )
    with pytest.raises(RunFailed, match=r"model.path .*none"):
        run.wait()
    assert run.view is None
    assert "no log yet" in run._repr_html_()
