"""The section `algorithm`: the objective."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_events.config.base import Section


class AlgorithmConfig(Section):
    """The policy-gradient objective."""

    name: Literal["grpo", "gspo"] = "grpo"
    """Advantage and loss family. `grpo` has a ratio for each token; `gspo` one for each sample, with `aggregation = "sample_mean"` and
    clip ranges around 3e-4 and 4e-4."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    normalise_std: bool = True
    """Divide centred rewards by the group's standard deviation."""
    aggregation: Literal["token_mean", "sample_mean"] = "token_mean"
    """Mean over all tokens of the step, or over tokens of a sample first and then over samples."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL estimate against the reference model; above 0 the reference role is needed."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy || reference)."""
    old_logprobs: Literal["rollout", "actor"] = "rollout"
    """Whose log-probabilities stand below the ratio: the engine's, or the actor-forward role's."""
    filter_uniform_rewards: bool = False
    """Drop prompt groups whose rewards are all equal and issue others in their place (dynamic sampling)."""
