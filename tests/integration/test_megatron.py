"""Backend `megatron` in several layouts of ranks against backend `torch` on one: metrics, gradients,
weights, and checkpoints of either. The ranks start once for the scenarios of a module."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from relax_events.examples.tiny_models import make_tiny
from tests.integration.megatron_program import FOUR, LONG, ROUNDED, SCENARIOS, SHORT
from tests.integration.rank_processes import run_ranks

pytestmark = pytest.mark.integration
OMNI = "qwen3_omni_moe_thinker"
TOLERANCES = {
    **dict.fromkeys(("qwen3", "tied", "deep"), 1e-9),
    **dict.fromkeys(("qwen3_vl", "deep_vl"), 1e-6),
    **dict.fromkeys(("qwen3_moe", "deep_moe"), 1e-4),
    **dict.fromkeys(("qwen3_vl_moe", OMNI), 1e-3),
}
"""In float64, after two steps with a learning rate of 1e-2. A router in float32 alone moves weights
by 1.5e-5."""


def make_models(folder: Path) -> None:
    """Write dense models and mixtures of experts, shallow and deep, and two with tied embeddings."""
    for family, deep in (("qwen3", "deep"), ("qwen3_moe", "deep_moe")):
        make_tiny(folder / family, corpus=["12=21"], family=family, seed=3)
        make_tiny(folder / deep, corpus=["12=21"], family=family, num_layers=4, seed=3)
    for name, family, num_layers in (
        ("qwen3_vl", "qwen3_vl", 2),
        ("deep_vl", "qwen3_vl", 4),
        ("qwen3_vl_moe", "qwen3_vl_moe", 2),
        (OMNI, OMNI, 2),
    ):
        make_tiny(
            folder / name, corpus=["red", "do", "What is it?"], family=family,
            num_layers=num_layers, seed=3,
        )  # fmt: skip
    for name, source in (("tied", "qwen3"), ("deep", "deep")):
        tied = AutoModelForCausalLM.from_pretrained(folder / source)
        tied.config.tie_word_embeddings = True
        tied.tie_weights()
        tied.save_pretrained(folder / name)


def run_program(folder: Path, names: list[str]) -> dict[str, Any]:
    """Run scenarios; return their results."""
    num_ranks = SCENARIOS[names[0]].num_ranks
    make_models(folder)
    run_ranks("megatron_program.py", str(folder), *names, num_ranks=num_ranks)
    found: dict[str, Any] = torch.load(folder / "results.pt")
    return found


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_program(tmp_path_factory.mktemp("short"), list(SHORT))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_program(tmp_path_factory.mktemp("long"), list(LONG))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_program(tmp_path_factory.mktemp("four"), list(FOUR))


def require_equal(found: dict[str, Any], name: str) -> None:
    """Require that a scenario gave what one rank gives."""
    expected, tolerance = found["expected"], TOLERANCES[SCENARIOS[name].family]
    if name.startswith("balanced"):
        tolerance = 1e-3
    if tolerance == 1e-3:  # gradients that nearly cancel, which AdamW makes large
        for key, value in expected["first"].items():
            if key.startswith("exp_avg."):
                torch.testing.assert_close(found["first"][key], value, rtol=0, atol=1e-6)
    for kind in ("metrics", "metrics_again"):
        for mine, alone in zip(found[kind], expected[kind], strict=True):
            assert mine == pytest.approx(alone, rel=max(1e-6, tolerance), abs=tolerance), name
    # after one step a first moment is a tenth of the clipped gradient
    for kind in ("first", "weights", "weights_again"):
        wanted = {key: one for key, one in expected[kind].items() if key[:4] != "rng."}
        assert found[kind].keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[kind][key], value, rtol=0, atol=tolerance)
    assert any(
        value.abs().max() > 1e-5 for key, value in found["first"].items() if "exp_avg." in key
    )
    assert all(found.get("rounded", [True]))
    assert ("rounded" in found) == (name in ROUNDED)
    for key, value in found["first"].items():
        assert torch.equal(found["back"][key], value), key


@pytest.mark.parametrize("name", SHORT)
def test_tensor_parallel_ranks_train_like_one(short: dict[str, Any], name: str) -> None:
    require_equal(short[name], name)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LONG)
def test_two_ranks_train_like_one(long: dict[str, Any], name: str) -> None:
    require_equal(long[name], name)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_like_one(four: dict[str, Any], name: str) -> None:
    require_equal(four[name], name)
