"""A distilled policy approaches its teacher, over a token set and by sampled tokens, live and
replayed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Relax, report_of, write_rows

pytestmark = pytest.mark.timeout(400)


def distil(relax: Relax, run_file: Path, bootstrap_servers: str, *overrides: str) -> None:
    common = (
        f"broker.bootstrap_servers={bootstrap_servers}",
        "algorithm.name=opd",
        "run.num_steps=6",
        "trainer.learning_rate=2e-2",
    )
    ended = relax("run", run_file, *common, *overrides, timeout_seconds=280)
    assert ended.code == 0, ended.err


def curves_of(run_file: Path, run_id: str) -> dict[str, Any]:
    report = report_of(run_file.parent, run_id)
    assert report["succeeded"]
    assert (report["samples_lost"], report["samples_trained_twice"], report["ledger_problems"]) == (
        0,
        0,
        [],
    )
    curves: dict[str, Any] = report["curves"]
    return curves


@pytest.mark.long
def test_distillation_loss_of_policy_to_teacher_falls(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str, teacher: Path
) -> None:
    sets = (
        "algorithm.distill_placement=loss",
        "algorithm.distill_tokens=student_topk",
        "algorithm.distill_top_k=64",
        "run.prompts_per_step=8",
    )
    distil(relax, run_file, bootstrap_servers, f"teacher.model_path={teacher}", *sets)
    curves = curves_of(run_file, run_id)
    assert curves["distill_loss"][0] > 0.2
    assert curves["distill_loss"][-1] < 0.6 * curves["distill_loss"][0]
    assert curves["teacher_kl"][-1] < 0.8 * curves["teacher_kl"][0]
    assert curves["policy_loss"] == [0.0] * 6


@pytest.mark.long
def test_policy_approaches_two_teachers_each_on_its_own_source(
    relax: Relax,
    run_file: Path,
    bootstrap_servers: str,
    run_id: str,
    teacher: Path,
    prepared: Path,
    tmp_path: Path,
) -> None:
    rows = [
        {"prompt": f"spell {word} backwards", "answer": "", "data_source": source}
        for word, source in (("tea", "drinks"), ("milk", "drinks"), ("ox", "beasts"))
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    distil(
        relax,
        run_file,
        bootstrap_servers,
        f"data.source=jsonl:{tmp_path / 'rows.jsonl'}",
        f"teachers.other.model_path={teacher}",
        'teachers.other.sources=["drinks"]',
        f"teachers.same.model_path={prepared / 'model'}",  # the policy as it begins
        'teachers.same.sources=["beasts"]',
        "algorithm.distill_placement=loss",
        "algorithm.distill_tokens=union",
        "algorithm.distill_top_k=16",
        "run.prompts_per_step=9",
    )
    curves = curves_of(run_file, run_id)
    assert curves["distill_loss"][0] > 0.1
    assert curves["distill_loss"][-1] < 0.85 * curves["distill_loss"][0]


@pytest.mark.long
def test_replay_distills_sampled_tokens_with_another_coefficient(
    relax: Relax,
    run_file: Path,
    bootstrap_servers: str,
    run_id: str,
    teacher: Path,
    replay_options: tuple[str, ...],
) -> None:
    sync = (
        "run.mode=sync",
        "run.max_staleness=0",
    )  # each step's samples are the same however fast the machine is
    distil(
        relax,
        run_file,
        bootstrap_servers,
        f"teacher.model_path={teacher}",
        "run.prompts_per_step=8",
        "run.num_steps=20",
        *sync,
    )
    first = curves_of(run_file, run_id)
    assert np.mean(first["teacher_kl"][-10:]) < 0.9 * np.mean(first["teacher_kl"][:3]), (
        "of the sampled tokens alone: one step's varies by a tenth"
    )
    again = relax(
        "runs",
        "replay",
        run_id,
        f"{run_id}-b",
        "algorithm.distill_coefficient=0.5",
        *replay_options,
        timeout_seconds=200,
    )
    assert again.code == 0, again.err
    second = curves_of(run_file, f"{run_id}-b")
    assert second["teacher_kl"] == pytest.approx(
        first["teacher_kl"], rel=1e-6
    )  # of the same recorded tokens
    assert second["loss"][0] == pytest.approx(first["loss"][0] / 2, rel=1e-3)
    refused = relax("runs", "replay", run_id, f"{run_id}-c", "algorithm.distill_placement=loss", "algorithm.distill_tokens=teacher_topk",
                    "algorithm.distill_top_k=4", *replay_options, timeout_seconds=200)  # fmt: skip
    assert refused.code == 2
    assert "is not on the log" in refused.err


def test_teacher_with_another_tokenizer_is_rejected_before_anything_starts(
    relax: Relax, run_file: Path, teacher: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(teacher, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<|endoftext|>"', '"<|theend|>"'))
    ended = relax("run", run_file, "algorithm.name=opd", f"teacher.model_path={other}")
    assert ended.code == 2
    assert "teacher and policy must have the same vocabulary" in ended.err
    ended = relax("run", run_file, "algorithm.name=opd")
    assert ended.code == 2
    assert "algorithm.distill_coefficient = 1 needs a teacher; set teacher.model_path" in ended.err
