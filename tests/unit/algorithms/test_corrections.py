"""Corrections and statistics of a step against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from relax_events.algorithms.corrections import (
    correction_weights,
    mask_off_policy_sequences,
    reject_samples,
)
from relax_events.training.batch.step_statistics import (
    Whitening,
    compute_second_moment_cutoff,
    compute_whitening,
    second_moment_cutoff,
)
from relax_events.training.ranks import SingleRank

RATIOS = [0.25, 1.0, 4.0, 0.5, 2.0, 1.5]
LENGTHS = torch.tensor([3, 0, 2, 1])


def weigh(kind: str, level: str = "token", low: float | None = 0.5, high: float | None = 2.0):
    log_ratio = torch.tensor(RATIOS, dtype=torch.float64).log().requires_grad_()
    return correction_weights(
        log_ratio, num_loss_tokens=LENGTHS, kind=kind, level=level, low=low, high=high
    )


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("none", None, None, [1.0] * 6),
        ("decoupled", None, None, RATIOS),
        ("tis", 0.5, 2.0, [0.5, 1.0, 2.0, 0.5, 2.0, 1.5]),
        ("icepop", 0.6, 1.9, [0.0, 1.0, 0.0, 0.0, 0.0, 1.5]),
        ("mask", 0.6, 1.9, [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
    ],
)
def test_importance_weights_of_tokens(kind, low, high, expected):
    weights = weigh(kind, low=low, high=high)
    assert weights.values.tolist() == pytest.approx(expected)
    assert not weights.values.requires_grad
    outside = [low is not None and not low <= ratio <= high for ratio in RATIOS]
    assert (
        weights.outside.tolist() == outside or kind == "tis"
    )  # there the ends themselves are within rounding


def test_importance_weights_of_sequences_are_products_or_geometric_means():
    product = [1.0] * 3 + [1.0] * 2 + [1.5]
    assert weigh("decoupled", "sequence", None, None).values.tolist() == pytest.approx(product)
    mean = [1.0] * 3 + [1.0] * 2 + [1.5]
    assert weigh("decoupled", "sequence_mean", None, None).values.tolist() == pytest.approx(mean)
    log_ratio = torch.tensor([2.0, 2.0, 8.0], dtype=torch.float64).log()
    for level, expected in (("sequence", [4.0, 4.0, 8.0]), ("sequence_mean", [2.0, 2.0, 8.0])):
        weights = correction_weights(
            log_ratio,
            num_loss_tokens=torch.tensor([2, 1]),
            kind="icepop",
            level=level,
            low=0.0,
            high=7.0,
        )
        assert weights.values.tolist() == pytest.approx([*expected[:2], 0.0])
        assert weights.outside.tolist() == [False, False, True]


def rejected(
    kind: str,
    over: str = "mean",
    low: float | None = None,
    high: float | None = None,
    **veto: float,
) -> list[str]:
    """Reject samples of the ratios 1/2, 2, 2; none; 1, 4; 1.5. Name the reason of each."""
    log_ratio = torch.tensor([0.5, 2.0, 2.0, 1.0, 4.0, 1.5], dtype=torch.float64).log()
    # The behaviour policy gave each token a probability of 1 / 8.
    rollout = torch.full_like(log_ratio, -math.log(8))
    given = reject_samples(
        log_ratio + rollout,
        rollout_logprobs=rollout,
        num_loss_tokens=torch.tensor([3, 0, 2, 1]),
        kind=kind,
        over=over,
        low=low,
        high=high,
        **veto,
    )
    names = {(False, False): "", (True, False): "veto", (False, True): "divergence"}
    rejected_samples = given.by_veto | given.by_divergence
    assert torch.equal(given.tokens, rejected_samples.repeat_interleave(torch.tensor([3, 0, 2, 1])))
    return [
        names[pair]
        for pair in zip(given.by_veto.tolist(), given.by_divergence.tolist(), strict=True)
    ]


# log 2 = 0.6931, log 1.5 = 0.4055. Products of the ratios: 2, none, 4, 1.5; geometric means: 1.26,
# none, 2, 1.5. k2: 0.2402 each of the first sample, sum 0.7207; 0 and 0.9609, mean 0.4805; 0.0822.
# k3 = w - 1 - log w: 0.1931, 0.3069, 0.3069, sum 0.8069, mean 0.2690; 0 and 1.6137, mean 0.8069;
# 0.0945. tv = |w - 1| / 8: 1/16, 1/8, 1/8, mean 0.1042; 0 and 3/8; 1/16.
@pytest.mark.parametrize(
    ("kind", "over", "low", "high", "expected"),
    [
        ("none", "mean", None, None, "...."),
        ("k1", "mean", None, 1.9, "..x."),
        ("k1", "mean", 1.3, 1.9, "x.x."),
        ("k1", "mean", 1.2, 2.1, "...."),
        ("k1", "sum", None, 1.9, "x.x."),
        ("k1", "sum", 1.6, 3.0, "..xx"),
        ("k2", "mean", None, 0.241, "..x."),
        ("k2", "mean", None, 0.2, "x.x."),
        ("k2", "sum", None, 0.72, "x.x."),
        ("k2", "sum", None, 0.73, "..x."),
        ("k2", "max", None, 0.3, "..x."),
        ("k2", "max", None, 0.08, "x.xx"),
        ("k3", "mean", None, 0.3, "..x."),
        ("k3", "mean", None, 0.09, "x.xx"),
        ("k3", "sum", None, 0.8, "x.x."),
        ("k3", "max", None, 0.31, "..x."),
        ("k3", "max", None, 0.3, "x.x."),
        ("tv", "mean", None, 0.11, "..x."),
        ("tv", "mean", None, 0.1, "x.x."),
        ("tv", "sum", None, 0.3, "x.x."),
        ("tv", "sum", None, 0.32, "..x."),
        ("tv", "max", None, 0.06, "x.xx"),
        ("tv", "max", None, 0.13, "..x."),
    ],
)
def test_samples_are_rejected_by_the_divergence_over_their_tokens(kind, over, low, high, expected):
    assert "".join("x" if reason else "." for reason in rejected(kind, over, low, high)) == expected


# The tokens' ratios are 1/2, 2, 2 | 1, 4 | 1.5.
@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("k1", None, 1.9, "xxx.x."),
        ("k1", 0.4, 1.9, ".xx.x."),
        ("k1", 0.6, 3.0, "x...x."),
        ("k2", None, 0.241, "....x."),
        ("k2", None, 0.24, "xxx.x."),
        ("k3", None, 0.2, ".xx.x."),
        ("k3", None, 0.31, "....x."),
        ("k3", None, 0.09, "xxx.xx"),
        ("tv", None, 0.1, ".xx.x."),
        ("tv", None, 0.06, "xxx.xx"),
        ("tv", None, 0.4, "......"),
    ],
)
def test_tokens_are_rejected_by_their_own_divergence(kind, low, high, expected):
    log_ratio = torch.tensor([0.5, 2.0, 2.0, 1.0, 4.0, 1.5], dtype=torch.float64).log()
    rollout = torch.full_like(log_ratio, -math.log(8))
    settings = {"kind": kind, "over": "token", "low": low, "high": high}
    lengths = torch.tensor([3, 0, 2, 1])
    result = reject_samples(
        log_ratio + rollout, rollout_logprobs=rollout, num_loss_tokens=lengths, **settings
    )
    assert "".join("x" if is_out else "." for is_out in result.tokens.tolist()) == expected
    assert not (result.by_veto | result.by_divergence).any()
    vetoed = reject_samples(
        log_ratio + rollout,
        rollout_logprobs=rollout,
        num_loss_tokens=lengths,
        veto_high=3.0,
        **settings,
    )
    assert vetoed.by_veto.tolist() == [False, False, True, False]
    assert vetoed.tokens.tolist() == [
        is_out or position in (3, 4) for position, is_out in enumerate(result.tokens.tolist())
    ]
    # One token a sample: a mask of tokens is a rejection of samples.
    if kind != "k1":
        singles = reject_samples(
            log_ratio + rollout,
            rollout_logprobs=rollout,
            num_loss_tokens=torch.ones(6, dtype=torch.long),
            **settings | {"over": "max"},
        )
        assert torch.equal(singles.by_divergence, result.tokens)


def test_one_token_out_of_bounds_vetoes_its_sample():
    assert rejected("none", veto_low=0.6) == ["veto", "", "", ""]
    assert rejected("none", veto_high=3.0) == ["", "", "veto", ""]
    assert rejected("none", veto_high=1.4) == ["veto", "", "veto", "veto"]
    assert rejected("none", veto_low=0.4, veto_high=4.5) == ["", "", "", ""]
    assert rejected("k2", "sum", None, 0.08, veto_low=0.6) == [
        "veto",
        "",
        "divergence",
        "divergence",
    ]  # counted once, by the veto
    # Far beyond what a ratio is clamped to: e^-25 is below 1e-10, e^-22 is not.
    of_one_token = {
        "num_loss_tokens": torch.tensor([1, 1]),
        "kind": "none",
        "over": "mean",
        "low": None,
        "high": None,
    }
    far = reject_samples(
        torch.tensor([-26.0, -23.0]),
        rollout_logprobs=torch.tensor([-1.0, -1.0]),
        veto_low=1e-10,
        **of_one_token,
    )
    assert far.by_veto.tolist() == [True, False]


def test_rejection_handles_overflowing_ratios_and_steps_without_tokens():
    far = reject_samples(
        torch.tensor([0.0, -1.0]),
        rollout_logprobs=torch.tensor([-500.0, -1.1]),
        num_loss_tokens=torch.tensor([1, 1]),
        kind="k3",
        over="max",
        low=None,
        high=1e6,
    )
    assert far.by_divergence.tolist() == [True, False]
    for over in ("token", "mean", "sum", "max"):
        none = reject_samples(
            torch.zeros(0),
            rollout_logprobs=torch.zeros(0),
            num_loss_tokens=torch.tensor([0, 0]),
            kind="k2",
            over=over,
            low=None,
            high=0.1,
            veto_high=2.0,
        )
        assert none.tokens.tolist() == []
        assert not (none.by_veto | none.by_divergence).any()


def test_off_policy_sequences_with_negative_advantage_are_masked():
    logprobs = torch.tensor([-1.0, -3.0, -2.0, -1.0, -2.0], requires_grad=True)
    rollout = torch.tensor([-0.5, -2.0, -1.9, 0.0, -1.0])
    marked = mask_off_policy_sequences(
        logprobs,
        rollout_logprobs=rollout,
        advantages=torch.tensor([-1.0, -1.0, -1.0, 1.0, -1.0]),
        num_loss_tokens=torch.tensor([2, 1, 1, 1]),
        threshold=0.5,
    )
    # Means 0.75, 0.1, 1 and 1: the second is near enough, the third has a positive advantage.
    assert marked.tolist() == [True, True, False, False, True]


def test_second_moment_cutoff_drops_largest_values_until_the_mean_fits():
    squares = np.array([0.5, 0.01, 0.03, 0.04, 0.0])
    # Means of the smallest: 0, 0.005, 0.0133, 0.02, 0.116.
    assert second_moment_cutoff(squares, threshold=0.02) == pytest.approx((0.04 + 0.5) / 2)
    assert second_moment_cutoff(squares, threshold=0.0134) == pytest.approx((0.03 + 0.04) / 2)
    assert second_moment_cutoff(squares, threshold=0.2) == np.inf
    assert second_moment_cutoff(np.array([0.3, 0.3]), threshold=0.2) == -1.0
    assert second_moment_cutoff(np.array([0.0, 0.3, 0.3]), threshold=0.15) == pytest.approx(
        0.15
    )  # equal values go together
    assert second_moment_cutoff(np.zeros(0), threshold=0.2) == np.inf


class TwoRanks(SingleRank):
    """Replaces two ranks; the test sets the values of the other one."""

    def __init__(self, *others: np.ndarray) -> None:
        self._others = list(others)

    def all_gather_bytes(self, data):
        return [data, self._others.pop(0).tobytes()]


def test_whitening_is_over_all_ranks_and_counts_tokens_or_samples():
    advantages, lengths = np.array([1.0, 1.0, 1.0, 5.0], np.float32), np.array([3, 0, 1])
    alone = compute_whitening([(advantages, lengths)], over="tokens", ranks=SingleRank())
    assert (alone.mean, alone.std) == pytest.approx((2.0, math.sqrt(3.0)))
    by_sample = compute_whitening(
        [(advantages[:3], lengths[:2]), (advantages[3:], lengths[2:])],
        over="samples",
        ranks=SingleRank(),
    )
    assert (by_sample.mean, by_sample.std) == pytest.approx((3.0, 2.0))
    # The other rank has two tokens of 4: mean 16 / 6, squares about it 3 * (10/6)^2 + (14/6)^2 + 2
    # * (8/6)^2.
    both = compute_whitening(
        [(advantages, lengths)],
        over="tokens",
        ranks=TwoRanks(np.array([4.0, 4.0])),
    )
    assert both.mean == pytest.approx(16 / 6)
    assert both.std == pytest.approx(math.sqrt((3 * 100 + 196 + 2 * 64) / 36 / 6))
    assert compute_whitening([], over="tokens", ranks=SingleRank()) == Whitening()
    assert Whitening(0.5, 0.0).apply(np.array([0.5])).tolist() == [0.0]


def test_second_moment_cutoff_is_computed_over_all_ranks():
    other = np.array([0.9, 0.1])
    assert compute_second_moment_cutoff(
        [np.array([0.0, 0.5])], threshold=0.21, ranks=TwoRanks(other)
    ) == pytest.approx(0.7)
    assert compute_second_moment_cutoff([], threshold=0.6, ranks=TwoRanks(other)) == np.inf
