"""The critic packs samples by the trainer's rules: it distinguishes a leak from rounding, and
counts cells.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_settings import small_run
from torch import Tensor

from relax_events.training.backend.torch_critic import TorchCritic
from relax_events.training.backend.value_model import ValueModel, ValueNetwork
from tests.event_samples import changed
from tests.unit.trainer_samples import make_samples, run_config

HIDDEN = ValueNetwork.hidden
MAX_TOKENS = 30


def opened(dtype: str = "float32") -> TorchCritic:
    tree = run_config(trainer={"max_tokens_per_micro_batch": MAX_TOKENS}).model_dump()
    tree["model"]["dtype"] = dtype
    return TorchCritic(small_run(tree | {"algorithm": {"name": "ppo"}}))


def rounded(self: ValueNetwork, ids: Tensor, positions: Tensor, media: Any = None) -> Tensor:
    """Be off by up to two steps of bfloat16 in rows with neighbours, as another kernel is."""
    hidden = HIDDEN(self, ids, positions, media)
    steps = torch.randint(-2, 3, hidden.shape, generator=torch.Generator().manual_seed(1))
    return hidden if ids.shape[1] < 8 else (hidden.float() * (1 + steps * 2.0**-8)).to(hidden.dtype)


def leaking(self: ValueNetwork, ids: Tensor, positions: Tensor, media: Any = None) -> Tensor:
    """Return a row's samples the positions of one sample, so that they see each other."""
    return HIDDEN(self, ids, torch.arange(ids.shape[1])[None], media)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_leak_is_distinguished_from_rounding(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened(dtype)._model.shares_rows
    monkeypatch.setattr(ValueNetwork, "hidden", leaking)
    assert not opened(dtype)._model.shares_rows
    monkeypatch.setattr(ValueNetwork, "hidden", rounded)
    assert opened("bfloat16")._model.shares_rows


def test_micro_batch_of_unpacked_samples_is_split_by_padded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = [
        changed(sample, values=np.zeros(len(sample.tokens), np.float32))
        for sample in make_samples(7, seed=1)
    ]
    whole = opened()
    whole.accumulate(samples)
    mine, num_cells = opened(), []
    evaluate = ValueModel.token_values

    def counted(self: ValueModel, batch: Any) -> Tensor:
        num_cells.append(batch.input_ids.size)
        return evaluate(self, batch)

    monkeypatch.setattr(ValueModel, "token_values", counted)
    mine._model.shares_rows = False
    mine.accumulate(samples)
    longest = max(len(sample.tokens) for sample in samples)
    assert len(num_cells) > 1
    assert max(num_cells) <= max(MAX_TOKENS, longest)
    assert mine.step().value_grad_norm == pytest.approx(whole.step().value_grad_norm, rel=1e-4)
