"""The critic over two ranks, of backend `megatron` in several layouts and sharded by backend
`torch`, against one rank of backend `torch`: metrics, gradients, values, and checkpoints of either.
The ranks start once for all scenarios."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.critic_program import SCENARIOS
from tests.integration.rank_processes import run_ranks
from tests.integration.test_megatron import TOLERANCES, make_models

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("critic")
    make_models(folder)
    run_ranks("critic_program.py", str(folder), *SCENARIOS, num_ranks=2)
    # the program's own results: arrays of numpy among them
    found: dict[str, Any] = torch.load(folder / "results.pt", weights_only=False)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_learn_values_like_one(results: dict[str, Any], name: str) -> None:
    found, expected = results[name]["found"], results[name]["expected"]
    tolerance = TOLERANCES[SCENARIOS[name].family]
    for mine, alone in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine == pytest.approx(alone, rel=max(1e-6, tolerance), abs=tolerance)
    assert found["first"].keys() == expected["first"].keys()
    for key, value in expected["first"].items():
        # after one step a first moment is a tenth of the clipped gradient
        torch.testing.assert_close(found["first"][key], value, rtol=0, atol=tolerance)
        assert torch.equal(found["back"][key], found["first"][key]), key
    assert any(
        value.abs().max() > 1e-5 for key, value in found["first"].items() if "exp_avg." in key
    )
    for kind in ("scores", "scores_again"):
        for values, alone in zip(found[kind], expected[kind], strict=True):
            np.testing.assert_allclose(values, alone, rtol=0, atol=max(tolerance, 1e-6))
            assert np.abs(values).max() > 1e-3


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith("passes")])
def test_passes_of_several_paths_are_within_the_budget(results: dict[str, Any], name: str) -> None:
    budget = SCENARIOS[name].trainer["max_tokens_per_micro_batch"]
    assert 0 < max(results[name]["cells"]) <= budget


def test_a_pass_that_does_not_fit_is_named(results: dict[str, Any]) -> None:
    several, alone = (
        results["passes_tensor"]["too_large"][:3],
        results["passes_tensor"]["too_large"][3:],
    )
    assert all(num_paths > 1 and 20 < num_cells <= 40 for num_paths, num_cells, _ in several)
    assert all(num_paths == 1 and 16 < num_cells <= 20 for num_paths, num_cells, _ in alone)
    assert all(is_whole_sample for _, _, is_whole_sample in alone)
