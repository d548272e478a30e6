"""Whole runs with `model.lora`: the quickstart's task is learned through killed workers, a run is
replayed and forked, and its adapters leave it.
"""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import torch
from command_line import Relax, call_relax, log_of, report_of, run_file_text
from peft import PeftModel
from transformers import AutoModelForCausalLM

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
KILLS = "trainer.after_weights:21=kill,rollout.generating:12=kill,actor-forward.before_commit=kill"


@torch.no_grad()
def logprobs(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(40)[None] % 30
    chosen: torch.Tensor = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return chosen.gather(-1, ids[0, 1:, None])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_adapters_learn_the_quickstarts_task_through_killed_workers(
    relax: Relax, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    given = (
        f"run.id={run_id}",
        f"broker.bootstrap_servers={bootstrap_servers}",
        f"model.path={tmp_path / 'model'}",
        "model.lora.rank=16",
        "trainer.learning_rate=1e-2",
        "trainer.checkpoint_every=8",
    )
    ended = call_relax(
        "run", QUICKSTART, *given, cwd=tmp_path, timeout_seconds=880, failpoints=KILLS
    )
    assert ended.code == 0, ended.err
    report = report_of(tmp_path, run_id)
    assert (report["succeeded"], report["steps"], report["ledger_problems"]) == (True, 60, [])
    assert report["reward_first"] < 0.5
    assert report["reward_last_10"] > 0.8
    replays = [
        event
        for event in log_of(tmp_path, run_id, "trainer-0")
        if event["event"] == "train_steps.replayed" and event["num_steps"]
    ]
    assert replays
    assert all(event["identical"] for event in replays)

    objects = tmp_path / ".relax/runs" / run_id / "objects"
    (version,) = objects.glob("weights/00000060/*.safetensors")
    assert version.stat().st_size < 0.4 * (tmp_path / "model/model.safetensors").stat().st_size
    servers = ("--bootstrap-servers", bootstrap_servers)
    for folder, options in (("adapters", ()), ("merged", ("--merged",))):
        made = relax("models", "export", run_id, "--to", folder, *options, *servers)
        assert made.code == 0, made.err
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    untrained = logprobs(base)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapters")
    torch.testing.assert_close(logprobs(adapted), logprobs(merged), atol=1e-5, rtol=0)
    assert float((logprobs(merged) - untrained).abs().max()) > 0.1


@pytest.mark.long
@pytest.mark.timeout(400)
def test_run_with_adapters_is_replayed_bit_for_bit_and_forked(
    relax: Relax, bootstrap_servers: str, run_id: str, tmp_path: Path, prepared: Path
) -> None:
    sections = f"""
[model.lora]
rank = 4
[algorithm]
kl_coefficient = 0.01
old_logprobs = "actor"
[broker]
bootstrap_servers = "{bootstrap_servers}"
[evaluation]
every = 2
[[evaluation.datasets]]
name = "same"
source = "jsonl:{prepared / "prompts.jsonl"}"
"""
    run_file = tmp_path / "run.toml"
    run_file.write_text(run_file_text(prepared, run_id, learning_rate=1e-2) + sections)
    ended = relax("run", run_file)
    assert ended.code == 0, ended.err
    report = report_of(tmp_path, run_id)
    assert (report["succeeded"], report["ledger_problems"]) == (True, [])
    shown = relax("lineage", "version", "2", run_file, "--output", "json")
    lineage = orjson.loads(shown.out)
    assert lineage["base_model"] == str(prepared / "model")
    assert len(lineage["base_digest"]) == 64

    where = ("--bootstrap-servers", bootstrap_servers, "--directory", str(tmp_path / ".relax"))
    replay = relax("runs", "replay", run_id, f"{run_id}-r", "--verify", "--trust-source", *where)
    assert replay.code == 0, replay.err
    again = report_of(tmp_path, f"{run_id}-r")
    assert again["weights_digests"] == report["weights_digests"]
    fork = relax(
        "runs",
        "fork",
        run_id,
        f"{run_id}-f",
        "--at-version",
        "2",
        "--trust-source",
        *where,
        "run.num_steps=4",
    )
    assert fork.code == 0, fork.err
    assert report_of(tmp_path, f"{run_id}-f")["succeeded"]
    whole = relax(
        "runs",
        "fork",
        run_id,
        f"{run_id}-w",
        "--at-version",
        "2",
        "--trust-source",
        *where,
        "run.num_steps=4",
        "model.lora.rank=8",
    )
    assert whole.code != 0
    assert f"model.lora must be as in run {run_id}" in whole.err + whole.out
