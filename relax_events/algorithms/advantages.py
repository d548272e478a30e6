"""Advantages from rewards, one for each sample of a prompt group. Needs numpy alone, so that the
advantage worker stays light.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Float32, Float64

from relax_events.errors import RewardError


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """The rewards of a prompt group's samples: the one that counts, and what it was put together
    from, by name; and how long they are.
    """

    total: Float64[np.ndarray, " samples"]
    components: Mapping[str, Float64[np.ndarray, " samples"]] = field(default_factory=dict)
    lengths: Float64[np.ndarray, " samples"] | None = None
    """Loss tokens of each sample; the judge always gives them."""
    num_excluded: int = 0
    """Samples of the prompt group that are not among these, since they were cut off."""


def group_advantages(
    rewards: Float[np.ndarray, "prompt_groups samples"],
    *,
    normalise_std: bool = True,
    std_correction: int | None = None,
    eps: float = 1e-6,
) -> Float32[np.ndarray, "prompt_groups samples"]:
    """Centre rewards within each prompt group, and scale them by the group's standard deviation
    (GRPO).

    A prompt group whose rewards are all equal gets exact zeros, not NaN nor rounding noise, and the
    caller counts it as uninformative.

    Args:
        rewards: Scalar reward of each sample, unitless; one row for each prompt group.
        normalise_std: Divide by the standard deviation; without it, advantages keep the unit of the
            reward (Dr. GRPO).
        std_correction: What is taken off the number of samples in the standard deviation, 0 or 1;
            None for 1.
        eps: Added to the standard deviation, same unit as the reward.
    Returns:
        Advantages, zero mean per row.
    Raises:
        ValueError: A reward is not finite; the text names the first such row.
    Source: DeepSeekMath, section 4.1.2 (arXiv 2402.03300); deviation with n - 1. Dr. GRPO: arXiv
    2503.20783.
    """
    values = rewards.astype(np.float64)
    if not (finite := np.isfinite(values).all(axis=1)).all():
        row = int(np.argmin(finite))
        raise ValueError(
            f"rewards must be finite, got {rewards[row].tolist()} in row {row}; drop that "
            "prompt group or mend its reward function"
        )
    advantages: Float32[np.ndarray, "prompt_groups samples"] = _normalise(
        values, normalise_std=normalise_std, std_correction=std_correction, eps=eps
    ).astype(np.float32)
    return advantages


def _normalise(
    values: Float64[np.ndarray, "prompt_groups samples"],
    *,
    normalise_std: bool,
    std_correction: int | None,
    eps: float = 1e-6,
) -> Float64[np.ndarray, "prompt_groups samples"]:
    centred: Float64[np.ndarray, "prompt_groups samples"] = values - values.mean(
        axis=1, keepdims=True
    )
    centred[(values == values[:, :1]).all(axis=1)] = 0.0
    if normalise_std and values.shape[1] > 1:
        centred /= (
            values.std(axis=1, ddof=1 if std_correction is None else std_correction, keepdims=True)
            + eps
        )
    return centred


def grpo_advantages(
    rewards: GroupRewards, *, normalise_std: bool, std_correction: int | None = None
) -> Float64[np.ndarray, " samples"]:
    """Centre a prompt group's rewards, and divide them by their standard deviation if wanted; see
    `group_advantages`.
    """
    advantages: Float64[np.ndarray, " samples"] = _normalise(
        rewards.total[None], normalise_std=normalise_std, std_correction=std_correction
    )[0]
    return advantages


def centred_advantages(rewards: GroupRewards) -> Float64[np.ndarray, " samples"]:
    """Take the prompt group's mean off each reward (REINFORCE++ with baseline).

    Source: REINFORCE++ (arXiv 2501.03262).
    """
    return grpo_advantages(rewards, normalise_std=False)


def zeros(rewards: GroupRewards) -> Float64[np.ndarray, " samples"]:
    """Give zeros, whatever the rewards are: what teaches is something else, such as a teacher."""
    return np.zeros_like(rewards.total)


def ones(rewards: GroupRewards) -> Float64[np.ndarray, " samples"]:
    """Give each sample the advantage 1: it is an answer to learn, and nothing judges it."""
    return np.ones_like(rewards.total)


def rloo_advantages(
    rewards: GroupRewards, *, normalise_std: bool = False, std_correction: int | None = None
) -> Float64[np.ndarray, " samples"]:
    """Take the mean reward of the other samples off each reward (RLOO); exact zeros where all are
    equal, or the others were left out.

    Args:
        rewards: Of at least two samples.
        normalise_std: Divide by the standard deviation of the whole prompt group, to which 1e-6 is
            added.
        std_correction: As in `group_advantages`.
    Raises:
        RewardError: The sample has no others.
    Source: RLOO: Back to basics (arXiv 2402.14740), the RLOO estimator, which has no deviation.
    """
    num_samples = len(rewards.total)
    if num_samples < 2 and rewards.num_excluded:
        return np.zeros_like(rewards.total)
    if num_samples < 2:
        raise RewardError(
            "a leave-one-out baseline needs at least 2 samples of a prompt, got 1; set "
            "run.samples_per_prompt"
        )
    return grpo_advantages(
        rewards, normalise_std=normalise_std, std_correction=std_correction
    ) * (num_samples / (num_samples - 1))


def opo_advantages(rewards: GroupRewards) -> Float64[np.ndarray, " samples"]:
    """Take the mean reward weighted by the samples' lengths off each reward (OPO); exact zeros
    where all are equal.

    A sample counts as often as it has loss tokens. Where none has any, nothing is trained, and all
    get zeros.

    Raises:
        RewardError: The lengths are not given.
    Source: OPO: On-policy RL with optimal reward baseline (arXiv 2505.23585), the baseline under
    gradient norms that grow with length.
    """
    if rewards.lengths is None:
        raise RewardError(
            "a length-weighted baseline needs the number of loss tokens of each sample, got none"
        )
    total = rewards.lengths.sum()
    if not total or (rewards.total == rewards.total[0]).all():
        return np.zeros_like(rewards.total)
    baseline = float(rewards.lengths @ rewards.total / total)
    return rewards.total - baseline


def maxrl_advantages(rewards: GroupRewards) -> Float64[np.ndarray, " samples"]:
    """Centre rewards within the prompt group, and divide them by the group's mean (MaxRL); exact
    zeros where all are equal.

    Args:
        rewards: Not negative; the paper's are 1 for right and 0 for wrong, and their mean is the
            pass rate.
    Raises:
        RewardError: A reward is negative: then the mean is no rate, and dividing by it may turn
            signs round.
    Source: MaxRL: Maximum likelihood reinforcement learning (arXiv 2602.02710), algorithm 1: sum
    over i of (r_i - mean) S_i / (n mean), and
        zero where nothing was right.
    """
    if (lowest := rewards.total.min()) < 0:
        remedy = (
            "shift the rewards to 0 and above, leave overlong penalties out, or take another "
            "algorithm"
        )
        raise RewardError(
            "maxrl divides by the prompt group's mean reward, so rewards must be at least "
            f"0, got {lowest:g}; {remedy}"
        )
    advantages = centred_advantages(rewards)
    return advantages / rewards.total.mean() if advantages.any() else advantages


def gdpo_advantages(
    rewards: GroupRewards,
    *,
    normalise_std: bool,
    reward_weights: Mapping[str, float],
    std_correction: int | None = None,
) -> Float64[np.ndarray, " samples"]:
    """Normalise each reward component within the prompt group by itself, and sum them by their
    weights (GDPO).

    Args:
        rewards: With components.
        normalise_std: Divide each component by its standard deviation.
        reward_weights: By component; empty for all that there are, with weight 1.
        std_correction: As in `group_advantages`.
    Raises:
        RewardError: There are no components, or not one that has a weight.
    Source: GDPO (arXiv 2601.05242), section 3; its normalisation over the step is the trainer's.
    """
    if not rewards.components:
        raise RewardError(
            "there are no reward components to normalise apart; return a dict of them, or "
            "take another algorithm"
        )
    weights = reward_weights or dict.fromkeys(rewards.components, 1.0)
    if missing := sorted(weights.keys() - rewards.components.keys()):
        there = ", ".join(sorted(rewards.components))
        raise RewardError(
            f"algorithm.reward_weights names {missing[0]!r}, which is no component of the "
            f"reward; there are {there}"
        )
    rows = np.stack([rewards.components[name] for name in weights])
    advantages: Float64[np.ndarray, " samples"] = np.array(list(weights.values())) @ _normalise(
        rows, normalise_std=normalise_std, std_correction=std_correction
    )
    return advantages
