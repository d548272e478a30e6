"""The whole objective of every algorithm against a plain loop over samples and tokens, written from
the formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_events.algorithms.advantage_estimator import AdvantageEstimator, RewardedSample
from relax_events.algorithms.description import installed_algorithms
from relax_events.algorithms.objective import Objective, ObjectiveInputs
from relax_events.config import AlgorithmConfig
from relax_events.errors import ConfigError

NAMES = [spec.name for spec in installed_algorithms() if spec.learns_from == "rewards"]
LENGTHS = [3, 0, 1, 5, 2]
RNG = np.random.default_rng(5)
FIELDS = {
    name: RNG.uniform(-2.9, -1.0, sum(LENGTHS)) for name in ("logprobs", "rollout", "actor", "ref")
}
FIELDS["teacher"] = np.linspace(-1.7, -0.2, sum(LENGTHS))
FIELDS["logprobs"] = FIELDS["rollout"] + RNG.normal(0, 0.4, sum(LENGTHS))
FIELDS["actor"] = FIELDS["rollout"] + RNG.normal(0, 0.3, sum(LENGTHS))
FIELDS["entropies"] = RNG.uniform(0.1, 2.0, sum(LENGTHS))
FIELDS["advantages"] = np.repeat([1.2, 0.3, -0.7, -1.5, 0.4], LENGTHS)
FIELDS["staleness"] = np.array([2.0, 2, 1, 0, 3, 2, 1, 1, 0, 0, 0])
CUTOFF = 0.3
SETTINGS: list[dict[str, Any]] = [
    {},
    {"old_logprobs": "actor", "correction": "decoupled"},
    {"old_logprobs": "actor", "correction": "tis", "correction_high": 1.2},
    {
        "old_logprobs": "trainer",
        "correction": "icepop",
        "correction_low": 0.8,
        "correction_high": 1.3,
    },
    {
        "old_logprobs": "actor",
        "correction": "mask",
        "correction_level": "sequence",
        "correction_low": 0.6,
        "correction_high": 1.7,
    },
    {
        "old_logprobs": "actor",
        "correction": "tis",
        "correction_level": "sequence_mean",
        "correction_high": 1.1,
    },
    {
        "old_logprobs": "actor",
        "correction": "tis",
        "correction_high": 1.2,
        "rejection": "k1",
        "rejection_high": 1.15,
    },
    {
        "old_logprobs": "actor",
        "rejection": "k1",
        "rejection_over": "sum",
        "rejection_low": 0.7,
        "rejection_high": 1.5,
    },
    {
        "old_logprobs": "actor",
        "correction": "tis",
        "correction_high": 1.2,
        "rejection": "k3",
        "rejection_over": "token",
        "rejection_high": 0.02,
    },
    {
        "old_logprobs": "actor",
        "correction": "tis",
        "correction_high": 1.2,
        "rejection": "k1",
        "rejection_over": "token",
        "rejection_low": 0.9,
        "rejection_high": 1.3,
    },
    {
        "old_logprobs": "trainer",
        "rejection": "tv",
        "rejection_over": "token",
        "rejection_high": 0.05,
        "veto_high": 1.6,
    },
    {"old_logprobs": "actor", "rejection": "tv", "rejection_high": 0.05},
    {
        "old_logprobs": "trainer",
        "correction": "decoupled",
        "rejection": "k2",
        "rejection_over": "sum",
        "rejection_high": 0.2,
    },
    {
        "old_logprobs": "actor",
        "correction": "icepop",
        "rejection": "k3",
        "rejection_over": "max",
        "rejection_high": 0.06,
    },
    {
        "old_logprobs": "actor",
        "correction": "tis",
        "rejection": "k3",
        "rejection_high": 0.04,
        "veto_low": 0.7,
        "veto_high": 1.6,
    },
    {"max_token_staleness": 1, "kl_coefficient": 0.3, "kl_placement": "loss", "kl_estimator": "k2"},
    {"opsm_threshold": 0.05, "entropy_coefficient": 0.2},
    {"m2_threshold": 0.1, "kl_coefficient": 0.3, "kl_placement": "loss", "kl_estimator": "k2"},
    {
        "kl_coefficient": 0.3,
        "kl_placement": "loss",
        "kl_estimator": "k3+",
        "kl_unbiased": True,
        "aggregation": "constant_length",
    },
    {
        "kl_coefficient": 0.3,
        "kl_placement": "loss",
        "kl_estimator": "abs",
        "kl_bound": 0.2,
    },
    {
        "kl_coefficient": 0.3,
        "kl_placement": "loss",
        "kl_base": "rollout",
        "kl_estimator": "k2",
    },
    {"distill_coefficient": 0.4, "distill_placement": "loss"},
]


def plain_loss(algorithm: AlgorithmConfig) -> float:
    """Compute a step's loss sample by sample and token by token."""
    total, units, at = 0.0, 0, 0
    for length in LENGTHS:
        rows = [
            {name: float(values[index]) for name, values in FIELDS.items()}
            for index in range(at, at + length)
        ]
        at += length
        if not rows:
            continue
        for row in rows:
            row["old"] = {
                "rollout": row["rollout"],
                "actor": row["actor"],
                "trainer": row["logprobs"],
            }[algorithm.old_logprobs]
        losses = [token_loss(algorithm, row, rows) for row in rows]
        if algorithm.aggregation == "token_mean":
            total, units = total + sum(losses), units + length
        else:
            total, units = (
                total + sum(losses) / (length if algorithm.aggregation == "sample_mean" else 16),
                units + 1,
            )
    return total / units


def token_loss(
    algorithm: AlgorithmConfig, row: dict[str, float], rows: list[dict[str, float]]
) -> float:
    loss = factor(algorithm, row, rows) * policy_loss(algorithm, row, rows)
    if algorithm.kl_coefficient and algorithm.kl_placement == "loss":
        d = row["logprobs"] - row["rollout" if algorithm.kl_base == "rollout" else "ref"]
        kl = {"k2": d * d / 2, "k3+": math.exp(-d) - 1 + d, "abs": abs(d)}[algorithm.kl_estimator]
        kl = min(kl, algorithm.kl_bound or kl)
        loss += (
            algorithm.kl_coefficient
            * kl
            * (math.exp(row["logprobs"] - row["rollout"]) if algorithm.kl_unbiased else 1)
        )
    if algorithm.has_distill_loss:
        d = row["logprobs"] - row["teacher"]
        loss += (
            algorithm.distill_coefficient
            * math.exp(row["logprobs"] - row["rollout"])
            * (math.exp(-d) - 1 + d)
        )
    return loss - algorithm.entropy_coefficient * row["entropies"]


def factor(
    algorithm: AlgorithmConfig, row: dict[str, float], rows: list[dict[str, float]]
) -> float:
    """Return the factor of corrections and masks on a token's policy loss."""
    bound = algorithm.max_token_staleness
    if bound is not None and row["staleness"] > bound:
        return 0.0
    if algorithm.m2_threshold and (row["logprobs"] - row["rollout"]) ** 2 > CUTOFF:
        return 0.0
    if algorithm.opsm_threshold and row["advantages"] < 0:
        distance = sum(other["rollout"] - other["logprobs"] for other in rows) / len(rows)
        if distance > algorithm.opsm_threshold:
            return 0.0
    judged = [row] if algorithm.rejection_over == "token" else rows
    if is_vetoed(algorithm, rows) or is_rejected(algorithm, judged):
        return 0.0
    if algorithm.correction == "none":
        return 1.0
    ratios = [math.exp(other["old"] - other["rollout"]) for other in rows]
    w = {
        "token": math.exp(row["old"] - row["rollout"]),
        "sequence": math.prod(ratios),
        "sequence_mean": math.prod(ratios) ** (1 / len(ratios)),
    }[algorithm.correction_level]
    low, high = algorithm.correction_low, algorithm.correction_high
    if low is None or high is None:
        return w
    inside = low <= w <= high
    return {
        "tis": min(max(w, low), high),
        "icepop": w if inside else 0.0,
        "mask": 1.0 if inside else 0.0,
    }[algorithm.correction]


def is_vetoed(algorithm: AlgorithmConfig, rows: list[dict[str, float]]) -> bool:
    ratios = [math.exp(row["old"] - row["rollout"]) for row in rows]
    return bool(
        (algorithm.veto_low and min(ratios) < algorithm.veto_low)
        or (algorithm.veto_high and max(ratios) > algorithm.veto_high)
    )


def is_rejected(algorithm: AlgorithmConfig, rows: list[dict[str, float]]) -> bool:
    """Return whether the divergence over these tokens rejects them."""
    if algorithm.rejection == "none":
        return False
    high = algorithm.rejection_high
    assert high is not None
    logs = [row["old"] - row["rollout"] for row in rows]
    together: Any = {
        "sum": sum,
        "token": sum,
        "max": max,
        "mean": lambda values: sum(values) / len(values),
    }[algorithm.rejection_over]
    if algorithm.rejection == "tv":
        return bool(
            together([abs(math.exp(row["old"]) - math.exp(row["rollout"])) for row in rows]) > high
        )
    if algorithm.rejection == "k1":
        return not (algorithm.rejection_low or 1 / high) <= math.exp(together(logs)) <= high
    estimate: Any = {"k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[
        algorithm.rejection
    ]
    return bool(together([estimate(x) for x in logs]) > high)


def policy_loss(
    algorithm: AlgorithmConfig, row: dict[str, float], rows: list[dict[str, float]]
) -> float:
    ratio, advantage = math.exp(row["logprobs"] - row["old"]), row["advantages"]
    if algorithm.name == "rloo":
        return -advantage * row["logprobs"]
    if algorithm.name in ("opd", "opo"):
        return -advantage * ratio
    if algorithm.name == "sapo":
        tau = algorithm.gate_positive if advantage > 0 else algorithm.gate_negative
        assert tau is not None
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    if algorithm.name.startswith("dppo"):
        p, q = math.exp(row["logprobs"]), math.exp(row["old"])
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        assert algorithm.trust_radius is not None
        assert algorithm.ratio_cap is not None
        is_far = (abs(p - q) if algorithm.name == "dppo_tv" else kl) > algorithm.trust_radius
        return (
            0.0
            if is_far and (p - q) * advantage > 0
            else -min(ratio, algorithm.ratio_cap) * advantage * row["logprobs"]
        )
    assert algorithm.clip_low is not None
    assert algorithm.clip_high is not None
    if algorithm.name.startswith("gspo"):
        ratio = math.exp(sum(other["logprobs"] - other["old"] for other in rows) / len(rows))
    if algorithm.name == "gmpo":  # the paper's product of ratios, its clip range in ratios
        low, high = math.exp(-algorithm.clip_low), math.exp(algorithm.clip_high)
        ratios = [math.exp(other["logprobs"] - other["old"]) for other in rows]
        kept = [min(each, high) if advantage > 0 else max(each, low) for each in ratios]
        return -advantage * math.prod(kept) ** (1 / len(kept))
    bounded = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
    if algorithm.name == "cispo":
        return -bounded * advantage * row["logprobs"]
    return -min(ratio * advantage, bounded * advantage)


def inputs(algorithm: AlgorithmConfig, **changes: Any) -> ObjectiveInputs:
    tensors = {name: torch.from_numpy(values.copy()) for name, values in FIELDS.items()}
    fields = {
        "logprobs": tensors["logprobs"].requires_grad_(),
        "entropies": tensors["entropies"],
        "rollout_logprobs": tensors["rollout"],
        "old_logprobs": None
        if algorithm.old_logprobs == "trainer"
        else tensors[algorithm.old_logprobs],
        "ref_logprobs": tensors["ref"],
        "advantages": tensors["advantages"],
        "num_loss_tokens": torch.tensor(LENGTHS),
        "second_moment_cutoff": CUTOFF if algorithm.m2_threshold else None,
        "teacher_logprobs": tensors["teacher"],
        "staleness": tensors["staleness"] if algorithm.max_token_staleness is not None else None,
    }
    return ObjectiveInputs(**fields | changes)


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda settings: ",".join(map(str, settings.values())) or "alone"
)
@pytest.mark.parametrize("name", NAMES)
def test_objective_loss_matches_the_reference_formulas(name: str, settings: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig.model_validate({"name": name} | settings)
    objective = Objective(algorithm, max_new_tokens=16)
    tokens = objective(inputs(algorithm))
    loss = (tokens.token_weights * tokens.losses).sum() / objective.num_units(torch.tensor(LENGTHS))
    assert loss.item() == pytest.approx(plain_loss(algorithm), rel=1e-12)
    assert len(set(tokens.losses.tolist())) > 1


def test_corrections_and_masks_carry_no_gradient_and_are_counted() -> None:
    algorithm = AlgorithmConfig.model_validate(
        {"name": "rloo", "old_logprobs": "trainer", "correction": "icepop", "correction_low": 0.8}
    )
    given = inputs(algorithm)
    tokens = Objective(algorithm, max_new_tokens=16)(given)
    tokens.losses.sum().backward()
    ratio = np.exp(FIELDS["logprobs"] - FIELDS["rollout"])
    weights = np.where((ratio >= 0.8) & (ratio <= 5.0), ratio, 0.0)
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.tolist() == pytest.approx((-weights * FIELDS["advantages"]).tolist())
    assert tokens.masked.tolist() == (weights == 0).tolist()
    assert 0 < int(tokens.masked.sum()) < len(ratio)
    assert tokens.correction.outside.tolist() == tokens.masked.tolist()


def test_rejected_samples_have_no_policy_gradient_and_the_others_keep_their_weights() -> None:
    both = {"old_logprobs": "actor", "correction": "tis", "correction_high": 1.2}
    rejection = {"rejection": "k3", "rejection_high": 0.04, "veto_high": 1.6}
    gradients, seen = [], []
    for settings in (both, both | rejection):
        algorithm = AlgorithmConfig.model_validate({"name": "grpo"} | settings)
        given = inputs(algorithm)
        tokens = Objective(algorithm, max_new_tokens=16)(given)
        (tokens.token_weights * tokens.losses).sum().backward()
        assert given.logprobs.grad is not None
        gradients.append(np.split(given.logprobs.grad.numpy(), np.cumsum(LENGTHS)[:-1]))
        seen.append(tokens)
    rejected = (seen[1].rejection.by_veto | seen[1].rejection.by_divergence).tolist()
    ratios = np.split(np.exp(FIELDS["actor"] - FIELDS["rollout"]), np.cumsum(LENGTHS)[:-1])
    assert seen[1].rejection.by_veto.tolist() == [bool((ratio > 1.6).any()) for ratio in ratios]
    assert True in rejected
    assert False in rejected
    assert not (seen[0].rejection.by_veto | seen[0].rejection.by_divergence).any()
    for is_out, alone, with_rejection in zip(rejected, *gradients, strict=True):
        assert with_rejection.tolist() == ([0.0] * len(alone) if is_out else alone.tolist())
    assert seen[1].masked.tolist() == np.repeat(rejected, LENGTHS).tolist()
    assert (
        seen[1].token_weights.tolist() == seen[0].token_weights.tolist()
    )  # the mean is still over all


def test_custom_policy_loss_may_return_a_plain_loss_tensor(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("""
from relax_events.config.algorithm_spec import AlgorithmSpec

def loss(tokens, *, power):
    return -(tokens.log_ratio.exp() ** power) * tokens.advantages

def flat(tokens):
    return tokens.logprobs.sum()

PARTS = dict(summary="", formula="", source="", advantage="relax_events.algorithms.advantages:centred_advantages")
MINE = AlgorithmSpec(name="mine", policy_loss=loss, loss_settings=("power",), options={"power": 2.0}, **PARTS)
FLAT = AlgorithmSpec(name="flat", policy_loss=flat, **PARTS)
""")
    algorithm = AlgorithmConfig(name=f"{file}:MINE")
    tokens = Objective(algorithm, max_new_tokens=16)(inputs(algorithm))
    ratio = np.exp(FIELDS["logprobs"] - FIELDS["rollout"])
    assert tokens.losses.tolist() == pytest.approx((-(ratio**2) * FIELDS["advantages"]).tolist())
    assert tokens.policy_loss.ratio.tolist() == pytest.approx(ratio.tolist())
    assert not tokens.policy_loss.clipped_high.any()
    wrong = AlgorithmConfig(name=f"{file}:FLAT")
    with pytest.raises(
        ConfigError,
        match=r"algorithm .*mine.py:FLAT: its policy loss must return one loss for each of 11 tokens, got \(\)",
    ):
        Objective(wrong, max_new_tokens=16)(inputs(wrong))


def test_a_rejected_sample_moves_the_baseline_of_its_prompt_group() -> None:
    """Its reward counts, its tokens have no gradient, and the mean is still over all tokens."""
    algorithm = AlgorithmConfig.model_validate(
        {
            "name": "grpo",
            "aggregation": "token_mean",
            "old_logprobs": "trainer",
            "rejection": "k1",
            "rejection_high": 1.5,
            "truncated_samples": "mask",
        }
    )
    rewards, length = [1.0, 0.0, 0.0, 0.0], 3
    samples = [
        RewardedSample(
            sample_id=str(index),
            reward=reward,
            loss_mask=np.ones(length, np.uint8),
            components={},
        )
        for index, reward in enumerate(rewards)
    ]
    advantages = np.concatenate(AdvantageEstimator(algorithm, max_new_tokens=16)(samples))
    trainer = torch.full((4 * length,), -1.0, dtype=torch.float64)
    rollout = trainer.clone()
    rollout[:length] = -2.0
    given = ObjectiveInputs(
        logprobs=trainer.clone().requires_grad_(),
        entropies=torch.zeros_like(trainer),
        rollout_logprobs=rollout,
        old_logprobs=None,
        ref_logprobs=None,
        advantages=torch.from_numpy(advantages).double(),
        num_loss_tokens=torch.full((4,), length),
    )
    objective = Objective(algorithm, max_new_tokens=16)
    tokens = objective(given)
    (tokens.token_weights * tokens.losses).sum().backward()
    assert tokens.rejection.by_divergence.tolist() == [True, False, False, False]
    assert given.logprobs.grad is not None
    assert given.logprobs.grad.tolist() == pytest.approx([0.0] * 3 + [0.5] * 9, rel=1e-5)
    assert objective.num_units(torch.full((4,), length)) == 12
    assert objective.num_units(torch.tensor([0, *[length] * 3])) == 9, "masked as truncated"
