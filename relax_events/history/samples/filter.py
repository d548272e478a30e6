"""Selects samples, and the part of the log that can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from relax_events.errors import ConfigError, CorruptRecord
from relax_events.events.parts import Outcome
from relax_events.events.types import PromptGroupEnded, SampleRolledOut
from relax_events.history.run_log import DecodedRecord
from relax_events.history.samples.view import SampleView
from relax_events.staleness import IssuedGroup
from relax_events.topics import TopicPlan, compute_shard

Bounds = tuple[float, float]
UNBOUNDED: Bounds = (-math.inf, math.inf)


def parse_bounds(text: str, *, flag: str) -> Bounds:
    """Parse `3`, `3..7`, `..0.2` or `0.9..`; both ends are included.

    Args:
        text: The given text; empty means everything.
        flag: The flag's name, for the error.
    Raises:
        ConfigError: The text is malformed, or its ends are swapped.
    """
    low_text, separator, high_text = text.partition("..")
    try:
        low = float(low_text) if low_text else -math.inf
        high = (float(high_text) if high_text else math.inf) if separator else low
    except ValueError:
        low = math.nan
    if not text:
        return UNBOUNDED
    if math.isnan(low) or not low <= high or (low, high) == UNBOUNDED:
        raise ConfigError(
            f"{flag} must be a number or a span such as 3..7, ..0.2 or 0.9.., got {text!r}"
        )
    return low, high


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The policy versions to read, of one shard or all."""

    versions: range
    shard: int | None = None


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Matches samples for which every given condition holds."""

    versions: Bounds = UNBOUNDED
    rewards: Bounds = UNBOUNDED
    prompt_group_id: str = ""
    sample_id: str = ""
    train_step: int | None = None
    worker_id: str = ""
    contains: str = ""

    def __post_init__(self) -> None:
        if self.group_id:
            try:
                IssuedGroup.parse(self.group_id)
            except CorruptRecord as error:
                raise ConfigError(f"{error}; sample ids like 000012-0003-0/5") from None

    @property
    def group_id(self) -> str:
        """The one prompt group that can match; empty when there are others."""
        return self.prompt_group_id or self.sample_id.rpartition("/")[0] or self.sample_id

    def version_range(
        self,
        plan: TopicPlan,
        ends: Mapping[str, DecodedRecord[PromptGroupEnded]],
        *,
        newest_version: int,
    ) -> VersionRange:
        """Return the versions that can hold matching samples.

        A prompt group is in one shard. It was generated on no version older than its step allows,
        and, if it was trained, on the version that its outcome names. A train step takes no version
        outside its window.
        """
        low, high = max(self.versions[0], 0), min(self.versions[1], newest_version)
        if self.train_step is not None:
            low, high = max(low, self.train_step - plan.max_staleness), min(high, self.train_step)
        if not self.group_id:
            return VersionRange(integer_range(low, high))
        low = max(low, IssuedGroup.parse(self.group_id).slot.train_step - plan.max_staleness)
        end = ends.get(self.group_id)
        if end is not None and end.event.outcome is Outcome.TRAINED:
            low, high = max(low, end.event.policy_version), min(high, end.event.policy_version)
        return VersionRange(
            integer_range(low, high),
            compute_shard(self.group_id, shards=plan.partitions_per_version),
        )

    def matches_sample(self, sample: SampleRolledOut) -> bool:
        """Return whether a sample matches, according to its own record."""
        return (
            self.versions[0] <= sample.policy_version <= self.versions[1]
            and self.prompt_group_id in ("", sample.prompt_group_id)
            and self.sample_id in ("", sample.sample_id)
            and self.worker_id in ("", sample.worker_id)
            and (not self.contains or any(self.contains in text for text in _texts(sample)))
        )

    def matches(self, view: SampleView) -> bool:
        """Return whether a sample matches with its score and outcome; a sample without a reward
        matches no range of rewards.
        """
        if self.rewards != UNBOUNDED and (
            view.reward is None or not self.rewards[0] <= view.reward <= self.rewards[1]
        ):
            return False
        return self.matches_sample(view.sample) and self.train_step in (None, view.train_step)


def _texts(sample: SampleRolledOut) -> tuple[str, ...]:
    return (sample.completion, *(message.text for message in (*sample.messages, *sample.turns)))


def integer_range(low: float, high: float) -> range:
    """Return the integers between two bounds, both included."""
    return range(math.ceil(low), math.floor(high) + 1) if low <= high else range(0)
