"""A whole run whose trainer is two tensor-parallel ranks of backend `megatron` that hold the device
in turn with the engine, against one rank of backend `torch` that stays there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Relax

from relax_events.examples.tiny_models import make_tiny
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
