"""A step's loss and gradients don't depend on how its samples were ordered, cut up, packed or spread over ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.algorithms.losses import kl_estimate, num_units, policy_surrogate, token_weights
from relax_events.training.packing import pack_order
from relax_events.training.ranks import SingleRank
from relax_events.training.torch_backend import TorchBackend
from tests.unit.trainer_samples import make_samples, run_config

SAMPLES = make_samples(8, seed=9)
AGGREGATIONS = st.sampled_from(["token_mean", "sample_mean"])
ALGORITHMS = st.sampled_from(["grpo", "gspo"])


def linear_policy(num_samples, seed):
    """Make samples of a softmax-linear policy: features, drawn tokens, and per-token figures."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(num_samples):
        length = int(torch.randint(0, 7, (), generator=generator))
        draw = torch.rand(length, 6, generator=generator, dtype=torch.float64)
        samples.append((draw[:, :3], (draw[:, 3] * 5).long(), -3 * draw[:, 4], -3 * draw[:, 5], (draw[:1, 0] - 0.5).expand(length)))
    return samples


def weighted_sum(weights, samples, aggregation, algorithm):
    """Give the unnormalised loss of a micro-batch, and its share of the normaliser."""
    features, tokens, old, ref, advantages = (torch.cat(column) for column in zip(*samples, strict=True))
    logprobs = (features @ weights).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    lengths = torch.tensor([len(sample[1]) for sample in samples])
    surrogate = policy_surrogate(
        logprobs, name=algorithm, old_logprobs=old, advantages=advantages, num_loss_tokens=lengths, clip_low=0.2, clip_high=0.3
    )
    losses = surrogate.losses + 0.1 * kl_estimate(logprobs, base_logprobs=ref, estimator="k3")
    return (token_weights(lengths, aggregation=aggregation, dtype=torch.float64) * losses).sum(), num_units(lengths, aggregation=aggregation)


def step(parts, aggregation, algorithm="grpo"):
    """Run parts one after another as ranks and micro-batches do; return the loss and its gradient."""
    weights = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5).requires_grad_()
    total, units = 0.0, 0
    for part in parts:
        loss, share = weighted_sum(weights, part, aggregation, algorithm)
        loss.backward()
        total, units = total + loss.item(), units + share
    return total / units, weights.grad / units


@given(data=st.data(), num_samples=st.integers(2, 12), seed=st.integers(0, 1000), aggregation=AGGREGATIONS, algorithm=ALGORITHMS)
def test_loss_and_gradient_are_the_same_in_any_order_and_cut(data, num_samples, seed, aggregation, algorithm):
    samples = linear_policy(num_samples, seed)
    if not any(len(sample[1]) for sample in samples):
        return
    order = data.draw(st.permutations(range(num_samples)))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_samples - 1))))
    shuffled = [samples[index] for index in order]
    parts = [shuffled[start:end] for start, end in zip([0, *cuts], [*cuts, num_samples], strict=True)]
    loss, gradient = step([samples], aggregation, algorithm)
    cut_loss, cut_gradient = step(parts, aggregation, algorithm)
    assert cut_loss == pytest.approx(loss, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-12, atol=1e-14)


@given(seed=st.integers(0, 1000), aggregation=AGGREGATIONS, algorithm=ALGORITHMS)
def test_loss_is_the_mean_that_the_aggregation_names(seed, aggregation, algorithm):
    samples = [sample for sample in linear_policy(6, seed) if len(sample[1])]
    if not samples:
        return
    per_sample = [step([[sample]], "token_mean", algorithm)[0] for sample in samples]
    lengths = [len(sample[1]) for sample in samples]
    expected = np.average(per_sample, weights=lengths if aggregation == "token_mean" else None)
    assert step([samples], aggregation, algorithm)[0] == pytest.approx(expected, rel=1e-12, abs=1e-14)


def backend_step(samples, *, max_tokens, aggregation, algorithm, share_rows=True):
    config = run_config(algorithm={"name": algorithm, "aggregation": aggregation, "kl_coefficient": 0.1}, trainer={"max_grad_norm": 1e9})
    backend = TorchBackend(config, ranks=SingleRank(), dtype=torch.float64)
    backend._model.shares_rows = share_rows
    gradients = []
    backend._flat.update = lambda **_: gradients.append(backend._flat.gradients.clone())
    for part in pack_order([len(sample.tokens) for sample in samples], max_tokens=max_tokens):
        backend.accumulate(samples[part])
    return backend.step().as_figures(), gradients[0]


WHOLE = {
    (aggregation, algorithm): backend_step(SAMPLES, max_tokens=10_000, aggregation=aggregation, algorithm=algorithm)
    for aggregation in ("token_mean", "sample_mean")
    for algorithm in ("grpo", "gspo")
}


@settings(max_examples=12, deadline=None)
@given(order=st.permutations(SAMPLES), max_tokens=st.integers(1, 200), aggregation=AGGREGATIONS, algorithm=ALGORITHMS, share_rows=st.booleans())
def test_backend_gives_the_same_figures_and_gradients_in_any_order_and_packing(order, max_tokens, aggregation, algorithm, share_rows):
    figures, gradients = WHOLE[aggregation, algorithm]
    other_figures, other_gradients = backend_step(order, max_tokens=max_tokens, aggregation=aggregation, algorithm=algorithm, share_rows=share_rows)
    # Not 1e-12: RMSNorm works in float32 in any model.
    assert other_figures == pytest.approx(figures, rel=1e-6, abs=1e-8)
    torch.testing.assert_close(other_gradients, gradients, rtol=1e-5, atol=1e-7)
