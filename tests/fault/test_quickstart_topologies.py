"""The quickstart learns the same curve in every layout of its trainer, also one that is killed as
four ranks and continues as two.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import FaultRun, assert_ledger_balances

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
STEPS, KILLED_AT = 16, 6
LEAST_EQUAL_STEPS = 3
PATIENCE = 3.0
"""Four ranks on two cores."""


def quickstart(model: Path, **trainer: Any) -> dict[str, dict[str, Any]]:
    """Return the sections of the shipped run file, step by step, so that all layouts train on the
    same samples.
    """
    shipped = tomllib.loads(QUICKSTART.read_text())
    steps = {"num_steps": STEPS, "mode": "sync", "max_staleness": 0}
    lasting = {"checkpoint_every": 2} | trainer
    shipped["model"]["path"] = str(model)
    return {
        "run": {name: value for name, value in shipped.pop("run").items() if name != "id"} | steps,
        "trainer": shipped.pop("trainer") | lasting,
        "broker": shipped.pop("broker") | {"partitions_per_version": 2},
        **shipped,
    }


def finish(run: FaultRun, *arguments: str) -> dict[str, Any]:
    """Run to the end; return the curves of a run that kept its promises."""
    run.patience = PATIENCE
    process = run.start("run", run.run_file, *arguments)
    assert run.wait_until_ended(process) == 0, run.output.read_text()
    assert_ledger_balances(run)
    report = run.report()
    assert (report["succeeded"], report["steps"]) == (True, STEPS)
    curves: dict[str, Any] = report["curves"]
    return curves


def count_equal_steps(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Return how many steps trained the same samples. Ranks add in another order than one process:
    the rounding of some processor can at last choose another token, and every later sample differs.
    """
    samples = [
        zip(curves["num_tokens"], curves["reward_mean"], strict=True) for curves in (one, other)
    ]
    equal = [mine == pytest.approx(theirs, abs=1e-6) for mine, theirs in zip(*samples, strict=True)]
    return equal.index(False) if False in equal else len(equal)


def test_quickstart_learns_the_same_curve_under_every_layout(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    one = finish(start_run(**quickstart(model)))
    assert sum(one["reward_mean"][-4:]) > sum(one["reward_mean"][:4]) + 0.4

    sharded = finish(start_run(**quickstart(model, ranks=2, sharding="full")))

    parallel = {"tensor_parallel": 2, "pipeline_parallel": 2}
    staged = start_run(**quickstart(model, backend="megatron", ranks=4, **parallel))
    staged.patience = PATIENCE
    process = staged.start()
    staged.wait_until_steps(KILLED_AT)
    workers = staged.worker_processes()
    process.kill()
    for worker in workers:
        worker.kill()
    staged.wait_until_gone(workers)
    process.wait()
    moved = finish(staged, "trainer.pipeline_parallel=1", "trainer.ranks=2")
    assert staged.logged("trainer-0", "checkpoint.loaded")
    for line in staged.logged("trainer-0", "replay.diverged"):  # two ranks add in another order
        assert line["largest_move"] < 1e-6

    for other in (sharded, moved):
        same = count_equal_steps(one, other)
        assert same >= LEAST_EQUAL_STEPS
        assert other["loss"][:same] == pytest.approx(one["loss"][:same], abs=1e-4)
        assert other["grad_norm"][:same] == pytest.approx(one["grad_norm"][:same], rel=1e-2)
        last = [sum(curves["reward_mean"][-4:]) / 4 for curves in (one, other)]
        assert last[1] == pytest.approx(last[0], abs=0.1)
