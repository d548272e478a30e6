"""Whole runs whose trainer is two tensor-parallel ranks of backend `megatron`, against one rank of
backend `torch`: all parameters, with the device held in turn with the engine; and adapters, which
leave the run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import Relax
from peft import PeftModel
from transformers import AutoModelForCausalLM

from relax_events.packages.examples.tiny_models import make_tiny
from tests.e2e.test_adapter_runs import logprobs
from tests.e2e.test_whole_runs import run_to_goal

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_tensor_parallel_ranks_run_what_one_rank_of_backend_torch_runs(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    model = make_tiny(tmp_path / "model", corpus=["12=21"], seed=3)  # with two key-value heads
    sync = (
        f"model.path={model}",
        "run.mode=sync",
        "run.max_staleness=0",
        "trainer.learning_rate=1e-3",
    )
    one = run_to_goal(relax, run_file, bootstrap_servers, *sync, f"run.id={run_id}-one")
    two = run_to_goal(
        relax,
        run_file,
        bootstrap_servers,
        *sync,
        f"run.id={run_id}-two",
        "trainer.backend=megatron",
        "trainer.ranks=2",
        "trainer.tensor_parallel=2",
        "devices.time_share=true",
    )
    assert two["staleness_max"] == one["staleness_max"] == 0
    assert two["curves"]["num_tokens"] == one["curves"]["num_tokens"]
    assert two["curves"]["reward_mean"] == pytest.approx(one["curves"]["reward_mean"], abs=1e-6)
    assert two["curves"]["loss"] == pytest.approx(one["curves"]["loss"], abs=1e-4)
    assert two["curves"]["grad_norm"] == pytest.approx(one["curves"]["grad_norm"], rel=1e-3)
    assert min(one["curves"]["grad_norm"]) > 0


def test_adapters_of_tensor_parallel_ranks_leave_the_run(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    model = make_tiny(tmp_path / "model", corpus=["12=21"], seed=3)
    settings = (
        f"model.path={model}",
        "model.lora.rank=4",
        "run.mode=sync",
        "run.max_staleness=0",
        "trainer.learning_rate=1e-2",
    )
    parallel = ("trainer.backend=megatron", "trainer.ranks=2", "trainer.tensor_parallel=2")
    made = {}
    for name, more in (("one", ()), ("two", parallel)):
        given = (*settings, *more, f"run.id={run_id}-{name}")
        run_to_goal(relax, run_file, bootstrap_servers, *given)
        for kind, options in (("adapters", ()), ("merged", ("--merged",))):
            folder = tmp_path / f"{name}-{kind}"
            servers = ("--bootstrap-servers", bootstrap_servers)
            ended = relax(
                "models", "export", f"{run_id}-{name}", "--to", folder, *options, *servers
            )
            assert ended.code == 0, ended.err
            base = AutoModelForCausalLM.from_pretrained(
                folder if options else model, dtype="float32"
            )
            loaded = base if options else PeftModel.from_pretrained(base, folder)
            made[name, kind] = logprobs(loaded)
    base = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    assert float((made["two", "merged"] - logprobs(base)).abs().max()) > 0.01
    for other in made.values():  # of a trainer of backend `torch`, the model's own in transformers
        torch.testing.assert_close(made["two", "adapters"], other, atol=1e-5, rtol=0)
