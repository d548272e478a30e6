"""Advantages from rewards. Needs numpy alone, so that the advantage worker stays light."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float32


def group_advantages(
    rewards: Float[np.ndarray, "prompt_groups samples"], *, normalise_std: bool = True, eps: float = 1e-6
) -> Float32[np.ndarray, "prompt_groups samples"]:
    """Centre rewards within each prompt group, and scale them by the group's standard deviation (GRPO).

    A prompt group whose rewards are all equal gets exact zeros, not NaN nor rounding noise, and the caller counts it as uninformative.

    Args:
        rewards: Scalar reward of each sample, unitless; one row for each prompt group.
        normalise_std: Divide by the standard deviation; without it, advantages keep the unit of the reward (Dr. GRPO).
        eps: Added to the standard deviation, same unit as the reward.
    Returns:
        Advantages, zero mean per row.
    Raises:
        ValueError: A reward is not finite; the text names the first such row.
    Source: DeepSeekMath, section 4.1.2 (arXiv 2402.03300); deviation with n - 1. Dr. GRPO: arXiv 2503.20783.
    """
    values = rewards.astype(np.float64)
    if not (finite := np.isfinite(values).all(axis=1)).all():
        row = int(np.argmin(finite))
        raise ValueError(f"rewards must be finite, got {rewards[row].tolist()} in row {row}; drop that prompt group or mend its reward function")
    centred = values - values.mean(axis=1, keepdims=True)
    centred[(values == values[:, :1]).all(axis=1)] = 0.0
    if normalise_std and values.shape[1] > 1:
        centred /= values.std(axis=1, ddof=1, keepdims=True) + eps
    advantages: Float32[np.ndarray, "prompt_groups samples"] = centred.astype(np.float32)
    return advantages
