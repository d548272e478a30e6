"""Losses against numbers worked out by hand."""

import math

import pytest
import torch

from relax_events.algorithms.kl import kl_estimate
from relax_events.algorithms.losses import (
    MAX_LOG_RATIO,
    LossTokens,
    cispo_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    ppo_clip_loss,
    reinforce_loss,
    sapo_loss,
)
from relax_events.algorithms.objective import num_units, token_weights


def loss_tokens(
    logprobs: torch.Tensor,
    *,
    advantages: list[float],
    lengths: list[int] | None = None,
    old: torch.Tensor | None = None,
) -> LossTokens:
    """Make the tokens of samples, of one token each unless lengths are given; the advantages are
    one a sample."""
    num_loss_tokens = torch.tensor(lengths or [1] * len(logprobs))
    return LossTokens(
        logprobs=logprobs,
        old_logprobs=torch.zeros_like(logprobs).detach() if old is None else old,
        advantages=torch.tensor(advantages, dtype=logprobs.dtype).repeat_interleave(
            num_loss_tokens
        ),
        num_loss_tokens=num_loss_tokens,
    )


def gradient_of(logprobs: torch.Tensor, losses: torch.Tensor) -> list[float]:
    """Return the gradient of the sum of the losses."""
    losses.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist()


def surrogate(ratios: list[float], advantages: list[float]):
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    return logprobs, ppo_clip_loss(
        loss_tokens(logprobs, advantages=advantages), clip_low=0.2, clip_high=0.3
    )


def test_clipped_surrogate_matches_hand_computation():
    # Within; above with gain (clipped to 1.3); above with loss (kept); below with gain (kept);
    # below with loss (clipped to 0.8).
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
    tokens = loss_tokens(logprobs, advantages=[1.0, -1.0], old=torch.tensor([-200.0, -200.0]))
    result = ppo_clip_loss(tokens, clip_low=0.2, clip_high=0.2)
    result.losses.sum().backward()
    assert result.losses.tolist() == pytest.approx([-1.2, math.exp(MAX_LOG_RATIO)])
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -0.5, 0.0]),
        ("k2", [0.125, 0.125, 0.0]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 0.0]),
        ("abs", [0.5, 0.5, 0.0]),
        ("low_variance", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 0.0]),
        ("k1+", [0.5, -0.5, 0.0]),
        ("k3+", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 0.0]),
        ("abs+", [0.5, 0.5, 0.0]),
    ],
)
def test_kl_estimate_matches_hand_computation(estimator, expected):
    values = kl_estimate(
        torch.tensor([-1.0, -2.0, -3.0]),
        base_logprobs=torch.tensor([-1.5, -1.5, -3.0]),
        estimator=estimator,
    )
    assert values.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimate_is_unbiased_over_a_whole_distribution(estimator):
    policy, base = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), base.tolist(), strict=True))
    estimates = kl_estimate(policy.log(), base_logprobs=base.log(), estimator=estimator)
    assert float((policy * estimates).sum()) == pytest.approx(exact, rel=1e-5)


def test_kl_estimate_stays_finite_when_base_logprobs_differ_greatly():
    assert float(
        kl_estimate(torch.tensor([-500.0]), base_logprobs=torch.tensor([0.0]), estimator="k3")
    ) == pytest.approx(math.exp(20) - 501, rel=1e-5)


def test_token_weights_count_each_token_once_for_token_mean():
    lengths = torch.tensor([1, 3, 0])
    assert token_weights(lengths, aggregation="token_mean").tolist() == [1.0] * 4
    assert num_units(lengths, aggregation="token_mean") == 4


def test_token_weights_sum_to_one_for_each_sample_for_sample_mean():
    lengths = torch.tensor([2, 0, 4])
    assert token_weights(lengths, aggregation="sample_mean").tolist() == [
        0.5,
        0.5,
        0.25,
        0.25,
        0.25,
        0.25,
    ]
    assert num_units(lengths, aggregation="sample_mean") == 2


SEQUENCES = {"clip_low": 3e-4, "clip_high": 4e-4}


def sequence_surrogate(log_ratios: list[list[float]], advantages: list[float], function=gspo_loss):
    lengths = [len(sample) for sample in log_ratios]
    logprobs = torch.tensor(
        [value for sample in log_ratios for value in sample],
        dtype=torch.float64,
        requires_grad=True,
    )
    return (
        logprobs,
        function(loss_tokens(logprobs, advantages=advantages, lengths=lengths), **SEQUENCES),
        torch.tensor(lengths),
    )


def test_sequence_surrogate_matches_hand_computation():
    # Means 1e-4 (within), none, 1e-3 with gain (clipped to 1.0004), -1e-3 with loss (clipped to
    # 0.9997), 1e-3 with loss (kept).
    log_ratios = [[3e-4, -1e-4, 1e-4], [], [1e-3], [-3e-3, 1e-3], [0.0, 2e-3]]
    _, result, _ = sequence_surrogate(log_ratios, [1.0, 9.0, 2.0, -2.0, -1.0])
    assert result.losses.tolist() == pytest.approx(
        [-math.exp(1e-4)] * 3 + [-2 * 1.0004] + [2 * 0.9997] * 2 + [math.exp(1e-3)] * 2, rel=1e-12
    )
    assert result.clipped_high.tolist() == [False] * 3 + [True] + [False] * 4
    assert result.clipped_low.tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert result.ratio.tolist() == pytest.approx(
        [math.exp(1e-4)] * 3 + [math.exp(1e-3)] + [math.exp(-1e-3)] * 2 + [math.exp(1e-3)] * 2
    )


def test_sequence_surrogate_has_the_gradient_of_the_paper():
    logprobs, result, lengths = sequence_surrogate(
        [[3e-4, -1e-4, 1e-4], [1e-3], [0.0, 2e-3]], [1.5, 2.0, -1.0]
    )
    weights = token_weights(lengths, aggregation="sample_mean", dtype=torch.float64)
    (weights * result.losses).sum().backward()
    # Equation 10 with the sign of a loss: -s A / |y| at every token of a sample, and nothing where
    # the sample is clipped.
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(
        [-math.exp(1e-4) * 1.5 / 3] * 3 + [0.0] + [math.exp(1e-3) / 2] * 2, rel=1e-12
    )


def test_sequence_surrogate_equals_token_surrogate_for_one_token_samples():
    ratios, advantages = [1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0]
    _, by_token = surrogate(ratios, advantages)
    logprobs = torch.tensor(ratios, dtype=torch.float64).log()
    by_sequence = gspo_loss(
        loss_tokens(logprobs, advantages=advantages), clip_low=0.2, clip_high=0.3
    )
    assert by_sequence.losses.tolist() == by_token.losses.tolist()
    assert by_sequence.clipped_low.tolist() == by_token.clipped_low.tolist()


def test_gspo_token_loss_has_the_sample_ratio_and_the_token_gradient():
    log_ratios, advantages = [[3e-4, -1e-4, 1e-4], [1e-3], [0.0, 2e-3]], [1.5, 2.0, -1.0]
    _, whole, _ = sequence_surrogate(log_ratios, advantages)
    logprobs, result, _ = sequence_surrogate(log_ratios, advantages, function=gspo_token_loss)
    assert result.losses.tolist() == pytest.approx(whole.losses.tolist(), rel=1e-14)
    assert gradient_of(logprobs, result.losses) == pytest.approx(
        [-1.5 * math.exp(1e-4)] * 3 + [0.0] + [math.exp(1e-3)] * 2, rel=1e-12
    )


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative():
    logprobs = torch.tensor([5.0, 2.0, 5.0, 0.1], dtype=torch.float64).log().requires_grad_()
    result = ppo_clip_loss(
        loss_tokens(logprobs, advantages=[-2.0, -2.0, 2.0, -2.0]),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=3.0,
    )
    # 3 A instead of 5 A; within the bound; the bound is for negative advantages alone; the lower
    # clip as ever.
    assert result.losses.tolist() == pytest.approx([6.0, 4.0, -2.6, 1.6])
    assert result.clipped_high.tolist() == [True, False, True, False]
    assert result.clipped_low.tolist() == [False, False, False, True]
    assert gradient_of(logprobs, result.losses) == pytest.approx([0.0, 4.0, 0.0, 0.0])


def test_sapo_loss_matches_hand_computation():
    logprobs = torch.tensor([1.0, 1.5, 1.5, 4.0, 0.2], dtype=torch.float64).log().requires_grad_()
    result = sapo_loss(
        loss_tokens(logprobs, advantages=[2.0, 2.0, -2.0, 1.0, -1.0]),
        gate_positive=2.0,
        gate_negative=4.0,
    )

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    assert result.losses.tolist() == pytest.approx(
        [-2.0, -4 * sigmoid(1.0), 2 * sigmoid(2.0), -2 * sigmoid(6.0), sigmoid(-3.2)]
    )
    # d/dr of (4 / tau) sigmoid(tau (r - 1)) is 4 p (1 - p); times r for the log-probability. At r =
    # 1 it is the policy gradient.
    gates = [
        (sigmoid(x), r, a)
        for x, r, a in [
            (0.0, 1.0, 2.0),
            (1.0, 1.5, 2.0),
            (2.0, 1.5, -2.0),
            (6.0, 4.0, 1.0),
            (-3.2, 0.2, -1.0),
        ]
    ]
    assert gradient_of(logprobs, result.losses) == pytest.approx(
        [-4 * p * (1 - p) * r * a for p, r, a in gates]
    )
    assert result.clipped_high.tolist() == [False, False, True, True, False]
    assert result.clipped_low.tolist() == [False, False, False, False, True]


def test_cispo_clips_the_ratio_weight_and_keeps_every_token_gradient():
    logprobs = torch.tensor([1.1, 7.0, 7.0, 0.5, 0.5], dtype=torch.float64).log().requires_grad_()
    result = cispo_loss(
        loss_tokens(logprobs, advantages=[2.0, 2.0, -2.0, 1.0, -1.0]), clip_low=0.3, clip_high=4.0
    )
    weights = [1.1, 5.0, 5.0, 0.7, 0.7]
    advantages = [2.0, 2.0, -2.0, 1.0, -1.0]
    assert result.losses.tolist() == pytest.approx(
        [
            -w * a * math.log(r)
            for w, a, r in zip(weights, advantages, [1.1, 7, 7, 0.5, 0.5], strict=True)
        ]
    )
    assert gradient_of(logprobs, result.losses) == pytest.approx(
        [-w * a for w, a in zip(weights, advantages, strict=True)]
    )
    assert result.clipped_high.tolist() == [False, True, True, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True, True]


def test_reinforce_loss_matches_hand_computation():
    logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    result = reinforce_loss(loss_tokens(logprobs, advantages=[2.0, -3.0]))
    assert result.losses.tolist() == pytest.approx([1.0, -6.0])
    assert gradient_of(logprobs, result.losses) == [-2.0, 3.0]
    assert result.ratio.tolist() == pytest.approx([math.exp(-0.5), math.exp(-2.0)])


def test_low_variance_kl_is_clamped_after_multiplying_by_the_ratio():
    logprobs, base, sampled = (
        torch.tensor([-9.0, -1.0, -1.0]),
        torch.tensor([-1.0, -1.5, -1.5]),
        torch.tensor([-9.0, -2.0, -4.0]),
    )
    k3 = [math.exp(8) - 9, math.exp(-0.5) - 0.5, math.exp(-0.5) - 0.5]
    plain = kl_estimate(logprobs, base_logprobs=base, estimator="low_variance", bound=10.0)
    assert plain.tolist() == pytest.approx([10.0, k3[1], k3[2]])
    weighted = kl_estimate(
        logprobs,
        base_logprobs=base,
        estimator="low_variance",
        behaviour_logprobs=sampled,
        bound=10.0,
    )
    assert weighted.tolist() == pytest.approx([10.0, math.e * k3[1], math.exp(3) * k3[2]], rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_off_policy_kl_estimate_is_unbiased_in_value_and_gradient(
    estimator,
):
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    base, sampled = (
        torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log(),
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log(),
    )
    policy = logits.log_softmax(-1)
    exact = (policy.exp() * (policy - base)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimates = kl_estimate(
        policy, base_logprobs=base, estimator=estimator, behaviour_logprobs=sampled
    )
    mean = (sampled.exp() * estimates).sum()
    assert mean.item() == pytest.approx(exact.item(), rel=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(mean, logits)[0], expected, rtol=1e-12, atol=1e-14
    )


# With d = 0.5 and -2: the gradient of k1 is 1, of k2 d, of k3 1 - exp(-d), of abs the sign of d.
@pytest.mark.parametrize(
    ("estimator", "bound", "expected"),
    [
        ("k1", math.inf, [1.0, 1.0]),
        ("k2", math.inf, [0.5, -2.0]),
        ("k3", math.inf, [1 - math.exp(-0.5), 1 - math.exp(2)]),
        ("abs", math.inf, [1.0, -1.0]),
        ("k1+", math.inf, [0.5, -2.0]),
        ("k3+", math.inf, [0.5, -2.0]),
        ("abs+", math.inf, [0.5, -2.0]),
        ("low_variance+", 10.0, [0.5, -2.0]),
        ("k1", 1.0, [1.0, 0.0]),
        ("k3", 1.0, [1 - math.exp(-0.5), 0.0]),
        ("k3+", 1.0, [0.5, -2.0]),
    ],
)
def test_kl_gradients_match_hand_computation(estimator, bound, expected):
    logprobs = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    values = kl_estimate(logprobs, base_logprobs=base, estimator=estimator, bound=bound)
    assert values.abs().max().item() <= bound
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-12)


def test_kl_estimates_but_k1_are_never_negative_and_plus_keeps_the_value():
    logprobs = (
        -torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 9
    )
    base = logprobs.roll(1)
    for name in ("k1", "k3", "abs", "low_variance"):
        plain = kl_estimate(logprobs, base_logprobs=base, estimator=name)
        through = kl_estimate(logprobs, base_logprobs=base, estimator=f"{name}+")
        assert torch.equal(plain, through)
        assert (plain >= 0).all() == (name != "k1")
    assert kl_estimate(torch.zeros(0), base_logprobs=torch.zeros(0), estimator="k3+").shape == (0,)


@pytest.mark.parametrize("behaviour", [None, [0.5, 0.3, 0.2]])
def test_straight_through_gradient_is_that_of_the_exact_divergence(behaviour):
    """On the policy's own tokens as it is, and on those of another policy with the ratio."""
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    policy = logits.log_softmax(-1)
    exact = (policy.exp() * (policy - base)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampled = None if behaviour is None else torch.tensor(behaviour, dtype=torch.float64)
    estimates = kl_estimate(
        policy,
        base_logprobs=base,
        estimator="k3+",
        behaviour_logprobs=None if sampled is None else sampled.log(),
    )
    weights = policy.exp().detach() if sampled is None else sampled
    mean = (weights * estimates).sum()
    assert mean.item() == pytest.approx(exact.item(), rel=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(mean, logits)[0], expected, rtol=1e-12, atol=1e-14
    )


def test_constant_length_gives_all_tokens_equal_weight_and_counts_samples():
    lengths = torch.tensor([2, 0, 3])
    assert (
        token_weights(lengths, aggregation="constant_length", length_normaliser=8).tolist()
        == [0.125] * 5
    )
    assert num_units(lengths, aggregation="constant_length") == 2


def test_gmpo_loss_matches_hand_computation_and_the_papers_gradient():
    # Ratios 1.2, 4 (to 2), 0.25 (kept, the gain is positive); with a loss 0.1 (to 0.5), 4 (kept); a
    # sample without tokens; one of one token.
    ratios, lengths, clip = [1.2, 4.0, 0.25, 0.1, 4.0, 1.1], [3, 2, 0, 1], math.log(2)
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    tokens = loss_tokens(logprobs, advantages=[1.5, -2.0, 7.0, 0.5], lengths=lengths)
    result = gmpo_loss(tokens, clip_low=clip, clip_high=clip)
    first, second = (1.2 * 2 * 0.25) ** (1 / 3), (0.5 * 4) ** 0.5
    assert result.losses.tolist() == pytest.approx(
        [-1.5 * first] * 3 + [2 * second] * 2 + [-0.55], rel=1e-12
    )
    assert result.ratio.tolist() == pytest.approx([first] * 3 + [second] * 2 + [1.1], rel=1e-12)
    assert result.clipped_high.tolist() == [False, True, False, False, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True, False, False]
    weights = token_weights(torch.tensor(lengths), aggregation="sample_mean", dtype=torch.float64)
    expected = [-1.5 * first / 3, 0.0, -1.5 * first / 3, 0.0, 2 * second / 2, -0.55]
    assert gradient_of(logprobs, weights * result.losses) == pytest.approx(expected, rel=1e-12)


def test_gmpo_loss_is_policy_gradient_on_policy_and_finite_far_off_policy():
    logprobs = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    result = gmpo_loss(
        loss_tokens(logprobs, advantages=[0.5, -3.0], lengths=[1, 2]), clip_low=0.4, clip_high=0.4
    )
    assert gradient_of(logprobs, result.losses) == pytest.approx([-0.5, 3.0, 3.0])
    far = torch.tensor([500.0, 500.0], requires_grad=True)
    result = gmpo_loss(loss_tokens(far, advantages=[1.0, -1.0]), clip_low=0.4, clip_high=0.4)
    assert result.losses.tolist() == pytest.approx([-math.exp(0.4), math.exp(MAX_LOG_RATIO)])
    assert all(map(math.isfinite, gradient_of(far, result.losses)))


P, Q = [0.3, 0.9, 0.9, 0.1, 0.2, 1e-3, 0.5], [0.2, 0.6, 0.6, 0.4, 0.5, 1e-5, 0.6]
GAINS = [1.0, 1.0, -1.0, -2.0, 2.0, 1.0, 0.0]
"""Near; up with gain, far; up with loss; down with loss, far; down with gain; near for all that the
ratio is 100; no gain."""


@pytest.mark.parametrize("function", [dppo_tv_loss, dppo_kl_loss])
def test_dppo_masks_tokens_whose_update_leaves_the_trust_region(function):
    # KL of the second: 0.6 log(0.6 / 0.9) + 0.4 log(0.4 / 0.1) = 0.3112; of the first 0.0258; of
    # the rare token 9.4e-4.
    logprobs = torch.tensor(P, dtype=torch.float64).log().requires_grad_()
    tokens = loss_tokens(logprobs, advantages=GAINS, old=torch.tensor(Q, dtype=torch.float64).log())
    result = function(tokens, trust_radius=0.15, ratio_cap=20.0)
    weights = [1.5, 0.0, 1.5, 0.0, 0.4, 20.0, 0.5 / 0.6]
    expected = [-weight * gain for weight, gain in zip(weights, GAINS, strict=True)]
    assert result.losses.tolist() == pytest.approx(
        [value * math.log(p) for value, p in zip(expected, P, strict=True)], rel=1e-12
    )
    assert gradient_of(logprobs, result.losses) == pytest.approx(expected, rel=1e-12)
    assert result.clipped_high.tolist() == [False, True, False, False, False, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True, False, False, False]
    assert result.ratio.tolist() == pytest.approx([p / q for p, q in zip(P, Q, strict=True)])


@pytest.mark.parametrize(
    ("p", "q", "tv", "kl"),
    [(0.3, 0.2, 0.1, 0.0258), (0.9, 0.6, 0.3, 0.3112), (1e-3, 1e-5, 9.9e-4, 9.4447e-4)],
)
def test_dppo_masks_tokens_only_beyond_the_trust_radius(p, q, tv, kl):
    tokens = loss_tokens(
        torch.tensor([p], dtype=torch.float64).log(),
        advantages=[1.0],
        old=torch.tensor([q], dtype=torch.float64).log(),
    )
    for function, divergence in ((dppo_tv_loss, tv), (dppo_kl_loss, kl)):
        assert not function(
            tokens, trust_radius=divergence * 1.01, ratio_cap=20.0
        ).clipped_high.item()
        assert function(tokens, trust_radius=divergence * 0.99, ratio_cap=20.0).clipped_high.item()


def test_dppo_gradient_is_finite_for_tokens_of_probability_one():
    # At probability 1 in float32 nothing is left for the other tokens.
    logprobs = torch.tensor([0.0, -1e-9, -30.0, 0.0], requires_grad=True)
    tokens = loss_tokens(
        logprobs, advantages=[1.0, 1.0, -1.0, 1.0], old=torch.tensor([0.0, 0.0, -1e-9, -2.0])
    )
    result = dppo_kl_loss(tokens, trust_radius=0.05, ratio_cap=20.0)
    assert (result.clipped_low | result.clipped_high).tolist() == [False, False, True, True]
    assert gradient_of(logprobs, result.losses) == pytest.approx([-1.0, -1.0, 0.0, 0.0])
