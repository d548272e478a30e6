"""After a replay on kernels with other rounding, master weights keep updates below the published
precision.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from relax_events.training.backend.master_weights import nearest_value_rounding_to, reconcile
from relax_events.training.backend.state import TrainerState

LEARNING_RATE = 1e-6
NUM_STEPS = 50


def train(initial: Tensor, *, seed: int, rounding: float) -> Tensor:
    """Take AdamW steps in float32 over gradients with a drift; `rounding` perturbs each gradient as
    another kernel's rounding does."""
    data, noise = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    weights = torch.nn.Parameter(initial.float())
    optimizer = torch.optim.AdamW([weights], lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0)
    drift = torch.randn(len(initial), generator=data) * 0.3
    for _ in range(NUM_STEPS):
        gradient = drift + torch.randn(len(initial), generator=data)
        weights.grad = gradient * (1 + rounding * torch.randn(len(initial), generator=noise))
        optimizer.step()
    return weights.detach()


def test_master_weights_keep_the_learned_direction_despite_different_rounding() -> None:
    initial = (torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    master = train(initial, seed=1, rounding=0.0)
    replayed = train(initial, seed=1, rounding=2**-8)
    published = master.bfloat16()
    state, found = reconcile(
        TrainerState(policy_version=NUM_STEPS, tensors={"model.w": replayed, "exp_avg.w": initial}),
        {"w": published},
    )
    kept = state.tensors["model.w"]
    learned = master - initial.float()
    assert torch.equal(kept.bfloat16(), published)
    assert float(((kept - initial.float()) * learned).sum() / learned.square().sum()) > 0.99
    assert float((kept - master).norm() / learned.norm()) < 0.05
    assert (
        float((published.float() - master).norm() / learned.norm()) > 0.5
    )  # what the published weights alone would have lost
    assert 0 < found.num_moved < found.num_weights // 100
    assert found.largest_move < LEARNING_RATE
    assert state.tensors["exp_avg.w"] is initial


def test_master_weights_that_round_to_the_published_ones_are_unchanged() -> None:
    replayed = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    state, found = reconcile(
        TrainerState(policy_version=1, tensors={"model.w": replayed}), {"w": replayed.half()}
    )
    assert torch.equal(state.tensors["model.w"], replayed)
    assert (found.num_moved, found.largest_move) == (0, 0.0)


def test_full_precision_published_weights_replace_the_replayed_ones() -> None:
    replayed, published = torch.zeros(3), torch.tensor([1.0, -1.0, 0.0])
    state, found = reconcile(
        TrainerState(policy_version=1, tensors={"model.w": replayed}), {"w": published}
    )
    assert torch.equal(state.tensors["model.w"], published)
    assert (found.num_weights, found.num_moved, found.largest_move) == (3, 2, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(wanted=st.floats(-6e4, 6e4), value=st.floats(-6e4, 6e4, width=32))
def test_master_weight_is_the_nearest_value_rounding_to_the_published_one(
    dtype: torch.dtype, wanted: float, value: float
) -> None:
    published, replayed = torch.tensor([wanted]).to(dtype), torch.tensor([value])
    nearest = nearest_value_rounding_to(published, replayed)
    assert torch.equal(nearest.to(dtype), published)
    nearer = torch.nextafter(nearest, replayed)
    assert torch.equal(nearest, replayed) or not torch.equal(nearer.to(dtype), published)


def test_non_finite_replayed_weight_is_replaced_by_the_published_one() -> None:
    published = torch.tensor([1.5, -2.0]).bfloat16()
    assert nearest_value_rounding_to(
        published, torch.tensor([float("nan"), float("inf")])
    ).tolist() == [1.5, -2.0]
