"""Replaces rewards and advantages of recorded samples: rewards of a rescoring, or advantages of
another algorithm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from relax_events.algorithms.advantage_estimator import (
    AdvantageEstimator,
    RewardedSample,
    list_advantage_settings,
)
from relax_events.config import AlgorithmConfig
from relax_events.errors import ConfigError, CorruptRecord, RewardError, SchemaError
from relax_events.events.codec import EventCodec
from relax_events.events.generations import TrajectoryKey, get_trajectory_key
from relax_events.events.sample_columns import split_samples
from relax_events.events.tensors import dense
from relax_events.events.types import SampleReady, SampleScored
from relax_events.kafka.log_reader import LogReader
from relax_events.training.batch.assembly import LocatedSample


def needs_new_advantages(recorded: AlgorithmConfig, algorithm: AlgorithmConfig) -> bool:
    """Return whether this algorithm would compute other advantages than the recorded ones."""
    return list_advantage_settings(recorded) != list_advantage_settings(algorithm)


def require_recorded_teacher(
    recorded: AlgorithmConfig, algorithm: AlgorithmConfig, *, run_id: str
) -> None:
    """Reject a replay that distils from teacher log-probabilities that were not recorded.

    Args:
        recorded: The parent's algorithm.
        algorithm: The replay's algorithm.
        run_id: Id of the parent.
    Raises:
        ConfigError: The records lack what the replay needs; the text says what.
    """
    if not algorithm.distills:
        return
    if not recorded.distills:
        raise ConfigError(
            f"algorithm.distill_coefficient = {algorithm.distill_coefficient:g} needs the "
            f"teacher's log-probabilities, and run {run_id} was recorded without a teacher; set it "
            "to 0, or record with a teacher"
        )
    had = (
        (recorded.distill_tokens, recorded.distill_top_k)
        if recorded.has_topk_loss
        else ("sampled", 0)
    )
    has_fewer = (
        # the ids of a smaller union are not a part of a larger one
        had[1] != algorithm.distill_top_k
        if algorithm.distill_tokens == "union"
        else had[1] < algorithm.distill_top_k
    )
    if algorithm.has_topk_loss and (had[0] != algorithm.distill_tokens or has_fewer):
        raise ConfigError(
            f"algorithm.distill_tokens = {algorithm.distill_tokens!r} with distill_top_k = "
            f"{algorithm.distill_top_k} is not on the log of run {run_id}, which has {had[0]} with "
            f"{had[1]}; replay with those, or with 'sampled'"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class RelabelledReward:
    """The reward of a rescoring, with its parts by turn and by token; None for a sample that has no
    part in training.
    """

    reward: float | None
    turn_rewards: NDArray[np.generic] | None = None
    token_rewards: NDArray[np.generic] | None = None


class AdvantageRelabeller:
    """Computes new advantages of whole prompt groups, from recorded or new rewards.

    Args:
        algorithm: The settings.
        max_new_tokens: Longest possible completion.
        rewards: By trajectory, to replace the recorded ones; None keeps those. New rewards have no
            components.
        scores: Name of the new rewards, for errors.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        *,
        max_new_tokens: int,
        rewards: Mapping[TrajectoryKey, RelabelledReward] | None = None,
        scores: str = "",
    ) -> None:
        self._algorithm, self._rewards, self._scores = algorithm, rewards, scores
        self._estimator = AdvantageEstimator(algorithm, max_new_tokens=max_new_tokens)

    def __call__(self, placed: list[LocatedSample]) -> list[LocatedSample]:
        """Return the samples, in the same order, with their new rewards and advantages.

        Raises:
            ConfigError: A sample has no such score, or lacks an input of the algorithm.
        """
        groups: dict[str, list[SampleReady]] = {}
        for item in placed:
            groups.setdefault(item.sample.prompt_group_id, []).append(item.sample)
        relabelled = {
            sample.sample_id: sample
            for members in groups.values()
            for sample in self._relabel(members)
        }
        return [
            dataclasses.replace(item, sample=relabelled[item.sample.sample_id]) for item in placed
        ]

    def _relabel(self, members: Sequence[SampleReady]) -> list[SampleReady]:
        ordered = sorted(members, key=lambda sample: sample.key.sample_index)
        rewarded = [self._build_rewarded(sample) for sample in ordered]
        try:
            advantages = self._estimator(rewarded)
        except RewardError as error:
            raise ConfigError(
                f"prompt group {ordered[0].prompt_group_id} can't be relabelled by "
                f"{self._algorithm.name}: {error}"
            ) from error
        return [
            dataclasses.replace(
                sample,
                reward=relabelled.reward,
                turn_rewards=relabelled.turn_rewards,
                token_rewards=relabelled.token_rewards,
                advantages=values,
            )
            for sample, relabelled, values in zip(ordered, rewarded, advantages, strict=True)
        ]

    def _build_rewarded(self, sample: SampleReady) -> RewardedSample:
        rewarded = RewardedSample.from_ready(sample, self._algorithm)
        if self._rewards is None:
            return rewarded
        other = self._new_reward(sample, self._rewards)
        return dataclasses.replace(
            rewarded,
            reward=other.reward,
            components={},
            turn_rewards=other.turn_rewards,
            token_rewards=other.token_rewards,
        )

    def _new_reward(
        self, sample: SampleReady, rewards: Mapping[TrajectoryKey, RelabelledReward]
    ) -> RelabelledReward:
        reward = rewards.get(get_trajectory_key(sample))
        if reward is None and not sample.finish_reason.is_scored:
            return RelabelledReward(None)
        if reward is None:
            raise ConfigError(
                f"sample {sample.sample_id} has no reward under parent.scores = {self._scores!r}; "
                "finish the rescoring with relax rewards --keep, or choose versions that it covers"
            )
        return reward


def read_rewards(
    reader: LogReader, topic: str, *, num_partitions: int, codec: EventCodec
) -> dict[TrajectoryKey, RelabelledReward]:
    """Return the rewards on a topic of scores by trajectory; samples whose scoring failed are left
    out. The later of two counts.
    """
    rewards: dict[TrajectoryKey, RelabelledReward] = {}
    for record in reader.stream(
        {(topic, number): reader.watermarks(topic, number) for number in range(num_partitions)}
    ):
        try:
            events = split_samples(codec.decode(record.value))
        except (CorruptRecord, SchemaError) as error:
            raise ConfigError(
                f"{record.location} can't be read as a score: {error}; rescore under another name"
            ) from error
        for event in events:
            if isinstance(event, SampleScored) and event.reward is not None:
                parts = (event.turn_rewards, event.token_rewards)
                by_turn, by_token = (
                    None
                    if part is None
                    else dense(part, what=f"sample {event.sample_id}: rewards by turn or token")
                    for part in parts
                )
                rewards[get_trajectory_key(event)] = RelabelledReward(
                    event.reward, by_turn, by_token
                )
    return rewards
