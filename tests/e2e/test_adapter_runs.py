"""A whole run with `model.lora` learns the quickstart's task through killed workers, and its adapters
leave it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import Relax, call_relax, log_of, report_of
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
