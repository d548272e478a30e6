"""Losses, gradients and advantages compared with those of TRL's own trainers, as
tests/trl_reference.py wrote them down."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import environment
from relax_events.algorithms.advantage_estimator import AdvantageEstimator, RewardedSample
from relax_events.algorithms.advantages import normalise_prompt_groups
from relax_events.algorithms.distillation import TokenSet, divergence
from relax_events.algorithms.objective import Objective, ObjectiveInputs
from relax_events.config import AlgorithmConfig
from relax_events.training.batch.step_statistics import compute_reward_scaling, compute_whitening
from relax_events.training.ranks import SingleRank
from tests.trl_reference import (
    ADVANTAGES,
    FILE,
    LEAVE_ONE_OUT,
    LOSSES,
    MAX_NEW_TOKENS,
    MIXTURES,
    PREFERENCES,
    SAMPLES_PER_PROMPT,
)

TRL = json.loads(FILE.read_text())
GIVEN = TRL["inputs"]
CLOSE: dict[str, float] = {"rel": 1e-9, "abs": 1e-12}
ROUNDED = 1e-6
"""Advantages are float32, and rewards are so large that what is added to a deviation, 1e-4 there
and 1e-6 here, is less than this."""
TOKEN_MEAN = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28}
CORRECTED = {"name": "grpo", "old_logprobs": "actor"}
OURS: dict[str, list[dict[str, Any]]] = {
    "sample mean": [{**TOKEN_MEAN, "aggregation": "sample_mean"}],
    "token mean": [TOKEN_MEAN, {"name": "dapo"}],
    "token mean of the batch": [TOKEN_MEAN],
    "constant length": [{"name": "dr_grpo", "clip_high": 0.28}],
    "two-sided clip": [{**TOKEN_MEAN, "dual_clip": 1.5}],
    "clipped weight": [{"name": "cispo", "clip_high": 0.2}],
    "soft gate": [{"name": "sapo"}],
    "ratio of sequences": [
        {"name": name, "clip_low": 0.1, "clip_high": 0.15} for name in ("gspo", "gspo_token")
    ],
    "ratio of sequences, two-sided clip": [
        {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.3}
    ],
    "geometric mean": [{"name": "gmpo", "clip_low": 0.2, "clip_high": 0.25}],
    "KL": [
        {**TOKEN_MEAN, "kl_coefficient": 0.3},
        {**TOKEN_MEAN, "kl_coefficient": 0.3, "kl_estimator": "low_variance"},
    ],
    "KL by the sample": [{**TOKEN_MEAN, "kl_coefficient": 0.3, "aggregation": "sample_mean"}],
    "unbiased KL": [{**TOKEN_MEAN, "kl_coefficient": 0.3, "kl_unbiased": True}],
    "off-policy sequences": [{**TOKEN_MEAN, "old_logprobs": "actor", "opsm_threshold": 0.02}],
    "entropy": [{**TOKEN_MEAN, "entropy_coefficient": 0.2}],
    "engine corrected by the token, kept within": [
        {**CORRECTED, "correction": "tis", "correction_high": 1.1}
    ],
    "engine corrected by the token, masked": [
        {**CORRECTED, "correction": "icepop", "correction_low": 0.8, "correction_high": 1.2}
    ],
    "engine corrected by the sequence, kept within": [
        {
            **CORRECTED,
            "correction": "tis",
            "correction_level": "sequence",
            "correction_high": 1.1,
            "aggregation": "sample_mean",
        }
    ],
    "engine corrected by the sequence, masked": [
        {
            **CORRECTED,
            "correction": "icepop",
            "correction_level": "sequence",
            "correction_low": 0.7,
            "correction_high": 1.3,
        }
    ],
    "truncated samples masked, sample mean": [
        {**TOKEN_MEAN, "aggregation": "sample_mean", "truncated_samples": "mask"}
    ],
    "truncated samples masked, token mean": [{**TOKEN_MEAN, "truncated_samples": "mask"}],
}
CASES = [
    pytest.param(name, settings, id=f"{name}, {settings['name']}")
    for name, all_settings in OURS.items()
    for settings in all_settings
]
OF_PAIRS: dict[str, dict[str, Any]] = {
    "sigmoid": {"name": "dpo"},
    "sigmoid of means": {"name": "dpo", "dpo_beta": 2.0, "length_normalised": True},
    "smoothed": {"name": "dpo", "label_smoothing": 0.1},
    "sigmoid and likelihood": {"name": "dpo", "nll_coefficient": 0.3},
    "ipo": {"name": "ipo"},
}


def loss_masks(algorithm: AlgorithmConfig) -> list[np.ndarray]:
    masks = [np.array(mask, bool) for mask in GIVEN["masks"]]
    if algorithm.truncated_samples == "mask":
        masks = [mask & (not cut) for mask, cut in zip(masks, GIVEN["is_truncated"], strict=True)]
    return masks


def loss_of(
    algorithm: AlgorithmConfig,
    masks: list[np.ndarray],
    *,
    advantages: list[float],
    names: dict[str, str],
) -> tuple[float, list[np.ndarray]]:
    """Compute our loss of the loss tokens, and its gradients, laid out as the samples are."""

    def loss_tokens(rows: list[Any]) -> Tensor:
        return torch.tensor(
            np.concatenate(
                [np.array(row, float)[mask] for row, mask in zip(rows, masks, strict=True)]
            ),
            dtype=torch.float64,
        )

    logprobs = loss_tokens(GIVEN[names["current"]]).requires_grad_()
    lengths = torch.tensor([int(mask.sum()) for mask in masks])
    objective = Objective(algorithm, max_new_tokens=MAX_NEW_TOKENS)
    inputs = ObjectiveInputs(
        logprobs=logprobs,
        entropies=loss_tokens(GIVEN["entropies"]),
        rollout_logprobs=loss_tokens(GIVEN[names["rollout"]]),
        old_logprobs=loss_tokens(GIVEN[names["old"]]),
        ref_logprobs=loss_tokens(GIVEN[names["ref"]]),
        advantages=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths),
        num_loss_tokens=lengths,
    )
    found = objective(inputs)
    loss = (found.token_weights * found.losses).sum() / objective.num_units(lengths)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    gradients, at = [np.zeros(len(mask)) for mask in masks], 0
    for row, mask in zip(gradients, masks, strict=True):
        row[mask] = logprobs.grad[at : at + int(mask.sum())].numpy()
        at += int(mask.sum())
    return loss.item(), gradients


def flat(rows: Any) -> list[float]:
    return np.concatenate([np.asarray(row, float) for row in rows]).tolist()


def rewarded(index: int, *, mask: list[int] | None = None) -> RewardedSample:
    first, second = GIVEN["rewards"][index]
    return RewardedSample(
        sample_id=str(index),
        reward=first + second,
        loss_mask=np.array(mask or GIVEN["masks"][index]),
        components={"first": first, "second": second},
        policy_logprobs=np.array(GIVEN["current"][index]),
        ref_logprobs=np.array(GIVEN["ref"][index]),
    )


def estimate(algorithm: AlgorithmConfig, *, is_whole: bool = False) -> list[float]:
    """Estimate both prompt groups, and return one advantage for each sample."""
    estimator, found = AdvantageEstimator(algorithm, max_new_tokens=MAX_NEW_TOKENS), []
    for at in range(0, len(GIVEN["rewards"]), SAMPLES_PER_PROMPT):
        indices = range(at, at + SAMPLES_PER_PROMPT)
        samples = [
            rewarded(index, mask=[1] * len(GIVEN["rollout"][index]) if is_whole else None)
            for index in indices
        ]
        found += [float(row[0]) for row in estimator(samples)]
    return found


def test_trl_reference_is_from_the_pinned_release() -> None:
    assert TRL["trl"] == environment.pinned("trl", "trl"), "run python -m tests.trl_reference"


def test_every_trl_reference_case_is_compared() -> None:
    assert TRL["losses"].keys() == LOSSES.keys() == OURS.keys()
    assert TRL["preferences"].keys() == PREFERENCES.keys() == OF_PAIRS.keys()
    assert TRL["advantages"].keys() == ADVANTAGES.keys()
    assert TRL["leave one out"].keys() == LEAVE_ONE_OUT.keys()


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_loss_and_gradients_equal_those_of_trl_grpo_trainer(
    name: str, settings: dict[str, Any]
) -> None:
    algorithm, theirs = AlgorithmConfig(**settings), TRL["losses"][name]
    names = {
        "current": "current",
        "old": "old",
        "ref": "ref",
        "rollout": "old" if algorithm.old_logprobs == "rollout" else "rollout",
    }
    masks = loss_masks(algorithm)
    loss, gradients = loss_of(algorithm, masks, advantages=theirs["advantages"], names=names)
    counted = (
        sum(mask.any() for mask in masks) / len(masks)
        if algorithm.aggregation == "sample_mean"
        else 1.0
    )  # a sample without loss counts there
    assert counted * loss == pytest.approx(theirs["loss"], **CLOSE)
    assert [counted * value for value in flat(gradients)] == pytest.approx(
        flat(theirs["gradients"]), **CLOSE
    )


def test_reference_cases_cover_both_sides_of_clips_and_masks() -> None:
    """A case whose clips and masks never took hold would show nothing."""
    plain = flat(TRL["losses"]["token mean"]["gradients"])
    loss_tokens = np.concatenate([np.array(mask, bool) for mask in GIVEN["masks"]])
    assert 0 < np.count_nonzero(plain) < loss_tokens.sum()
    for name in (
        "two-sided clip",
        "off-policy sequences",
        "engine corrected by the token, kept within",
        "engine corrected by the token, masked",
    ):
        other = flat(TRL["losses"][name]["gradients"])
        assert other != plain, name
        assert any(other), name
    rows = zip(GIVEN["old"], GIVEN["rollout"], GIVEN["masks"], strict=True)
    ratios = np.exp([np.dot(np.subtract(old, sampled), mask) for old, sampled, mask in rows])
    assert (
        {bool(ratio > 1.1) for ratio in ratios}
        == {bool(0.7 <= ratio <= 1.3) for ratio in ratios}
        == {True, False}
    )


@pytest.mark.parametrize(("name", "settings"), OF_PAIRS.items(), ids=OF_PAIRS.keys())
def test_loss_and_gradients_equal_those_of_trl_dpo_trainer(
    name: str, settings: dict[str, Any]
) -> None:
    names = {
        "current": "pairs_current",
        "ref": "pairs_ref",
        "old": "pairs_current",
        "rollout": "pairs_current",
    }
    masks = [np.ones(len(row), bool) for row in GIVEN["rollout"]]
    loss, gradients = loss_of(
        AlgorithmConfig(**settings), masks, advantages=[1.0] * len(masks), names=names
    )
    assert loss == pytest.approx(TRL["preferences"][name]["loss"], **CLOSE)
    assert flat(gradients) == pytest.approx(flat(TRL["preferences"][name]["gradients"]), **CLOSE)


@pytest.mark.parametrize(("name", "normalise_std"), [("group", True), ("none", False)])
def test_advantages_equal_those_of_trl_grpo_trainer(name: str, normalise_std: bool) -> None:
    assert estimate(AlgorithmConfig(normalise_std=normalise_std)) == pytest.approx(
        TRL["advantages"][name], rel=ROUNDED, abs=ROUNDED
    )


def test_advantages_equal_those_of_trl_grpo_trainer_with_its_epsilon() -> None:
    rewards = np.array(GIVEN["rewards"]).sum(axis=1).reshape(-1, SAMPLES_PER_PROMPT)
    assert normalise_prompt_groups(rewards, eps=1e-4).ravel() == pytest.approx(
        TRL["advantages"]["group"], rel=1e-7
    )


def test_advantages_of_one_large_group_equal_those_of_trl_async_grpo_trainer() -> None:
    rewards = np.array(GIVEN["rewards"]).sum(axis=1)[None]
    ours = normalise_prompt_groups(rewards, std_correction=0)[0]
    assert ours == pytest.approx(TRL["advantages of the asynchronous trainer"], rel=ROUNDED)


def test_advantages_per_reward_component_equal_those_of_trl_grpo_trainer() -> None:
    algorithm = AlgorithmConfig(
        name="gdpo", reward_weights={"first": 1.0, "second": 0.5}, std_correction=1
    )
    values = np.array(estimate(algorithm), np.float32)
    whitening = compute_whitening(
        [(values, np.ones(len(values), np.int64))], over="samples", correction=1, ranks=SingleRank()
    )
    assert whitening.apply(values.astype(float)) == pytest.approx(
        TRL["advantages"]["components apart"], rel=2e-4
    )  # 1e-4 is added


def test_normalised_advantages_equal_those_of_trl_rloo_trainer() -> None:
    values = np.array(estimate(AlgorithmConfig(name="rloo"), is_whole=True), np.float32)
    whitening = compute_whitening(
        [(values, np.ones(len(values), np.int64))], over="samples", correction=1, ranks=SingleRank()
    )
    assert whitening.apply(values.astype(float)) == pytest.approx(
        TRL["leave one out"]["normalised"]["advantages"], rel=ROUNDED
    )


def test_batch_normalised_advantages_equal_those_of_trl_grpo_trainer() -> None:
    centred = np.array(estimate(AlgorithmConfig(normalise_std=False, whiten_advantages="rewards")))
    scaling = compute_reward_scaling([np.array(GIVEN["rewards"]).sum(axis=1)], ranks=SingleRank())
    assert scaling.apply(centred) == pytest.approx(TRL["advantages"]["batch"], rel=ROUNDED)


@pytest.mark.parametrize(("name", "kl_coefficient"), [("plain", 0.0), ("KL in the reward", 40.0)])
def test_advantages_equal_those_of_trl_rloo_trainer(name: str, kl_coefficient: float) -> None:
    algorithm = AlgorithmConfig(name="rloo", kl_coefficient=kl_coefficient)
    assert estimate(algorithm, is_whole=True) == pytest.approx(
        TRL["leave one out"][name]["advantages"], rel=ROUNDED
    )


@pytest.mark.parametrize("name", LEAVE_ONE_OUT)
def test_gradients_equal_those_of_trl_rloo_trainer_at_ratio_1(name: str) -> None:
    names = {"current": "current", "old": "current", "ref": "ref", "rollout": "current"}
    masks, theirs = (
        [np.ones(len(row), bool) for row in GIVEN["rollout"]],
        TRL["leave one out"][name],
    )
    _, gradients = loss_of(
        AlgorithmConfig(name="rloo", length_normaliser=1),
        masks,
        advantages=theirs["advantages"],
        names=names,
    )
    assert flat(gradients) == pytest.approx(flat(theirs["gradients"]), **CLOSE)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_divergence_from_the_teacher_equals_that_of_trl_gkd_trainer(mixture: float) -> None:
    student = torch.tensor(GIVEN["student_logits"], dtype=torch.float64).requires_grad_()
    teacher = torch.tensor(GIVEN["teacher_logits"], dtype=torch.float64)
    tokens = TokenSet(student.log_softmax(-1), teacher.log_softmax(-1))
    loss = divergence(tokens, kind="jsd", mixture=mixture, tail="truncate").mean()
    loss.backward()  # type: ignore[no-untyped-call]
    theirs = TRL["distillation"][str(mixture)]
    assert loss.item() == pytest.approx(theirs["loss"], **CLOSE)
    assert student.grad is not None
    assert flat(student.grad.tolist()) == pytest.approx(flat(theirs["gradients"]), **CLOSE)
