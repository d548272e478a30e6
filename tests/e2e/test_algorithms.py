"""Every algorithm trains: one live run with rewards in components, and a replay of its rollouts for
each."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import orjson
import pytest
from command_line import FinishedRun, Relax, call_relax, run_file_text

from relax_events.algorithms.description import installed_algorithms
from relax_events.config import load_run_config

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PARTS = """
import zlib

def parts(completion, *, answer, metadata, prompt):
    spread = zlib.crc32(completion.encode()) % 1000 / 1000
    return {"spread": spread, "short": float(len(completion) < 20), "reward": spread}
"""
MINE = """
from relax_events.config.algorithm_spec import AlgorithmSpec

MINE = AlgorithmSpec(
    name="mine", summary="Raw rewards.", formula="A = R", source="this file", advantage=lambda rewards: rewards.total,
    policy_loss=lambda tokens: -tokens.log_ratio.exp() * tokens.advantages,
)
"""
MORE = {
    "grpo": (
        "algorithm.dual_clip=3",
        "algorithm.opsm_threshold=0.1",
        "algorithm.entropy_coefficient=0.01",
    ),
    "dr_grpo": (
        "algorithm.baseline=none",
        "algorithm.whiten_advantages=mean",
        "algorithm.kl_coefficient=0.01",
        "algorithm.kl_base=rollout",
        "algorithm.kl_estimator=k3+",
        "algorithm.kl_bound=1",
    ),
    "gspo": (
        "algorithm.old_logprobs=actor",
        "algorithm.correction=mask",
        "algorithm.correction_level=sequence_mean",
        "algorithm.baseline=leave_one_out",
        "algorithm.normalise_std=leave_one_out",
        "algorithm.rejection=tv",
        "algorithm.rejection_over=token",
        "algorithm.rejection_high=0.5",
    ),
    "cispo": (
        "algorithm.old_logprobs=trainer",
        "algorithm.correction=tis",
        "algorithm.rejection=k3",
        "algorithm.rejection_high=0.5",
        "algorithm.veto_low=1e-4",
    ),
    "rloo": (
        "algorithm.kl_coefficient=0.01",
        "algorithm.old_logprobs=trainer",
        "algorithm.correction=icepop",
    ),
    "reinforce_plus_plus": ("algorithm.kl_coefficient=0.01",),
    "reinforce_plus_plus_baseline": (
        "algorithm.m2_threshold=0.04",
        "algorithm.kl_coefficient=0.01",
        "algorithm.kl_unbiased=true",
    ),
    "gdpo": ("algorithm.reward_weights={spread = 1.0, short = 0.5}",),
}

OF_THIS_SOURCE = [
    spec.name
    for spec in installed_algorithms()
    if "gae_lambda" not in spec.settings and spec.learns_from != "pairs"
]
"""The others need what the source has not recorded: a critic's values (see test_critic), pairs of
answers."""


def curves_of(folder: Path, run_id: str) -> dict[str, Any]:
    report = orjson.loads((folder / ".relax/runs" / run_id / "report.json").read_bytes())
    assert report["succeeded"]
    assert report["ledger_problems"] == []
    curves: dict[str, Any] = report["curves"]
    return curves


@pytest.fixture(scope="module")
def source(
    prepared: Path, teacher: Path, bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """Train three live steps by GDPO, with the reference, actor-forward and teacher roles, so that
    their log-probabilities are on the log."""
    folder = tmp_path_factory.mktemp("algorithms")
    (folder / "parts.py").write_text(PARTS)
    run_file = folder / "run.toml"
    text = run_file_text(
        prepared, f"t-{uuid.uuid4().hex[:12]}", more=f'directory = "{folder / ".relax"}"'
    )
    algorithm = (
        '[algorithm]\nname = "gdpo"\nkl_coefficient = 0.001\nold_logprobs = "actor"\ncorrection '
        '= "tis"\n'
    )
    algorithm += f'distill_coefficient = 0.001\n[teacher]\nmodel_path = "{teacher}"\n'
    run_file.write_text(f'{text}\n{algorithm}[broker]\nbootstrap_servers = "{bootstrap_servers}"\n')
    ended = call_relax(
        "run",
        run_file,
        f"reward.function={folder / 'parts.py'}:parts",
        cwd=folder,
        timeout_seconds=200,
    )
    assert ended.code == 0, ended.err
    return FinishedRun(run_file, load_run_config(run_file, environment={}))


def test_live_run_reports_importance_correction_metrics(source: FinishedRun) -> None:
    curves = curves_of(source.run_file.parent, source.config.run.id)
    assert len(curves["loss"]) == 3
    # The first step's weights are the engine's own.
    assert curves["mismatch_mean_abs"][0] == pytest.approx(0, abs=1e-4)
    assert curves["effective_sample_ratio"][0] == pytest.approx(1, abs=1e-4)
    assert curves["correction_mean"][0] == pytest.approx(1, abs=1e-3)
    assert max(curves["masked_fraction"]) == 0


@pytest.mark.parametrize("name", [*OF_THIS_SOURCE, "mine.py:MINE"])
def test_algorithm_trains_recorded_rollouts(
    name: str,
    relax: Relax,
    source: FinishedRun,
    run_id: str,
    tmp_path: Path,
    replay_options: tuple[str, ...],
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    overrides = (f"algorithm.name={name}", *MORE.get(name, ()))
    ended = relax(
        "runs",
        "replay",
        source.config.run.id,
        run_id,
        *overrides,
        "--until-version",
        "2",
        *replay_options,
        timeout_seconds=200,
    )
    assert ended.code == 0, ended.err
    curves = curves_of(tmp_path, run_id)
    assert curves["train_step"] == [0, 1]
    assert min(curves["grad_norm"]) > 0
    run_file = orjson.loads((tmp_path / ".relax/runs" / run_id / "run-file.json").read_bytes())
    assert run_file["algorithm"]["name"] == name
    # Only where it is the source's own algorithm are the source's settings kept.
    assert run_file["algorithm"]["kl_coefficient"] == (
        0.01 if "algorithm.kl_coefficient=0.01" in overrides else 0.001 if name == "gdpo" else 0
    )
