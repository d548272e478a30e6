"""FSDP2 over two ranks against one rank: metrics, weights, checkpoints and memory. The ranks start
once for all scenarios."""

from typing import Any

import pytest
import torch

from relax_events.packages.examples.tiny_models import make_tiny
from tests.integration.rank_processes import run_ranks
from tests.integration.sharded_program import MEDIA_SETTINGS, SETTINGS

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded")
    make_tiny(folder / "model", corpus=["12=21"], hidden_size=32, seed=3)
    make_tiny(folder / "experts", corpus=["12=21"], family="qwen3_moe", hidden_size=32, seed=4)
    run_ranks("sharded_program.py", str(folder), num_ranks=2)
    found: dict[str, Any] = torch.load(folder / "results.pt")
    return found


@pytest.mark.parametrize("name", [*SETTINGS, *MEDIA_SETTINGS])
def test_two_ranks_that_share_a_model_train_like_one(results: dict[str, Any], name: str) -> None:
    together, alone = results[name], results[f"{name}_alone"]
    # routers round their probabilities to float32, so experts weigh otherwise by a bit
    precision = 1e-5 if name.startswith(("omni", "balanced", "replayed")) else 1e-9
    for mine, expected in zip(together["metrics"], alone["metrics"], strict=True):
        assert mine == pytest.approx(expected, rel=precision, abs=precision)
    assert together["weights"].keys() == alone["weights"].keys()
    for key, value in alone["weights"].items():
        torch.testing.assert_close(together["weights"][key], value, rtol=0, atol=precision)


def test_ranks_with_other_numbers_of_passes_train_as_in_one(results: dict[str, Any]) -> None:
    for key, value in results["plain"]["weights"].items():
        torch.testing.assert_close(results["passes"]["weights"][key], value, rtol=0, atol=1e-9)


def test_adapters_alone_are_the_state_and_the_version(results: dict[str, Any]) -> None:
    for name in ("adapters", "image_adapters"):
        assert results[name]["weights"]
        assert all(".lora_" in key for key in results[name]["weights"])
    assert all(".lora_" in name for name in results["adapter_shards"])


def test_the_same_ranks_give_the_same_bits(results: dict[str, Any]) -> None:
    assert results["plain"]["metrics"] == results["again"]["metrics"]
    for key, value in results["plain"]["weights"].items():
        assert torch.equal(value, results["again"]["weights"][key]), key


@pytest.mark.parametrize(
    ("kept", "again"),
    [("plain", "whole"), ("plain", "selective"), ("replayed", "replayed_whole")],
)
def test_recomputed_activations_give_the_same_bits(
    results: dict[str, Any], kept: str, again: str
) -> None:
    for key, value in results[kept]["weights"].items():
        assert torch.equal(value, results[again]["weights"][key]), key


def test_a_checkpoint_of_two_ranks_loads_on_one_and_back(results: dict[str, Any]) -> None:
    for key, value in results["plain"]["weights"].items():
        assert torch.equal(results["on_one_rank"][key], value), key
    assert results["saved"].keys() == results["back"].keys()
    for key, value in results["saved"].items():
        if not key.startswith("rng."):
            assert torch.equal(results["back"][key], value), key


def test_each_rank_holds_half_of_the_state(results: dict[str, Any]) -> None:
    held, num_parameters = results["bytes"]
    # weights, gradients and two moments in float64: 32 bytes a parameter, over two ranks
    assert held <= 1.02 * 32 / 2 * num_parameters
