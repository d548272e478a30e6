"""Trainer and scorers route tokens through the experts that the engine chose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from engine_requests import finish, make_engine, make_prompt, make_request, plain_model, tiny_model
from routed_samples import chosen_by, routed_logprobs
from torch import Tensor
from transformers import AutoModelForCausalLM

from relax_events.config import ModelConfig
from relax_events.engines.protocol import GenerationRequest
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import StoredArray
from relax_events.events.routed_experts import ExpertShape
from relax_events.events.types import SampleReady
from relax_events.models.routers import Routers
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.runtime.validation import check_ready, check_trainable
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.scoring import LogprobScorer
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.batch.packing import pack
from relax_events.training.batch.shared_prefixes import PrefixSharing
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed
from tests.unit.trainer_samples import make_samples, run_config

FAMILY = "qwen3_moe"
SHAPE = ExpertShape(num_layers=2, top_k=2, num_experts=8)
ALL = PrefixSharing(min_tokens=1)
"""Makes every prompt that is shared cheaper than one that is not."""


@cache
def sampled() -> tuple[SampleReady, ...]:
    """Draw two samples of each of three prompts, with the experts that they went through."""
    engine = make_engine(tiny_model(FAMILY), model={"routing_replay": "rollout"})
    return samples_of(
        engine, [make_request(number, max_new_tokens=5 + 3 * number) for number in (1, 2, 4)]
    )


def samples_of(
    engine: TransformersEngine, requests: Sequence[GenerationRequest]
) -> tuple[SampleReady, ...]:
    """Generate, and make what the trainer reads."""
    for request in requests:
        engine.submit(request)
    generated, template = finish(engine), make_samples(1)[0]
    samples = []
    for group, request in enumerate(requests):
        for index, one in enumerate(request.samples):
            sample, num_prompt_tokens = generated[one.sample_id], len(request.prompt_tokens)
            tokens = np.concatenate([request.prompt_tokens, sample.tokens])
            mask = (np.arange(len(tokens)) >= num_prompt_tokens).astype(np.uint8)
            logprobs = np.zeros(len(tokens), np.float32)
            logprobs[num_prompt_tokens:] = sample.logprobs
            identity: dict[str, Any] = {
                "prompt_group_id": f"000000-{group:04}-0",
                "sample_id": f"000000-{group:04}-0/{index}",
                "sample_index": index,
            }
            arrays: dict[str, Any] = {
                "tokens": tokens,
                "loss_mask": mask,
                "rollout_logprobs": logprobs,
                "advantages": mask.astype(np.float32),
            }
            samples.append(
                changed(
                    template,
                    **identity,
                    **arrays,
                    num_prompt_tokens=num_prompt_tokens,
                    routed_experts=sample.routed_experts,
                )
            )
    return tuple(samples)


def policy(
    path: Path | None = None, *, replays: bool = True, dtype: torch.dtype | None = None
) -> PolicyModel:
    path = path or tiny_model(FAMILY)
    config = ModelConfig(
        dtype="float32", path=path, device="cpu", routing_replay="rollout" if replays else "none"
    )
    return PolicyModel(path, config=config, device=torch.device("cpu"), dtype=dtype)


def logprobs_of(model: PolicyModel, samples: tuple[SampleReady, ...], **layout: Any) -> Tensor:
    batch = pack(samples, vocab_size=model.vocab_size, experts=model.experts, **layout)
    return model.token_logprobs(batch).logprobs


def rollout_logprobs(samples: tuple[SampleReady, ...]) -> np.ndarray:
    return np.concatenate(
        [
            np.asarray(sample.rollout_logprobs)[np.asarray(sample.loss_mask).astype(bool)]
            for sample in samples
        ]
    )


def perturbed(module: torch.nn.Module) -> None:
    """Move the routers' weights, so that they choose otherwise."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("mlp.gate.weight"):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((0.3 * noise).to(parameter.dtype))


def by_hand(samples: tuple[SampleReady, ...], module: Any) -> np.ndarray:
    """Compute the loss tokens' log-probabilities with the samples' experts, one sample after the
    other."""
    parts = [
        routed_logprobs(module, np.asarray(sample.tokens), np.asarray(sample.routed_experts))[
            np.asarray(sample.loss_mask)[1:].astype(bool)
        ]
        for sample in samples
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize(
    "layout", [{}, {"share_rows": False}, {"sharing": ALL}, {"row_multiple": 16}]
)
def test_replayed_logprobs_match_the_engine_and_equal_those_without_replay(
    layout: dict[str, Any],
) -> None:
    samples = sampled()
    engine = rollout_logprobs(samples)
    with torch.no_grad():
        replayed, free = (
            logprobs_of(policy(replays=replays), samples, **layout) for replays in (True, False)
        )
    np.testing.assert_allclose(replayed.numpy(), engine, atol=1e-5)
    assert torch.equal(replayed, free)


@pytest.mark.parametrize("layout", [{}, {"share_rows": False}, {"sharing": ALL}])
def test_replayed_logprobs_use_the_samples_experts_after_router_updates(
    layout: dict[str, Any],
) -> None:
    samples, plain = sampled(), _fresh_plain()
    perturbed(plain)
    results = []
    for replays in (True, False):
        model = policy(replays=replays)
        perturbed(model.module)
        with torch.no_grad():
            results.append(logprobs_of(model, samples, **layout).numpy())
    replayed, free = results
    np.testing.assert_allclose(replayed, by_hand(samples, plain), atol=1e-5)
    assert np.abs(replayed - free).max() > 0.01


def test_replay_leaves_only_rounding_error_between_different_attention_kernels(
    tmp_path: Path,
) -> None:
    path = make_tiny(tmp_path, corpus=["12=21"], family=FAMILY, num_layers=4, seed=3)
    engine = make_engine(path, model={"routing_replay": "rollout", "dtype": "bfloat16"})
    samples = samples_of(
        engine,
        [
            make_request(number, num_samples=1, prompt=make_prompt(number, 16), max_new_tokens=48)
            for number in range(24)
        ],
    )
    differences = {}
    replays: tuple[Literal["none", "rollout"], ...] = ("none", "rollout")
    for replay in replays:
        config = ModelConfig(
            path=path, device="cpu", dtype="bfloat16", attention="eager", routing_replay=replay
        )
        with torch.no_grad():
            trainer = logprobs_of(
                PolicyModel(path, config=config, device=torch.device("cpu")), samples
            ).numpy()
        differences[replay] = np.abs(trainer - rollout_logprobs(samples))
    assert [(values > 0.1).sum() > 10 for values in differences.values()] == [True, False]
    assert differences["rollout"].max() < 0.1 < 0.3 < differences["none"].max()
    assert differences["rollout"].mean() < 0.5 * differences["none"].mean()


def _fresh_plain() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        tiny_model(FAMILY), dtype=torch.float64, experts_implementation="eager"
    ).eval()


def test_router_gradients_come_from_the_weights_of_the_replayed_experts() -> None:
    samples, model, plain = sampled()[:2], policy(), _fresh_plain()
    perturbed(model.module)
    perturbed(plain)
    logprobs_of(model, samples).sum().backward()
    gradients = dict(model.module.named_parameters())
    for layer in range(2):
        name, step = f"model.layers.{layer}.mlp.gate.weight", 1e-3
        gradient, weight = gradients[name].grad, plain.get_parameter(name)
        assert gradient is not None
        direction = (gradient / gradient.norm()).double()
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(sign * step * direction)
                sides.append(by_hand(samples, plain).sum())
                weight.sub_(sign * step * direction)
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(float(gradient.norm()), rel=1e-2)
        assert float(gradient.norm()) > 0.01


def test_on_policy_step_is_equal_with_and_without_routing_replay() -> None:
    states = []
    for replay in ("none", "rollout"):
        config = run_config(tiny_model(FAMILY))
        model = config.model.model_copy(update={"routing_replay": replay})
        backend = TorchBackend(config.model_copy(update={"model": model}), ranks=SingleRank())
        backend.accumulate(sampled())
        metrics = backend.step()
        assert metrics.mismatch_max_abs < 1e-5
        states.append(collect_weights(backend))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_scorer_replays_the_routing_of_the_samples() -> None:
    samples, path = sampled(), tiny_model(FAMILY, seed=4)
    config = ModelConfig(dtype="float32", path=path, device="cpu", routing_replay="rollout")
    scored = LogprobScorer(path, model=config, threads=1, max_tokens=64).score(samples)
    expected = by_hand(samples, plain_model(path))
    found = np.concatenate(
        [
            scores[np.asarray(sample.loss_mask).astype(bool)]
            for scores, sample in zip(scored, samples, strict=True)
        ]
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert any(
        (np.asarray(sample.routed_experts) != chosen_by(path, np.asarray(sample.tokens))).any()
        for sample in samples
    )


def test_samples_with_different_prompt_routing_do_not_share_the_prompt() -> None:
    first, second = sampled()[:2]
    experts = np.asarray(second.routed_experts).copy()
    experts[0] = (experts[0] + 1) % 8
    batch, other = (
        pack(both, vocab_size=300, sharing=ALL, experts=SHAPE)
        for both in ((first, second), (first, changed(second, routed_experts=experts)))
    )
    assert batch.tree is not None
    assert other.tree is None
    assert other.experts is not None
    np.testing.assert_array_equal(
        other.experts.experts[other.cells[len(first.tokens) : -1]], experts
    )


def test_last_token_and_padding_have_no_replayed_experts() -> None:
    samples = sampled()
    batch = pack(samples, vocab_size=300, share_rows=False, experts=SHAPE)
    assert batch.experts is not None
    reported = np.zeros(batch.input_ids.size, bool)
    for row, sample in enumerate(samples):
        start = row * batch.input_ids.shape[1]
        reported[start : start + len(sample.tokens) - 1] = True
    np.testing.assert_array_equal(batch.experts.is_replayed, reported)


@pytest.mark.parametrize(
    ("experts", "text"),
    [
        (None, "has no routed_experts, and model.routing_replay = 'rollout' needs the experts"),
        (
            np.zeros((1, 3, 2), np.uint8),
            r"must have the shape \(\d+, 2, 2\), all tokens but the last, got \(\d+, 3, 2\)",
        ),
        (np.full((1, 2, 2), 8, np.uint8), "must be 0 to 7, got 8 to 8"),
        (np.full((1, 2, 2), -1, np.int32), "must be 0 to 7, got -1 to -1"),
    ],
)
def test_sample_with_experts_invalid_for_the_model_is_poison(
    experts: np.ndarray | None, text: str
) -> None:
    sample = sampled()[0]
    filled = None if experts is None else np.repeat(experts, len(sample.tokens) - 1, axis=0)
    with pytest.raises(PoisonSample, match=f"sample {sample.sample_id}.*{text}"):
        check_trainable(
            changed(sample, routed_experts=filled),
            algorithm=run_config().algorithm,
            vocab_size=300,
            experts=SHAPE,
        )


def test_sample_must_have_routed_experts_for_all_tokens_but_the_last() -> None:
    sample = changed(
        sampled()[0],
        **dict.fromkeys(
            (
                "ref_logprobs",
                "actor_logprobs",
                "teacher_logprobs",
                "topk_ids",
                "topk_teacher_logprobs",
            )
        ),
    )
    assert check_ready([sample]) == [sample]
    experts = np.asarray(sample.routed_experts)
    for odd, text in {
        "long": experts[:-1],
        "flat": experts.reshape(len(experts), -1),
        "float": experts.astype(np.float32),
    }.items():
        rule = (
            "integers, got float32"
            if odd == "float"
            else r"\[\d+, layers, top_k\], a row for each token but the last"
        )
        with pytest.raises(PoisonSample, match=f"routed_experts must be {rule}"):
            check_ready([changed(sample, routed_experts=text)])


def test_unfetched_routed_experts_raise_a_type_error() -> None:
    sample = sampled()[0]
    stored = StoredArray("|u1", np.asarray(sample.routed_experts).shape, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="routed_experts is still in the object store"):
        SHAPE.checked(changed(sample, routed_experts=stored))


def test_expert_ids_take_one_byte_each_up_to_256_experts() -> None:
    assert [ExpertShape(48, 8, number).token_bytes for number in (128, 256, 257)] == [384, 384, 768]
    assert ExpertShape(1, 1, 257).compact(np.array([[[256]]], np.int32)).tolist() == [[[256]]]


def test_unsupported_router_rule_is_rejected_naming_the_router() -> None:
    model = policy(replays=False)
    routers = Routers(model.module.model, path=tiny_model(FAMILY))
    for layer in model.module.model.layers:
        layer.mlp.gate.norm_topk_prob = False
    tokens = torch.arange(5)[None]

    def forward() -> None:
        model.module(tokens, use_cache=False)

    routers.require_known_rule(forward)
    for layer in model.module.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda _, __, output: (output[0], output[1] * 2, output[2]), prepend=True
        )
    with pytest.raises(
        ConfigError,
        match=(
            "weigh experts by their softmax probability or sigmoid, but "
            "Qwen3MoeTopKRouter of the model in"
        ),
    ):
        routers.require_known_rule(forward)
