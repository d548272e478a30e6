"""The load-balancing loss of a mixture of experts, compared with transformers' own, sample by
sample and layer by layer.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from relax_events.errors import ConfigError
from relax_events.events.types import SampleReady
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.batch.packing import pack
from relax_events.training.batch.shared_prefixes import PrefixSharing
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed
from tests.float64_experts import use_float64_experts
from tests.folders import kept_folder
from tests.unit.trainer_samples import make_samples, run_config, tiny_model

COEFFICIENT = 0.3


@pytest.fixture(autouse=True)
def _float64(monkeypatch: pytest.MonkeyPatch) -> None:
    use_float64_experts(monkeypatch)


@cache
def mixture() -> Path:
    return make_tiny(
        kept_folder("mixture"), corpus=["12=21"], family="qwen3_moe", hidden_size=32, seed=4
    )


@cache
def samples() -> list[SampleReady]:
    return make_samples(6, seed=2, model_path=mixture())


def train(micro_batches: list[list[SampleReady]], **settings: Any) -> dict[str, Any]:
    """Accumulate micro-batches in float64; return the gradients and the metrics."""
    algorithm = {"load_balancing_coefficient": COEFFICIENT} | settings.pop("algorithm", {})
    config = run_config(mixture(), algorithm=algorithm, trainer=settings)
    backend = TorchBackend(config, ranks=SingleRank(), dtype=torch.float64)
    backend._model.prefix_sharing = PrefixSharing(min_tokens=1)
    for micro_batch in micro_batches:
        backend.accumulate(micro_batch)
    parameters = backend._parameters
    gradients = parameters.gradients.clone()  # type: ignore[union-attr]
    return {"gradients": gradients, "metrics": backend.step().to_metrics()}


def plain_losses() -> list[Tensor]:
    """Compute the loss of each sample from whole forward passes by transformers alone, with
    gradient.
    """
    model = AutoModelForCausalLM.from_pretrained(mixture(), dtype=torch.float64)
    config, found = model.config, []
    for sample in samples():
        ids = torch.from_numpy(np.asarray(sample.tokens).astype(np.int64))[None]
        output = model(ids, output_router_logits=True)
        layers = [
            load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok)
            for logits in output.router_logits
        ]
        found.append(torch.stack(layers).mean())
    return found


def test_metric_is_transformers_loss_of_each_sample_weighted_by_its_loss_tokens() -> None:
    counts = np.array([np.count_nonzero(sample.loss_mask) for sample in samples()])
    losses = np.array([float(loss.detach()) for loss in plain_losses()])
    found = train([samples()])["metrics"]["load_balancing_loss"]
    assert found == pytest.approx(float((losses * counts).sum() / counts.sum()), rel=1e-5)
    by_sample = train([samples()], algorithm={"aggregation": "sample_mean"})
    assert by_sample["metrics"]["load_balancing_loss"] == pytest.approx(losses.mean(), rel=1e-5)


def test_its_gradient_is_transformers_times_the_coefficient() -> None:
    losses = plain_losses()
    counts = [int(np.count_nonzero(sample.loss_mask)) for sample in samples()]
    total = COEFFICIENT * sum(
        loss * count for loss, count in zip(losses, counts, strict=True)
    )  # the trainer divides by the loss tokens of the step
    assert isinstance(total, Tensor)
    model_gradients = _gradients_of(total)
    added = train([samples()])["gradients"]
    added -= train([samples()], algorithm={"load_balancing_coefficient": 0.0})["gradients"]
    norm = float(torch.linalg.vector_norm(model_gradients))
    assert norm > 1e-3
    assert float(torch.linalg.vector_norm(added)) == pytest.approx(norm, rel=1e-5)


def _gradients_of(total: Tensor) -> Tensor:
    leaves: list[Tensor] = []
    waiting, seen = [total.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return torch.cat([one.flatten() for one in gradients if one is not None])


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": "whole"},
        {"share_prompts": False},
    ],
)
def test_packing_and_recomputation_change_nothing(settings: dict[str, Any]) -> None:
    whole = train([samples()])
    split = train([samples()[:2], samples()[2:5], samples()[5:]], **settings)
    torch.testing.assert_close(split["gradients"], whole["gradients"], rtol=1e-5, atol=1e-8)
    key = "load_balancing_loss"
    assert split["metrics"][key] == pytest.approx(whole["metrics"][key], rel=1e-6)


def test_tokens_that_samples_share_count_for_each_of_them() -> None:
    branched = [
        changed(sample, tokens=np.concatenate([samples()[0].tokens[:2], sample.tokens[2:]]))
        for sample in samples()
    ]
    assert pack(branched, vocab_size=256, sharing=PrefixSharing(min_tokens=1)).tree is not None
    shared, apart = train([branched]), train([branched], share_prompts=False)
    difference = torch.linalg.vector_norm(shared["gradients"] - apart["gradients"])
    assert float(difference) < 1e-6 * float(torch.linalg.vector_norm(apart["gradients"]))
    key = "load_balancing_loss"
    assert shared["metrics"][key] == pytest.approx(apart["metrics"][key], rel=1e-6)


def test_model_without_experts_is_refused() -> None:
    config = run_config(tiny_model(), algorithm={"load_balancing_coefficient": 0.1})
    with pytest.raises(ConfigError, match="load_balancing_coefficient needs a mixture"):
        TorchBackend(config, ranks=SingleRank())
