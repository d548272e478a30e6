"""A trainer, an engine, and reference and actor-forward in one process that hold one device in turn
train what they train side by side, also when each is killed in its turn. An asynchronous trainer
lends its device to an engine, and takes it back while samples are generated.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import call_relax, log_of, report_of, run_file_text

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
SECONDS = 280.0
NUM_STEPS = 3
TINY = "tiny = { hidden_size = 512, num_layers = 8, corpus_rows = 8 }"
SYNC = 'mode = "sync"\nmax_staleness = 0'
KILLS = "trainer.after_accumulate=kill,rollout.generating=kill,reference.before_flush:2=kill"
SCORERS = ("algorithm.kl_coefficient=0.01", "algorithm.old_logprobs=actor")


@pytest.fixture
def large(prepared: Path, tmp_path: Path) -> Path:
    """Return a folder with the prompts, and a model whose weights show in a process's memory."""
    folder = tmp_path / "large"
    folder.mkdir()
    for name in ("prompts.jsonl", "reward.py"):
        shutil.copy(prepared / name, folder)
    run_file = folder / "prepare.toml"
    run_file.write_text(
        f'[run]\nid = "prepare"\n[model]\npath = "{folder / "model"}"\n{TINY}\n'
        f'[data]\nsource = "jsonl:{folder / "prompts.jsonl"}"\n'
    )
    made = call_relax("models", "prepare", run_file, cwd=folder, timeout_seconds=SECONDS)
    assert made.code == 0, made.err
    return folder


def test_models_that_take_turns_train_the_same_and_free_their_memory(
    large: Path, tmp_path: Path, bootstrap_servers: str, run_id: str
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(run_file_text(large, run_id, more=SYNC, num_steps=NUM_STEPS))
    reports = {}
    for name, overrides, failpoints in (
        ("apart", ("devices.time_share=false",), ""),
        ("turns", ("devices.time_share=true", "workers.hybrid=true"), KILLS),
    ):
        ended = call_relax(
            "run",
            run_file,
            f"run.id={run_id}-{name}",
            f"broker.bootstrap_servers={bootstrap_servers}",
            *SCORERS,
            *overrides,
            cwd=tmp_path,
            timeout_seconds=SECONDS,
            failpoints=failpoints,
        )
        assert ended.code == 0, ended.err
        reports[name] = report_of(tmp_path, f"{run_id}-{name}")
    apart, turns = reports["apart"], reports["turns"]
    assert turns["ledger_problems"] == []
    assert turns["outcomes"]["trained"] == 4 * NUM_STEPS
    assert turns["curves"]["reward_mean"] == pytest.approx(apart["curves"]["reward_mean"], abs=1e-6)
    assert turns["curves"]["loss"] == pytest.approx(apart["curves"]["loss"], abs=1e-4)
    assert turns["curves"]["grad_norm"] == pytest.approx(apart["curves"]["grad_norm"], rel=1e-3)

    weights = sum(path.stat().st_size for path in (large / "model").glob("*.safetensors"))
    assert weights > 50e6
    # master weights, gradients and two moments in the trainer
    for worker_id, share in (("trainer-0", 4), ("rollout-0", 1), ("reference-0", 1)):
        left = [
            event
            for event in log_of(tmp_path, f"{run_id}-turns", worker_id)
            if event["event"] == "device.left"
        ]
        freed = [event["resident_bytes_before"] - event["resident_bytes"] for event in left]
        assert len(freed) >= NUM_STEPS
        assert max(freed) > 0.8 * share * weights, worker_id
    entered = [
        event
        for event in log_of(tmp_path, f"{run_id}-turns", "trainer-0")
        if event["event"] == "device.entered"
    ]
    assert len(entered) >= NUM_STEPS
    assert min(event["resident_bytes"] for event in entered) > 3 * weights


def test_asynchronous_trainer_lends_its_device(
    large: Path, tmp_path: Path, bootstrap_servers: str, run_id: str
) -> None:
    num_steps = 6
    run_file = tmp_path / "run.toml"
    more = 'mode = "async"\nmax_staleness = 2'
    run_file.write_text(run_file_text(large, run_id, more=more, num_steps=num_steps))
    ended = call_relax(
        "run",
        run_file,
        f"broker.bootstrap_servers={bootstrap_servers}",
        "devices.time_share=true",
        "engine.sampling.max_new_tokens=64",
        cwd=tmp_path,
        timeout_seconds=SECONDS,
        failpoints="rollout.generating:20=kill",
    )
    assert ended.code == 0, ended.err
    report = report_of(tmp_path, run_id)
    assert report["ledger_problems"] == []
    assert report["outcomes"]["trained"] == 4 * num_steps
    left = [
        event for event in log_of(tmp_path, run_id, "rollout-0") if event["event"] == "device.left"
    ]
    taken_back = [event for event in left if event["num_running"]]
    assert taken_back, "the trainer waited for no engine"
    weights = sum(path.stat().st_size for path in (large / "model").glob("*.safetensors"))
    freed = [event["resident_bytes_before"] - event["resident_bytes"] for event in taken_back]
    assert max(freed) > 0.8 * weights
