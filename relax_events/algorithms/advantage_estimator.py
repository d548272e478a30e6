"""Estimates the advantage of each token of a prompt group: reward shaping, KL in the reward, the
algorithm's advantage function, and the teacher's term.

The advantage role uses it, and so does a replay that computes new advantages. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

from relax_events.algorithms.advantages import GroupRewards
from relax_events.algorithms.gae import GroupValues, rewards_by_loss_token
from relax_events.algorithms.paths import path_slices, turn_lengths
from relax_events.config import AlgorithmConfig
from relax_events.config.algorithm_spec import resolve
from relax_events.errors import ConfigError, RewardError
from relax_events.events.immutable import immutable
from relax_events.events.parts import REWARD_RANGE, FinishReason, is_reward
from relax_events.events.tensors import dense
from relax_events.events.types import SampleReady

MAX_LOG_RATIO = 20.0


@immutable(frozen=True, slots=True, kw_only=True)
class RewardedSample:
    """The inputs of an advantage.

    Log-probabilities are needed where a KL estimate against their model is subtracted, the values
    where the algorithm has a critic. `turn_rewards`, one for each turn, and `token_rewards`, one
    for each loss token, are parts of `reward`; an algorithm with one advantage per sample uses
    `reward` alone. An episode that branched has `path_lengths`, and `tokens` where it has
    `turn_rewards`. A sample without a reward has no part in the statistics of its prompt group.
    """

    sample_id: str
    reward: float | None
    loss_mask: NDArray[np.generic]
    components: Mapping[str, float]
    tokens: NDArray[np.generic] | None = None
    path_lengths: Sequence[int] = ()
    truncated_paths: Sequence[int] = ()
    policy_logprobs: NDArray[np.generic] | None = None
    ref_logprobs: NDArray[np.generic] | None = None
    values: NDArray[np.generic] | None = None
    teacher_logprobs: NDArray[np.generic] | None = None
    is_truncated: bool = False
    is_late: bool = False
    """Its reward is then that of each component."""
    turn_rewards: NDArray[np.generic] | None = None
    token_rewards: NDArray[np.generic] | None = None

    @property
    def paths(self) -> list[slice]:
        """Where its paths lie in its arrays."""
        return path_slices(self.path_lengths, num_tokens=len(self.loss_mask))

    @classmethod
    def from_ready(cls, sample: SampleReady, algorithm: AlgorithmConfig) -> RewardedSample:
        """Build it from a recorded sample, with the arrays that the algorithm needs.

        Raises:
            TypeError: One of them was not fetched from the object store.
        """
        policy = "actor_logprobs" if algorithm.old_logprobs == "actor" else "rollout_logprobs"
        kl, teacher = algorithm.has_reward_kl, algorithm.has_distill_advantage

        def read(name: str, *, is_needed: bool = True) -> NDArray[np.generic] | None:
            values = getattr(sample, name) if is_needed else None
            what = f"sample {sample.sample_id}: {name}"
            return None if values is None else dense(values, what=what)

        return cls(
            sample_id=sample.sample_id,
            reward=sample.reward,
            components=sample.components,
            loss_mask=dense(sample.loss_mask, what=f"sample {sample.sample_id}: loss_mask"),
            tokens=read("tokens", is_needed=bool(sample.path_lengths)),
            path_lengths=sample.path_lengths,
            truncated_paths=sample.truncated_paths,
            policy_logprobs=read(policy, is_needed=kl or teacher),
            ref_logprobs=read("ref_logprobs", is_needed=kl),
            values=read("values", is_needed=algorithm.needs_critic),
            teacher_logprobs=read("teacher_logprobs", is_needed=teacher),
            is_truncated=sample.finish_reason is FinishReason.LENGTH,
            is_late=sample.finish_reason is FinishReason.LATE,
            turn_rewards=read("turn_rewards"),
            token_rewards=read("token_rewards"),
        )


def list_advantage_settings(algorithm: AlgorithmConfig) -> tuple[Any, ...]:
    """Return the settings that recorded advantages depend on; without the trainer's own steps, such
    as whitening.
    """
    kl = (
        (
            algorithm.kl_coefficient,
            algorithm.kl_estimator,
            algorithm.kl_limit,
            algorithm.old_logprobs,
        )
        if algorithm.has_reward_kl
        else ()
    )
    shaping = (
        (algorithm.overlong_ratio, algorithm.overlong_penalty) if algorithm.overlong_ratio else ()
    )
    excludes_truncated = algorithm.truncated_samples == "drop"
    critic = (
        algorithm.gamma,
        algorithm.gae_lambda,
        algorithm.length_adaptive_alpha,
        algorithm.bootstrap_truncated,
        algorithm.turn_gamma,
    )
    teacher = (
        (algorithm.distill_coefficient, algorithm.old_logprobs)
        if algorithm.has_distill_advantage
        else ()
    )
    deviation = (
        algorithm.baseline,
        algorithm.normalise_std,
        algorithm.std_correction if algorithm.normalise_std is not False else None,
    )
    return (
        algorithm.name,
        deviation,
        algorithm.reward_weights,
        algorithm.options,
        excludes_truncated,
        shaping,
        kl,
        critic,
        teacher,
    )


class AdvantageEstimator:
    """Estimates the advantages of a prompt group's tokens as an `AlgorithmConfig` specifies."""

    def __init__(self, algorithm: AlgorithmConfig, *, max_new_tokens: int) -> None:
        """Load the algorithm once; later changes of its file have no effect.

        Args:
            algorithm: The settings.
            max_new_tokens: Longest possible completion, for the penalty on overlong ones.
        Raises:
            ConfigError: There is no such algorithm.
        """
        self._algorithm, self._max_new_tokens, self._spec = (
            algorithm,
            max_new_tokens,
            algorithm.spec,
        )
        self._advantage = resolve(self._spec.advantage)

    def __call__(self, samples: Sequence[RewardedSample]) -> list[NDArray[np.float32]]:
        """Return the advantage of each token, 0 where the loss mask is 0.

        Args:
            samples: All of the prompt group, by index.
        Returns:
            One array for each sample, as long as its tokens.
        Raises:
            RewardError: A reward or an advantage is beyond the range of float32, a reward is not
                what the algorithm needs, or the number of rewards by turn or token is wrong.
            ConfigError: A custom algorithm did not return a number for each sample.
        """
        kept = [sample for sample in samples if self._counts(sample)]
        for sample in kept:
            require_bounded_rewards(sample.sample_id, sample.reward, sample.components)
        with np.errstate(over="ignore", invalid="ignore"):
            advantages = self._estimate_kept(samples, kept)
        _require_finite_advantages(advantages, samples, name=self._algorithm.name)
        return advantages

    def _estimate_kept(
        self, samples: Sequence[RewardedSample], kept: Sequence[RewardedSample]
    ) -> list[NDArray[np.float32]]:
        """Estimate the advantages; zeros for samples that are excluded."""
        estimated = iter(
            self._estimate(kept, num_excluded=len(samples) - len(kept)) if kept else ()
        )
        return [
            next(estimated) if self._counts(sample) else np.zeros(len(sample.loss_mask), np.float32)
            for sample in samples
        ]

    def _counts(self, sample: RewardedSample) -> bool:
        """Return whether a sample has a part in the statistics of its prompt group."""
        is_dropped = sample.is_truncated and self._algorithm.truncated_samples == "drop"
        return sample.reward is not None and not is_dropped

    def _estimate(
        self, samples: Sequence[RewardedSample], *, num_excluded: int = 0
    ) -> list[NDArray[np.float32]]:
        masks = [sample.loss_mask.astype(bool) for sample in samples]
        lengths = np.array([np.count_nonzero(mask) for mask in masks], np.float64)
        token_rewards = [_rewards_by_token(sample) for sample in samples]
        penalties = self._penalties(samples, masks)
        rewards = self._rewards(samples, lengths)
        if self._spec.reward_kl == "sequence":
            rewards -= np.array([penalty.sum() for penalty in penalties] or 0.0)
            penalties = []
        if self._algorithm.needs_critic or self._spec.by_token:
            return self._subtract_teacher_penalties(
                self._by_token(samples, masks, rewards, token_rewards, penalties), samples, masks
            )
        returned = self._advantage(
            GroupRewards(rewards, _components(samples), lengths, num_excluded),
            **self._algorithm.keywords(self._spec.advantage_settings),
        )
        scalars = _check_scalars(returned, num_samples=len(samples), name=self._algorithm.name)
        single = scalars.astype(np.float32)
        advantages = [
            np.where(mask, scalar, np.float32(0))
            for mask, scalar in zip(masks, single, strict=True)
        ]
        for index, penalty in enumerate(penalties):
            to_come = [np.cumsum(penalty[path][::-1])[::-1] for path in samples[index].paths]
            returns = scalars[index] - np.concatenate(to_come)
            advantages[index] = np.where(masks[index], returns, 0.0).astype(np.float32)
        return self._subtract_teacher_penalties(advantages, samples, masks)

    def _subtract_teacher_penalties(
        self,
        advantages: list[NDArray[np.float32]],
        samples: Sequence[RewardedSample],
        masks: Sequence[NDArray[np.bool_]],
    ) -> list[NDArray[np.float32]]:
        """Subtract the teacher's penalty from each token's advantage, if the algorithm has one."""
        if not self._algorithm.has_distill_advantage:
            return advantages
        penalised = zip(advantages, samples, masks, strict=True)
        return [
            values - _teacher_penalties(sample, mask, self._algorithm)
            for values, sample, mask in penalised
        ]

    def _by_token(
        self,
        samples: Sequence[RewardedSample],
        masks: Sequence[NDArray[np.bool_]],
        rewards: Float64[np.ndarray, " samples"],
        token_rewards: Sequence[Float64[np.ndarray, " loss_tokens"]],
        penalties: Sequence[Float64[np.ndarray, " tokens"]],
    ) -> list[NDArray[np.float32]]:
        """Lay the loss tokens of each path out in a row, and compute an advantage for each."""
        group = _lay_out_paths(samples, masks)
        shape, row = group.rewards.shape, 0
        for owner, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
            outcome, end = rewards[owner] - token_rewards[owner].sum(), 0
            values = _values(sample) if self._algorithm.needs_critic else None
            for path in sample.paths:
                length = int(np.count_nonzero(mask[path]))
                begin, end = end, end + length
                if values is not None:
                    group.values[row, :length] = values[path][mask[path]]
                if penalties:
                    group.rewards[row, :length] = -penalties[owner][path][mask[path]]
                if length:
                    group.rewards[row, :length] += token_rewards[owner][begin:end]
                    group.rewards[row, length - 1] += outcome
                row += 1
        returned = np.asarray(
            self._advantage(group, **self._algorithm.keywords(self._spec.advantage_settings)),
            np.float64,
        )
        if returned.shape != shape:
            raise ConfigError(
                f"algorithm {self._algorithm.name}: its advantage must return numbers of "
                f"shape {shape}, one for each token, got shape {returned.shape}: "
                f"{returned.tolist()!r:.200}"
            )
        rows = iter(returned)
        advantages = [np.zeros(len(mask), np.float32) for mask in masks]
        for estimated, sample, mask in zip(advantages, samples, masks, strict=True):
            for path in sample.paths:
                length = int(np.count_nonzero(mask[path]))
                estimated[path][mask[path]] = next(rows)[:length]
        return advantages

    def _rewards(
        self, samples: Sequence[RewardedSample], lengths: Float64[np.ndarray, " samples"]
    ) -> Float64[np.ndarray, " samples"]:
        rewards: Float64[np.ndarray, " samples"] = np.array(
            [sample.reward for sample in samples], np.float64
        )
        ratio, penalty = self._algorithm.overlong_ratio, self._algorithm.overlong_penalty
        rewards -= overlong_penalties(
            lengths, max_new_tokens=self._max_new_tokens, ratio=ratio, penalty=penalty
        )
        return rewards

    def _penalties(
        self, samples: Sequence[RewardedSample], masks: Sequence[NDArray[np.bool_]]
    ) -> list[Float64[np.ndarray, " tokens"]]:
        if not self._algorithm.has_reward_kl:
            return []
        return [
            _kl_penalties(sample, mask, self._algorithm)
            for sample, mask in zip(samples, masks, strict=True)
        ]


def overlong_penalties(
    lengths: Float64[np.ndarray, " samples"], *, max_new_tokens: int, ratio: float, penalty: float
) -> Float64[np.ndarray, " samples"]:
    """Return the penalty of overlong completions: 0 until the last `ratio` of the length, then
    linear up to `penalty` at its end.

    Args:
        lengths: Tokens that the policy generated.
        max_new_tokens: Length with the full penalty.
        ratio: Fraction of `max_new_tokens` over which the penalty grows; 0 for no penalty.
        penalty: In the unit of the reward.
    Source: DAPO (arXiv 2503.14476), equation 13, where ratio is L_cache / L_max and penalty is 1.
    """
    if not ratio:
        return np.zeros_like(lengths)
    return penalty * np.clip(
        (lengths - (1 - ratio) * max_new_tokens) / (ratio * max_new_tokens), 0, 1
    )


def _kl_penalties(
    sample: RewardedSample, mask: NDArray[np.bool_], algorithm: AlgorithmConfig
) -> Float64[np.ndarray, " tokens"]:
    """Return kl_coefficient times the estimate of KL(old policy || reference) at each loss
    token.
    """
    if sample.policy_logprobs is None or sample.ref_logprobs is None:
        raise RewardError(
            f"sample {sample.sample_id} lacks the log-probabilities for the KL in its "
            "reward; is the role that computes them running?"
        )
    difference = _differences(sample.policy_logprobs, sample.ref_logprobs, mask)
    k3 = np.exp(np.minimum(-difference, MAX_LOG_RATIO)) - 1 + difference
    estimates = {"k1": difference, "k2": difference**2 / 2, "abs": np.abs(difference)}
    penalties: Float64[np.ndarray, " tokens"] = algorithm.kl_coefficient * np.clip(
        estimates.get(algorithm.kl_estimator, k3), -algorithm.kl_limit, algorithm.kl_limit
    )
    return penalties


def _lay_out_paths(
    samples: Sequence[RewardedSample], masks: Sequence[NDArray[np.bool_]]
) -> GroupValues:
    """Return rows of zeros for the paths of the samples. A truncated sample's last path was."""
    paths = [
        (
            owner,
            mask[path],
            number in sample.truncated_paths or (sample.is_truncated and path.stop == len(mask)),
        )
        for owner, (sample, mask) in enumerate(zip(samples, masks, strict=True))
        for number, path in enumerate(sample.paths)
    ]
    owners, row_masks, is_truncated = zip(*paths, strict=True)
    lengths = np.array([mask.sum() for mask in row_masks], np.int64)
    shape = len(paths), int(lengths.max())
    return GroupValues(
        np.zeros(shape),
        np.zeros(shape),
        lengths,
        np.array(is_truncated),
        [turn_lengths(mask) for mask in row_masks],
        np.array(owners, np.int64),
    )


def _rewards_by_token(sample: RewardedSample) -> Float64[np.ndarray, " loss_tokens"]:
    return rewards_by_loss_token(
        sample.loss_mask,
        turn_rewards=sample.turn_rewards,
        token_rewards=sample.token_rewards,
        sample_id=sample.sample_id,
        tokens=sample.tokens,
        path_lengths=sample.path_lengths,
    )


def _values(sample: RewardedSample) -> NDArray[np.float64]:
    if sample.values is None:
        raise RewardError(
            f"sample {sample.sample_id} lacks the critic's values; is the critic role running, or "
            "was the sample recorded by an algorithm without a critic?"
        )
    if sample.values.shape != sample.loss_mask.shape or not np.isfinite(sample.values).all():
        raise RewardError(
            f"sample {sample.sample_id}: the critic's values must be finite, one for each of "
            f"{len(sample.loss_mask)} tokens, got shape {sample.values.shape}: "
            f"{sample.values.tolist()!r:.200}"
        )
    return sample.values.astype(np.float64)


def _teacher_penalties(
    sample: RewardedSample, mask: NDArray[np.bool_], algorithm: AlgorithmConfig
) -> NDArray[np.float32]:
    """Return distill_coefficient times the log-ratio of policy and teacher at each loss token: the
    k1 estimate of the reverse KL.
    """
    if sample.policy_logprobs is None or sample.teacher_logprobs is None:
        raise RewardError(
            f"sample {sample.sample_id} lacks the teacher's or the policy's "
            "log-probabilities; is the role that computes them running?"
        )
    penalties = algorithm.distill_coefficient * _differences(
        sample.policy_logprobs, sample.teacher_logprobs, mask
    )
    return penalties.astype(np.float32)


def _differences(
    ours: NDArray[np.generic], theirs: NDArray[np.generic], mask: NDArray[np.bool_]
) -> Float64[np.ndarray, " tokens"]:
    return np.where(mask, ours.astype(np.float64) - theirs.astype(np.float64), 0.0)


def require_bounded_rewards(
    sample_id: str, reward: float | None, components: Mapping[str, float]
) -> None:
    """Check that float32 can hold a sample's reward, if it has one, and its components.

    Raises:
        RewardError: It can't hold one; the text names the sample and the value.
    """
    for name, value in {"reward": reward, **components}.items():
        if value is not None and not is_reward(value):
            raise RewardError(f"sample {sample_id}: {name} must be {REWARD_RANGE}, got {value}")


def _require_finite_advantages(
    advantages: Sequence[NDArray[np.float32]], samples: Sequence[RewardedSample], *, name: str
) -> None:
    for values, sample in zip(advantages, samples, strict=True):
        if not (is_finite := np.isfinite(values)).all():
            rewards = [
                None if each.reward is None else float(f"{each.reward:.6g}") for each in samples
            ]
            raise RewardError(
                f"algorithm {name}: the advantages of sample {sample.sample_id} must be finite, "
                f"got {values[~is_finite][0]} from the rewards {rewards!r:.200}"
            )


def _components(samples: Sequence[RewardedSample]) -> dict[str, Float64[np.ndarray, " samples"]]:
    names = next((sample for sample in samples if not sample.is_late), samples[0]).components.keys()
    for sample in samples:
        if sample.components.keys() != names and not sample.is_late:
            component_names, other_names = (
                ", ".join(sorted(keys)) or "none" for keys in (sample.components, names)
            )
            raise RewardError(
                f"sample {sample.sample_id} has the reward components {component_names}, another "
                f"sample of its prompt has {other_names}"
            )
    return {
        name: np.array(
            [sample.reward if sample.is_late else sample.components[name] for sample in samples],
            np.float64,
        )
        for name in names
    }


def _check_scalars(
    returned: object, *, num_samples: int, name: str
) -> Float64[np.ndarray, " samples"]:
    values = np.asarray(returned, np.float64)
    if values.shape != (num_samples,):
        raise ConfigError(
            f"algorithm {name}: its advantage must return {num_samples} numbers, one for "
            f"each sample, got {values.tolist()!r:.200}"
        )
    return values
