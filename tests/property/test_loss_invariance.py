"""A step's loss and gradients do not depend on how its samples are ordered, split, packed or spread
over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.algorithms.description import installed_algorithms
from relax_events.algorithms.distillation import TokenSet
from relax_events.algorithms.objective import Objective, ObjectiveInputs
from relax_events.config import AlgorithmConfig
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.batch.packing import micro_batch_slices
from relax_events.training.batch.step_statistics import (
    compute_second_moment_cutoff,
    compute_whitening,
)
from relax_events.training.ranks import SingleRank
from tests.unit.trainer_samples import make_samples, run_config

SAMPLES = make_samples(8, seed=9)
NAMES = [spec.name for spec in installed_algorithms() if spec.learns_from == "rewards"]
AGGREGATIONS = ["token_mean", "sample_mean", "constant_length"]
CORRECTIONS = {
    "plain": {},
    "decoupled": {"correction": "decoupled", "old_logprobs": "actor"},
    "tis": {"correction": "tis", "old_logprobs": "trainer"},
    "tis over sequences": {
        "correction": "tis",
        "correction_level": "sequence",
        "old_logprobs": "actor",
    },
    "icepop": {"correction": "icepop", "old_logprobs": "actor"},
    "mask by the sequence's mean": {
        "correction": "mask",
        "correction_level": "sequence_mean",
        "old_logprobs": "actor",
    },
    "tis and rejected samples": {
        "correction": "tis",
        "old_logprobs": "actor",
        "rejection": "k3",
        "rejection_over": "mean",
        "rejection_high": 0.5,
        "veto_low": 0.15,
    },
    "rejected by the worst token": {
        "old_logprobs": "trainer",
        "rejection": "k2",
        "rejection_over": "max",
        "rejection_high": 1.0,
    },
    "rejected by the sequence's ratio": {
        "old_logprobs": "actor",
        "rejection": "k1",
        "rejection_over": "sum",
        "rejection_high": 3.0,
    },
    "bounded weights with masked tokens": {
        "correction": "tis",
        "old_logprobs": "actor",
        "rejection": "tv",
        "rejection_over": "token",
        "rejection_high": 0.3,
    },
    "KL to the sampling policy": {
        "old_logprobs": "actor",
        "kl_coefficient": 0.1,
        "kl_placement": "loss",
        "kl_base": "rollout",
        "kl_estimator": "k3+",
        "kl_bound": 1.0,
    },
    "opsm": {"opsm_threshold": 0.01},
    "m2": {"m2_threshold": 0.5},
    "whitened by token": {"whiten_advantages": "tokens"},
    "centred over the step": {"whiten_advantages": "mean"},
    "whitened by sample": {"whiten_advantages": "samples"},
    "kl and entropy": {
        "kl_coefficient": 0.1,
        "kl_placement": "loss",
        "kl_estimator": "low_variance",
        "kl_unbiased": True,
        "entropy_coefficient": 0.02,
    },
    "distilled by the sampled token": {
        "distill_coefficient": 0.5,
        "distill_placement": "loss",
        "distill_divergence": "jsd",
    },
    "distilled over a set": {
        "distill_coefficient": 0.5,
        "distill_placement": "loss",
        "distill_divergence": "forward_kl",
        "distill_tokens": "teacher_topk",
        "distill_top_k": 3,
    },
    "everything": {
        "correction": "tis",
        "old_logprobs": "actor",
        "opsm_threshold": 0.01,
        "m2_threshold": 0.5,
        "whiten_advantages": "tokens",
        "kl_coefficient": 0.1,
        "kl_placement": "loss",
        "entropy_coefficient": 0.02,
        "distill_coefficient": 0.5,
        "distill_placement": "loss",
    },
}
TEACHER = torch.linspace(2, -1, 15, dtype=torch.float64).sin().reshape(3, 5)
ALGORITHMS = st.sampled_from(NAMES)
CHANGES = st.sampled_from(list(CORRECTIONS))


@dataclass(frozen=True)
class LinearSample:
    """A sample of a softmax-linear policy: features, sampled tokens, and their recorded
    log-probabilities and advantages."""

    features: torch.Tensor
    tokens: torch.Tensor
    rollout: torch.Tensor
    actor: torch.Tensor
    ref: torch.Tensor
    advantages: torch.Tensor


def linear_samples(num_samples: int, seed: int) -> list[LinearSample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(num_samples):
        length = int(torch.randint(0, 7, (), generator=generator))
        uniform = torch.rand(length, 8, generator=generator, dtype=torch.float64)
        advantage = torch.randn(1, generator=generator, dtype=torch.float64)
        columns = (-3 * uniform[:, column] for column in (4, 5, 6))
        samples.append(
            LinearSample(
                uniform[:, :3], (uniform[:, 3] * 5).long(), *columns, advantage.expand(length)
            )
        )
    return samples


def inputs_of(
    weights: torch.Tensor,
    samples: list[LinearSample],
    algorithm: AlgorithmConfig,
    dtype: torch.dtype,
) -> ObjectiveInputs:
    """Lay samples end to end, and run the policy on them."""

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(sample, name) for sample in samples]).to(dtype)

    distributions = (joined("features") @ weights).log_softmax(-1)
    teacher = (joined("features") @ TEACHER.to(dtype)).log_softmax(-1)
    ids = teacher.topk(3).indices
    return ObjectiveInputs(
        logprobs=distributions.gather(-1, joined("tokens").long()[:, None])[:, 0],
        entropies=-(distributions.exp() * distributions).sum(-1),
        rollout_logprobs=joined("rollout"),
        old_logprobs=None
        if algorithm.old_logprobs == "trainer"
        else joined(algorithm.old_logprobs),
        ref_logprobs=joined("ref"),
        advantages=joined("advantages"),
        num_loss_tokens=torch.tensor([len(sample.tokens) for sample in samples]),
        teacher_logprobs=teacher.gather(-1, joined("tokens").long()[:, None])[:, 0],
        token_set=TokenSet(distributions.gather(-1, ids), teacher.gather(-1, ids))
        if algorithm.has_topk_loss
        else None,
    )


def step(
    parts: list[list[LinearSample]], algorithm: AlgorithmConfig, dtype: torch.dtype = torch.float64
) -> tuple[float, torch.Tensor]:
    """Run parts one after another as ranks and micro-batches do; return the loss and its
    gradient."""
    objective = Objective(algorithm, max_new_tokens=16)
    weights = (
        torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5).to(dtype).requires_grad_()
    )
    held = [inputs_of(weights, part, algorithm, dtype) for part in parts]
    advantages = [(inputs.advantages.numpy(), inputs.num_loss_tokens.numpy()) for inputs in held]
    whitening = compute_whitening(advantages, over=algorithm.whiten_advantages, ranks=SingleRank())
    squares = [
        (inputs.logprobs.detach() - inputs.rollout_logprobs).double().square().numpy()
        for inputs in held
    ]
    cutoff = (
        compute_second_moment_cutoff(squares, threshold=algorithm.m2_threshold, ranks=SingleRank())
        if algorithm.m2_threshold
        else None
    )
    total, units = 0.0, 0
    for inputs in held:
        white = torch.from_numpy(whitening.apply(inputs.advantages.double().numpy())).to(dtype)
        used = white if algorithm.whiten_advantages != "none" else inputs.advantages
        fields = {name: getattr(inputs, name) for name in inputs.__slots__} | {
            "advantages": used,
            "second_moment_cutoff": cutoff,
        }
        tokens = objective(ObjectiveInputs(**fields))
        loss = (tokens.token_weights * tokens.losses).sum()
        loss.backward()
        total, units = total + loss.item(), units + objective.num_units(inputs.num_loss_tokens)
    assert weights.grad is not None
    return total / units, weights.grad / units


def config_of(name: str, change: str, **settings: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"name": name, **CORRECTIONS[change], **settings})


def cut(data: st.DataObject, samples: list[LinearSample]) -> list[list[LinearSample]]:
    """Draw an order of the samples and a way to cut it into parts."""
    order = data.draw(st.permutations(range(len(samples))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(samples) - 1))))
    return [
        [samples[index] for index in order[start:end]]
        for start, end in zip([0, *cuts], [*cuts, len(samples)], strict=True)
    ]


def some_samples(seed: int, *, at_most: int = 10) -> list[LinearSample]:
    """Make samples of which at least one has a loss token."""
    samples = linear_samples(2 + seed % (at_most - 1), seed)
    return (
        samples
        if any(len(sample.tokens) for sample in samples)
        else linear_samples(at_most, seed + 1)
    )


@settings(max_examples=80)
@given(
    data=st.data(),
    seed=st.integers(0, 1000),
    name=ALGORITHMS,
    change=CHANGES,
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_loss_and_gradient_do_not_depend_on_order_and_micro_batches(
    data, seed, name, change, aggregation
):
    samples, algorithm = some_samples(seed), config_of(name, change, aggregation=aggregation)
    loss, gradient = step([samples], algorithm)
    cut_loss, cut_gradient = step(cut(data, samples), algorithm)
    assert cut_loss == pytest.approx(loss, rel=1e-11, abs=1e-13)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("change", CORRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_float32_loss_and_gradient_are_within_1e_4_of_float64(name, change):
    # Fixed samples: many random ones would include a token within float32's rounding of a clip
    # bound, where the gradient jumps.
    samples, algorithm = linear_samples(10, 3), config_of(name, change)
    loss, gradient = step([samples], algorithm)
    for parts in ([samples], [samples[7:], samples[2:7], samples[:2]]):
        other_loss, other_gradient = step(parts, algorithm, torch.float32)
        assert other_loss == pytest.approx(loss, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(other_gradient.double(), gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_is_the_weighted_mean_of_its_aggregation_mode(name, aggregation):
    samples = [sample for sample in linear_samples(6, 4) if len(sample.tokens)]
    per_sample = [
        step([[sample]], config_of(name, "plain", aggregation="token_mean"))[0]
        for sample in samples
    ]
    lengths = np.array([len(sample.tokens) for sample in samples])
    weights = {
        "token_mean": lengths / lengths.sum(),
        "sample_mean": np.full(len(samples), 1 / len(samples)),
        "constant_length": lengths / 16 / len(samples),
    }
    loss, _ = step([samples], config_of(name, "plain", aggregation=aggregation))
    assert loss == pytest.approx(weights[aggregation] @ per_sample, rel=1e-12, abs=1e-14)


def backend_step(samples, *, max_tokens, name, change, share_rows=True):
    algorithm = config_of(name, change).model_dump()
    backend = TorchBackend(
        run_config(algorithm=algorithm, trainer={"max_grad_norm": 1e9}),
        ranks=SingleRank(),
        dtype=torch.float64,
    )
    backend._model.shares_rows = share_rows
    gradients = []
    backend._parameters.update = lambda **_: gradients.append(backend._parameters.gradients.clone())
    for part in micro_batch_slices(
        [len(sample.tokens) for sample in samples], max_tokens=max_tokens
    ):
        backend.accumulate(samples[part])
    return backend.step().to_metrics(), gradients[0]


@cache
def whole_step(name: str, change: str):
    """Run the step in one micro-batch, each sample in a row of its own, padded."""
    return backend_step(SAMPLES, max_tokens=10_000, name=name, change=change, share_rows=False)


@settings(max_examples=20)
@given(
    order=st.permutations(SAMPLES),
    max_tokens=st.integers(1, 200),
    name=ALGORITHMS,
    change=CHANGES,
    share_rows=st.booleans(),
)
def test_backend_metrics_and_gradients_do_not_depend_on_order_and_packing(
    order, max_tokens, name, change, share_rows
):
    metrics, gradients = whole_step(name, change)
    other_metrics, other_gradients = backend_step(
        order, max_tokens=max_tokens, name=name, change=change, share_rows=share_rows
    )
    # Not 1e-12: RMSNorm works in float32 in any model.
    assert other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(other_gradients, gradients, rtol=1e-5, atol=1e-7)
