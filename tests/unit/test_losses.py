"""Losses against numbers worked out by hand."""

import math

import pytest
import torch

from relax_events.algorithms.losses import MAX_LOG_RATIO, clipped_surrogate, kl_estimate, num_units, token_weights


def surrogate(ratios: list[float], advantages: list[float]):
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    result = clipped_surrogate(
        logprobs,
        old_logprobs=torch.zeros(len(ratios), dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.3,
    )
    return logprobs, result


def test_clipped_surrogate_matches_hand_computation():
    # Within; above with gain (clipped to 1.3); above with loss (kept); below with gain (kept); below with loss (clipped to 0.8).
    _, result = surrogate([1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0])
    assert result.losses.tolist() == pytest.approx([-2.2, -2.6, 3.0, -1.0, 1.6])
    assert result.clipped_high.tolist() == [False, True, False, False, False]
    assert result.clipped_low.tolist() == [False, False, False, False, True]
    assert result.ratio.tolist() == pytest.approx([1.1, 1.5, 1.5, 0.5, 0.5])


def test_clipped_surrogate_has_no_gradient_where_clipped():
    logprobs, result = surrogate([1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0])
    result.losses.sum().backward()
    # d(-r A)/d logprob = -r A
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.2, 0.0, 3.0, -1.0, 0.0])


def test_clipped_surrogate_is_the_policy_gradient_on_policy():
    logprobs, result = surrogate([1.0, 1.0], [0.5, -3.0])
    result.losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 3.0])


def test_clipped_surrogate_stays_finite_when_the_ratio_would_overflow():
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    result = clipped_surrogate(
        logprobs, old_logprobs=torch.tensor([-200.0, -200.0]), advantages=torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.2
    )
    result.losses.sum().backward()
    assert result.losses.tolist() == pytest.approx([-1.2, math.exp(MAX_LOG_RATIO)])
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.5, -0.5, 0.0]), ("k2", [0.125, 0.125, 0.0]), ("k3", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 0.0])],
)
def test_kl_estimate_matches_hand_computation(estimator, expected):
    values = kl_estimate(torch.tensor([-1.0, -2.0, -3.0]), base_logprobs=torch.tensor([-1.5, -1.5, -3.0]), estimator=estimator)
    assert values.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimate_is_unbiased_over_a_whole_distribution(estimator):
    policy, base = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), base.tolist(), strict=True))
    estimates = kl_estimate(policy.log(), base_logprobs=base.log(), estimator=estimator)
    assert float((policy * estimates).sum()) == pytest.approx(exact, rel=1e-5)


def test_kl_estimate_stays_finite_when_the_base_is_far_off():
    assert float(kl_estimate(torch.tensor([-500.0]), base_logprobs=torch.tensor([0.0]), estimator="k3")) == pytest.approx(
        math.exp(20) - 501, rel=1e-5
    )


def test_token_weights_count_each_token_once_for_token_mean():
    lengths = torch.tensor([1, 3, 0])
    assert token_weights(lengths, aggregation="token_mean").tolist() == [1.0] * 4
    assert num_units(lengths, aggregation="token_mean") == 4


def test_token_weights_sum_to_one_for_each_sample_for_sample_mean():
    lengths = torch.tensor([2, 0, 4])
    assert token_weights(lengths, aggregation="sample_mean").tolist() == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert num_units(lengths, aggregation="sample_mean") == 2
