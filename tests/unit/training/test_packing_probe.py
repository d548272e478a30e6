"""At its start the model distinguishes a leak between packed samples from another kernel's
rounding, in any dtype.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from relax_events.config import ModelConfig
from relax_events.training.backend.policy_model import PolicyModel
from tests.unit.trainer_samples import tiny_model

HIDDEN = PolicyModel._hidden


def opened(dtype: str) -> PolicyModel:
    return PolicyModel(
        tiny_model(), config=ModelConfig(path=tiny_model(), dtype=dtype), device=torch.device("cpu")
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_that_isolates_packed_samples_shares_rows_and_prefixes(dtype: str) -> None:
    model = opened(dtype)
    assert model.shares_rows
    assert model.prefix_sharing is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_that_attends_across_samples_shares_no_rows_or_prefixes(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaking(
        self: PolicyModel, ids: Tensor, positions: Tensor, tree: Any = None, media: Any = None
    ) -> Tensor:
        return HIDDEN(self, ids, torch.arange(ids.shape[1])[None], None, media)

    monkeypatch.setattr(PolicyModel, "_hidden", leaking)
    model = opened(dtype)
    assert not model.shares_rows
    assert model.prefix_sharing is None


def test_kernel_rounding_differences_are_not_taken_for_a_leak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of rows with neighbours, each hidden value is off by up to two steps of bfloat16."""

    def rounded(
        self: PolicyModel, ids: Tensor, positions: Tensor, tree: Any = None, media: Any = None
    ) -> Tensor:
        hidden = HIDDEN(self, ids, positions, tree, media)
        if ids.shape[1] < 8:
            return hidden
        steps = torch.randint(-2, 3, hidden.shape, generator=torch.Generator().manual_seed(1))
        return (hidden.float() * (1 + steps * 2.0**-8)).to(hidden.dtype)

    monkeypatch.setattr(PolicyModel, "_require_linear_head", lambda *_: None)
    monkeypatch.setattr(PolicyModel, "_hidden", rounded)
    model = opened("bfloat16")
    assert model.shares_rows
    assert model.prefix_sharing is not None
