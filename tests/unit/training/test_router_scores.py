"""Routers that use sigmoids, groups of experts and a bias: their choices are replayed, and weighed by
their scores. The bias changes the choice alone, so replay of the choices before it must give the
log-probabilities before it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from relax_events.config import ModelConfig
from relax_events.events.types import SampleReady
from relax_events.models.routers import RoutedLayer, Routers, expert_probabilities, imbalance
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.batch.packing import pack
from tests.event_samples import changed
from tests.folders import kept_folder
from tests.unit.trainer_samples import make_samples

pytestmark = pytest.mark.unit
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 8},
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}


@cache
def model_of(family: str) -> Path:
    """Write a tiny random model with a dense first layer, and groups of experts in the others."""
    folder = kept_folder(family) / "model"
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    for file in tiny_model("qwen3").glob("token*"):
        copy(file, folder)
    return folder


def routers_of(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def policy(family: str, replay: str) -> PolicyModel:
    path = model_of(family)
    config = ModelConfig(dtype="float32", path=path, device="cpu", routing_replay=replay)
    return PolicyModel(path, config=config, device=torch.device("cpu"))


def routed(model: Any, sample: SampleReady, path: Path) -> SampleReady:
    """Return a sample with the experts that a model chooses."""
    routers = Routers(model.model, path=path)
    with torch.no_grad():
        model(torch.from_numpy(np.asarray(sample.tokens).astype(np.int64))[None], use_cache=False)
    return changed(sample, routed_experts=routers.take_choices()[:-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_by_groups_and_bias_are_replayed(family: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model_of(family))
    samples = [
        routed(plain, changed(sample, routed_experts=None), model_of(family))
        for sample in make_samples(4)
    ]
    replaying, choosing = policy(family, "rollout"), policy(family, "none")
    found = {}
    for name, model in (("replayed", replaying), ("chosen", choosing)):
        for router in routers_of(model.module):
            router.e_score_correction_bias += torch.linspace(-1, 1, 8).roll(3)
        batch = pack(samples, vocab_size=model.vocab_size, experts=model.experts)
        found[name] = model.token_logprobs(batch).logprobs
    expected = []
    for sample in samples:
        ids = torch.from_numpy(np.asarray(sample.tokens).astype(np.int64))
        with torch.no_grad():
            logits = plain(ids[None], use_cache=False).logits[0].double() / sample.temperature
        whole = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        expected.append(whole[torch.from_numpy(np.asarray(sample.loss_mask)[1:].astype(bool))])
    before = torch.cat(expected)
    torch.testing.assert_close(found["replayed"].double(), before, rtol=0, atol=1e-5)
    assert (found["chosen"].double() - before).abs().max() > 1e-3


def test_sigmoids_are_balanced_by_their_part_of_the_sum() -> None:
    logits = torch.tensor([[0.0, 0.0, -1e9, -1e9]], dtype=torch.float64)
    probabilities = expert_probabilities(logits, "sigmoid")
    assert probabilities[0].tolist() == [0.5, 0.5, 0.0, 0.0]
    loss = imbalance(
        [RoutedLayer(logits, torch.tensor([[0, 1]]), "sigmoid")],
        cells=torch.tensor([0]),
        num_tokens=torch.tensor([1]),
    )
    assert loss.tolist() == [4.0]  # 4 experts, two of them with a share of 1 and half of the sum
