"""Every algorithm, from rewards to weights, teaches a small policy the rewarded behaviour."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relax_events.algorithms.advantage_estimator import AdvantageEstimator, RewardedSample
from relax_events.algorithms.description import installed_algorithms
from relax_events.algorithms.distillation import TokenSet
from relax_events.algorithms.objective import Objective, ObjectiveInputs
from relax_events.config import AlgorithmConfig
from relax_events.training.batch.step_statistics import (
    compute_second_moment_cutoff,
    compute_whitening,
)
from relax_events.training.ranks import SingleRank

NUM_TOKENS, LENGTH, GROUPS, SAMPLES = 5, 3, 8, 4
TEACHER = np.array([0.9, 0.04, 0.03, 0.02, 0.01])
"""Likes what is rewarded, for the algorithm that rewards are nothing to."""
CORRECTED = {
    "old_logprobs": "trainer",
    "correction": "tis",
    "opsm_threshold": 0.5,
    "m2_threshold": 0.04,
}


def estimate(
    sampled: np.ndarray, logprobs: np.ndarray, estimator: AdvantageEstimator
) -> np.ndarray:
    """Reward the ratio of token 0 in each sample; return the advantages of all tokens, concatenated."""
    rewarded = [
        RewardedSample(
            sample_id=str(index),
            reward=float((row_tokens == 0).mean()),
            components={
                "first": float(row_tokens[0] == 0),
                "rest": float((row_tokens[1:] == 0).mean()),
            },
            loss_mask=np.ones(LENGTH, np.uint8),
            policy_logprobs=logprob,
            ref_logprobs=np.full(LENGTH, -np.log(NUM_TOKENS)),
            values=np.full(LENGTH, 0.5),
            teacher_logprobs=np.log(TEACHER)[row_tokens],
        )
        for index, (row_tokens, logprob) in enumerate(zip(sampled, logprobs, strict=True))
    ]
    return np.concatenate(
        [
            values
            for start in range(0, len(rewarded), SAMPLES)
            for values in estimator(rewarded[start : start + SAMPLES])
        ]
    )


@pytest.mark.parametrize(
    "settings", [{}, CORRECTED, {"kl_coefficient": 0.01}], ids=["alone", "corrected", "with kl"]
)
@pytest.mark.parametrize(
    "name", [spec.name for spec in installed_algorithms() if spec.learns_from == "rewards"]
)
def test_policy_learns_to_choose_rewarded_tokens(name: str, settings: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig.model_validate({"name": name} | settings)
    estimator, objective = (
        AdvantageEstimator(algorithm, max_new_tokens=8),
        Objective(algorithm, max_new_tokens=8),
    )
    logits = torch.zeros(NUM_TOKENS, requires_grad=True)
    optimizer, generator = torch.optim.Adam([logits], lr=0.15), torch.Generator().manual_seed(1)
    lengths = torch.full((GROUPS * SAMPLES,), LENGTH)
    behind = logits.detach().clone()
    for _ in range(30):
        engine = (behind if settings is CORRECTED else logits.detach()).log_softmax(-1)
        behind = logits.detach().clone()  # with a correction the engine is one version behind
        sampled = torch.multinomial(
            engine.exp(), len(lengths) * LENGTH, replacement=True, generator=generator
        )
        rollout = engine[sampled]
        advantages = estimate(
            sampled.reshape(-1, LENGTH).numpy(), rollout.reshape(-1, LENGTH).numpy(), estimator
        )
        policy = logits.log_softmax(-1)
        whitening = compute_whitening(
            [(advantages, lengths.numpy())], over=algorithm.whiten_advantages, ranks=SingleRank()
        )
        used = (
            whitening.apply(advantages.astype(np.float64))
            if algorithm.whiten_advantages != "none"
            else advantages
        )
        squares = (policy.detach()[sampled] - rollout).double().square().numpy()
        inputs = ObjectiveInputs(
            logprobs=policy[sampled],
            entropies=-(policy.exp() * policy).sum().expand(len(sampled)),
            rollout_logprobs=rollout,
            old_logprobs=None if algorithm.old_logprobs == "trainer" else rollout,
            ref_logprobs=torch.full_like(rollout, -float(np.log(NUM_TOKENS))),
            advantages=torch.from_numpy(used).float(),
            num_loss_tokens=lengths,
            second_moment_cutoff=compute_second_moment_cutoff(
                [squares], threshold=algorithm.m2_threshold, ranks=SingleRank()
            )
            if algorithm.m2_threshold
            else None,
        )
        tokens = objective(inputs)
        optimizer.zero_grad()
        ((tokens.token_weights * tokens.losses).sum() / objective.num_units(lengths)).backward()
        optimizer.step()
    assert logits.softmax(-1)[0].item() > 0.7


TOP = {"distill_placement": "loss", "distill_top_k": 2}
WAYS: list[dict[str, Any]] = [
    {},
    *(
        {"distill_placement": "loss", "distill_divergence": kind}
        for kind in ("reverse_kl", "forward_kl", "jsd")
    ),
    {"distill_tokens": "student_topk"} | TOP,
    {
        "distill_tokens": "teacher_topk",
        "distill_divergence": "forward_kl",
        "distill_tail": "truncate",
    }
    | TOP,
    {"distill_tokens": "teacher_topk", "distill_divergence": "jsd", "distill_mixture": 0.2} | TOP,
]


@pytest.mark.parametrize(
    "settings", WAYS, ids=lambda settings: ",".join(map(str, settings.values())) or "advantage"
)
def test_policy_learns_the_distribution_of_its_teacher(settings: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig.model_validate({"name": "opd"} | settings)
    estimator, objective = (
        AdvantageEstimator(algorithm, max_new_tokens=8),
        Objective(algorithm, max_new_tokens=8),
    )
    teacher = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04])
    logits = torch.tensor([-0.5, 0.0, 0.5, 1.0, 0.0], requires_grad=True)
    optimizer, generator = torch.optim.Adam([logits], lr=0.1), torch.Generator().manual_seed(1)
    lengths = torch.full((GROUPS * SAMPLES,), LENGTH)
    for _ in range(50):
        rollout = logits.detach().log_softmax(-1)
        sampled = torch.multinomial(
            rollout.exp(), len(lengths) * LENGTH, replacement=True, generator=generator
        )
        rewarded = [
            RewardedSample(
                sample_id=str(index),
                reward=float(index),
                components={},
                loss_mask=np.ones(LENGTH, np.uint8),
                policy_logprobs=rollout[row_tokens].numpy(),
                teacher_logprobs=teacher.log()[row_tokens].numpy(),
            )
            for index, row_tokens in enumerate(sampled.reshape(-1, LENGTH))
        ]
        policy, ids = (
            logits.log_softmax(-1),
            (teacher if algorithm.distill_tokens == "teacher_topk" else rollout).topk(2).indices,
        )
        one_set = TokenSet(
            policy[ids].expand(len(sampled), 2), teacher.log()[ids].expand(len(sampled), 2)
        )
        inputs = ObjectiveInputs(
            logprobs=policy[sampled],
            entropies=torch.zeros(len(sampled)),
            rollout_logprobs=rollout[sampled],
            old_logprobs=rollout[sampled],
            ref_logprobs=None,
            advantages=torch.from_numpy(np.concatenate(estimator(rewarded))),
            num_loss_tokens=lengths,
            teacher_logprobs=teacher.log()[sampled],
            token_set=one_set if algorithm.has_topk_loss else None,
        )
        tokens = objective(inputs)
        optimizer.zero_grad()
        ((tokens.token_weights * tokens.losses).sum() / objective.num_units(lengths)).backward()
        optimizer.step()
    kept = ids if algorithm.distill_tokens == "teacher_topk" else torch.arange(5)
    torch.testing.assert_close(logits.detach().softmax(-1)[kept], teacher[kept], rtol=0, atol=0.06)
