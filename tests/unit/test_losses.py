"""Losses against numbers worked out by hand."""

import math

import pytest
import torch

from relax_events.algorithms.losses import (
    MAX_LOG_RATIO,
    clipped_sequence_surrogate,
    clipped_surrogate,
    kl_estimate,
    num_units,
    token_weights,
)


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


SEQUENCES = {"clip_low": 3e-4, "clip_high": 4e-4}


def sequence_surrogate(log_ratios: list[list[float]], advantages: list[float]):
    lengths = torch.tensor([len(sample) for sample in log_ratios])
    logprobs = torch.tensor([value for sample in log_ratios for value in sample], dtype=torch.float64, requires_grad=True)
    spread = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths)
    result = clipped_sequence_surrogate(
        logprobs, old_logprobs=torch.zeros(len(logprobs), dtype=torch.float64), advantages=spread, num_loss_tokens=lengths, **SEQUENCES
    )
    return logprobs, result, lengths


def test_sequence_surrogate_matches_hand_computation():
    # Means 1e-4 (within), none, 1e-3 with gain (clipped to 1.0004), -1e-3 with loss (clipped to 0.9997), 1e-3 with loss (kept).
    log_ratios = [[3e-4, -1e-4, 1e-4], [], [1e-3], [-3e-3, 1e-3], [0.0, 2e-3]]
    _, result, _ = sequence_surrogate(log_ratios, [1.0, 9.0, 2.0, -2.0, -1.0])
    assert result.losses.tolist() == pytest.approx([-math.exp(1e-4)] * 3 + [-2 * 1.0004] + [2 * 0.9997] * 2 + [math.exp(1e-3)] * 2, rel=1e-12)
    assert result.clipped_high.tolist() == [False] * 3 + [True] + [False] * 4
    assert result.clipped_low.tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert result.ratio.tolist() == pytest.approx([math.exp(1e-4)] * 3 + [math.exp(1e-3)] + [math.exp(-1e-3)] * 2 + [math.exp(1e-3)] * 2)


def test_sequence_surrogate_has_the_gradient_of_the_paper():
    logprobs, result, lengths = sequence_surrogate([[3e-4, -1e-4, 1e-4], [1e-3], [0.0, 2e-3]], [1.5, 2.0, -1.0])
    weights = token_weights(lengths, aggregation="sample_mean", dtype=torch.float64)
    (weights * result.losses).sum().backward()
    # Equation 10 with the sign of a loss: -s A / |y| at every token of a sample, and nothing where the sample is clipped.
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(1e-4) * 1.5 / 3] * 3 + [0.0] + [math.exp(1e-3) / 2] * 2, rel=1e-12)


def test_sequence_surrogate_is_the_token_surrogate_for_samples_of_one_token():
    ratios, advantages = [1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0]
    _, by_token = surrogate(ratios, advantages)
    logprobs = torch.tensor(ratios, dtype=torch.float64).log()
    by_sequence = clipped_sequence_surrogate(
        logprobs,
        old_logprobs=torch.zeros(5, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        num_loss_tokens=torch.ones(5, dtype=torch.int64),
        clip_low=0.2,
        clip_high=0.3,
    )
    assert by_sequence.losses.tolist() == by_token.losses.tolist()
    assert by_sequence.clipped_low.tolist() == by_token.clipped_low.tolist()
