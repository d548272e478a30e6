"""Computes advantages from rewards, one for each sample of a prompt group. Imports numpy alone, so
that the advantage worker stays light.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

from relax_events.config.algorithm import Baseline, Deviation
from relax_events.errors import RewardError


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """The rewards of a prompt group's samples, their components by name and the lengths."""

    total: Float64[np.ndarray, " samples"]
    components: Mapping[str, Float64[np.ndarray, " samples"]] = field(default_factory=dict)
    lengths: Float64[np.ndarray, " samples"] | None = None
    """Loss tokens of each sample; the `AdvantageEstimator` always sets them."""
    num_excluded: int = 0
    """Truncated samples of the prompt group that are excluded."""


def normalise_prompt_groups(
    values: Float64[np.ndarray, "prompt_groups samples"],
    *,
    baseline: Baseline = "group",
    normalise_std: Deviation = True,
    std_correction: int | None = None,
    eps: float = 1e-6,
) -> Float64[np.ndarray, "prompt_groups samples"]:
    """Subtract a baseline from values within each prompt group, and divide them by a deviation.

    A prompt group whose values are all equal gets exact zeros, not NaN nor rounding noise, unless
    there is no baseline.

    Args:
        values: One row for each prompt group; rewards, unitless.
        baseline: The group's mean, the mean of the other samples (at least 2 samples), or none.
        normalise_std: Divide by the standard deviation of the whole group, or of the other samples;
            not where these are equal or one alone. Without it, the result keeps the unit of the
            values (Dr. GRPO).
        std_correction: Subtracted from the number of samples in the standard deviation, 0 or 1;
            None for 1.
        eps: Added to the standard deviation, same unit as the values.
    Returns:
        Advantages, zero mean per row with the group's mean and deviation.
    Source: DeepSeekMath, section 4.1.2 (arXiv 2402.03300); deviation with n - 1. Dr. GRPO: arXiv
    2503.20783. Mean of the others: RLOO (arXiv 2402.14740); their deviation: NeMo-RL's
    `leave_one_out_baseline`.
    """
    num_samples, ddof = values.shape[1], 1 if std_correction is None else std_correction
    centred: Float64[np.ndarray, "prompt_groups samples"] = values - (
        0.0 if baseline == "none" else values.mean(axis=1, keepdims=True)
    )
    if baseline != "none":
        centred[(values == values[:, :1]).all(axis=1)] = 0.0
    if normalise_std == "leave_one_out":
        centred /= np.stack(
            [
                _deviation(np.delete(values, index, axis=1), ddof=ddof, eps=eps)
                for index in range(num_samples)
            ],
            axis=1,
        )
    elif normalise_std and num_samples > 1:
        centred /= values.std(axis=1, ddof=ddof, keepdims=True) + eps
    if baseline == "leave_one_out":
        centred *= num_samples / (num_samples - 1)
    return centred


def _deviation(
    values: Float64[np.ndarray, "prompt_groups samples"], *, ddof: int, eps: float
) -> Float64[np.ndarray, " prompt_groups"]:
    """Return the deviation of each row plus eps, 1 where its values are equal or one alone."""
    if values.shape[1] < 2:
        return np.ones(len(values))
    differ = (values != values[:, :1]).any(axis=1)
    return np.where(differ, values.std(axis=1, ddof=ddof) + eps, 1.0)


def grpo_advantages(
    rewards: GroupRewards,
    *,
    baseline: Baseline = "group",
    normalise_std: Deviation,
    std_correction: int | None = None,
) -> Float64[np.ndarray, " samples"]:
    """Subtract the baseline from a prompt group's rewards, and optionally divide them by a standard
    deviation (GRPO, DAPO, Dr. GRPO, RLOO); see `normalise_prompt_groups`.

    Raises:
        RewardError: The baseline is the other samples, and there is one sample only; where the
            others were excluded, it gets 0.
    """
    num_samples = len(rewards.total)
    if num_samples < 2 and baseline == "leave_one_out":
        if rewards.num_excluded:
            return np.zeros_like(rewards.total)
        raise RewardError(
            f"a leave-one-out baseline needs at least 2 samples of a prompt, got {num_samples}; "
            "set run.samples_per_prompt"
        )
    advantages: Float64[np.ndarray, " samples"] = normalise_prompt_groups(
        rewards.total[None],
        baseline=baseline,
        normalise_std=normalise_std,
        std_correction=std_correction,
    )[0]
    return advantages


def centred_advantages(rewards: GroupRewards) -> Float64[np.ndarray, " samples"]:
    """Subtract the prompt group's mean from each reward (REINFORCE++ with baseline).

    Source: REINFORCE++ (arXiv 2501.03262).
    """
    return grpo_advantages(rewards, normalise_std=False)


def zeros(rewards: GroupRewards) -> Float64[np.ndarray, " samples"]:
    """Return zeros for any rewards: the signal comes from elsewhere, such as a teacher."""
    return np.zeros_like(rewards.total)


def ones(rewards: GroupRewards) -> Float64[np.ndarray, " samples"]:
    """Return 1 for each sample: it is a target to imitate (SFT, DPO)."""
    return np.ones_like(rewards.total)


def opo_advantages(rewards: GroupRewards) -> Float64[np.ndarray, " samples"]:
    """Subtract the length-weighted mean reward from each reward (OPO); exact zeros where all are
    equal.

    A sample's weight is its number of loss tokens. If no sample has any, all get zeros.

    Raises:
        RewardError: The lengths are missing.
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
        rewards: Not negative; in the paper 1 for correct and 0 for incorrect, so their mean is the
            pass rate.
    Raises:
        RewardError: A reward is negative: dividing by the mean may then flip signs.
    Source: MaxRL: Maximum likelihood reinforcement learning (arXiv 2602.02710), algorithm 1: sum
    over i of (r_i - mean) S_i / (n mean), and
        zero where no sample was correct.
    """
    if (lowest := rewards.total.min()) < 0:
        raise RewardError(
            "maxrl divides by the prompt group's mean reward, so rewards must be at least 0, got "
            f"{lowest:g}; shift the rewards to 0 and above, disable overlong penalties, or use "
            "another algorithm"
        )
    advantages = centred_advantages(rewards)
    return advantages / rewards.total.mean() if advantages.any() else advantages


def gdpo_advantages(
    rewards: GroupRewards,
    *,
    normalise_std: Deviation,
    reward_weights: Mapping[str, float],
    std_correction: int | None = None,
) -> Float64[np.ndarray, " samples"]:
    """Normalise each reward component within the prompt group separately, and return their weighted
    sum (GDPO).

    Args:
        rewards: With components.
        normalise_std: As in `normalise_prompt_groups`, of each component.
        reward_weights: By component; empty for all components with weight 1.
        std_correction: As in `normalise_prompt_groups`.
    Raises:
        RewardError: There are no components, or a weighted component is missing.
    Source: GDPO (arXiv 2601.05242), section 3; the trainer normalises over the step.
    """
    if not rewards.components:
        raise RewardError(
            "there are no reward components to normalise separately; return a dict of them, or "
            "use another algorithm"
        )
    weights = reward_weights or dict.fromkeys(rewards.components, 1.0)
    if missing := sorted(weights.keys() - rewards.components.keys()):
        there = ", ".join(sorted(rewards.components))
        raise RewardError(
            f"algorithm.reward_weights names {missing[0]!r}, which is not a component of "
            f"the reward; components are {there}"
        )
    rows = np.stack([rewards.components[name] for name in weights])
    advantages: Float64[np.ndarray, " samples"] = np.array(
        list(weights.values())
    ) @ normalise_prompt_groups(rows, normalise_std=normalise_std, std_correction=std_correction)
    return advantages
