"""Other rewards and advantages for recorded samples: of a rescoring, or normalised in another way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from relax_events.algorithms.advantages import group_advantages
from relax_events.broker.consumer import LogReader
from relax_events.config import AlgorithmConfig
from relax_events.errors import ConfigError, CorruptRecord, SchemaError
from relax_events.events.codec import EventCodec
from relax_events.events.tensors import dense
from relax_events.events.types import SampleReady, SampleScored
from relax_events.training.assembly import PlacedSample


def needs_advantages(recorded: AlgorithmConfig, wanted: AlgorithmConfig) -> bool:
    """Tell whether the recorded advantages are not those that this algorithm would have computed."""
    return (recorded.name, recorded.normalise_std) != (wanted.name, wanted.normalise_std)


class Rejudging:
    """Computes the advantages of whole prompt groups anew, from the recorded rewards or from others.

    Args:
        algorithm: Says how rewards are normalised.
        rewards: By sample id, in place of the recorded ones; None keeps those.
        scores: What these rewards are called, for errors.
    """

    def __init__(self, algorithm: AlgorithmConfig, *, rewards: Mapping[str, float] | None = None, scores: str = "") -> None:
        self._normalise_std, self._rewards, self._scores = algorithm.normalise_std, rewards, scores

    def __call__(self, placed: list[PlacedSample]) -> list[PlacedSample]:
        """Return the samples, in the same order, with their new rewards and advantages.

        Raises:
            ConfigError: A sample has no such score.
        """
        groups: dict[str, list[SampleReady]] = {}
        for item in placed:
            groups.setdefault(item.sample.prompt_group_id, []).append(item.sample)
        judged = {sample.sample_id: sample for members in groups.values() for sample in self._judged(members)}
        return [dataclasses.replace(item, sample=judged[item.sample.sample_id]) for item in placed]

    def _judged(self, members: Sequence[SampleReady]) -> list[SampleReady]:
        ordered = sorted(members, key=lambda sample: sample.sample_index)
        rewards = np.array([[self._reward(sample) for sample in ordered]], np.float64)
        advantages = group_advantages(rewards, normalise_std=self._normalise_std)[0]
        judged = []
        for sample, reward, advantage in zip(ordered, rewards[0], advantages, strict=True):
            loss_mask = dense(sample.loss_mask, what=f"sample {sample.sample_id}: loss_mask")
            judged.append(dataclasses.replace(sample, reward=float(reward), advantages=loss_mask.astype(np.float32) * np.float32(advantage)))
        return judged

    def _reward(self, sample: SampleReady) -> float:
        if self._rewards is None:
            return sample.reward
        if (reward := self._rewards.get(sample.sample_id)) is None:
            remedy = "finish the rescoring with relax rescore, or choose versions that it covers"
            raise ConfigError(f"sample {sample.sample_id} has no reward under source.scores = {self._scores!r}; {remedy}")
        return reward


def read_rewards(reader: LogReader, topic: str, *, num_partitions: int, codec: EventCodec) -> dict[str, float]:
    """Return the rewards on a topic of scores by sample id; samples whose scoring failed are left out. Of two the later counts."""
    rewards: dict[str, float] = {}
    for record in reader.stream({(topic, number): reader.watermarks(topic, number) for number in range(num_partitions)}):
        try:
            event = codec.decode(record.value)
        except (CorruptRecord, SchemaError) as error:
            raise ConfigError(f"{record.place} can't be read as a score: {error}; rescore under another name") from error
        if isinstance(event, SampleScored) and event.reward is not None:
            rewards[event.sample_id] = event.reward
    return rewards
