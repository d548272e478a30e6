"""Joins what is known about the samples of a prompt group, and knows up to where the inputs have
been used up.

Pure state: records go in, complete prompt groups come out. All inputs are partitioned alike, so a
    join never crosses a
partition. A prompt group that was generated twice on different policy versions forms two joins, one
in each slot; the trainer keeps whichever it sees first. Generated twice on one version, it is
joined whole from the generation that is complete first: samples, scores and evaluations of
different generations are never put together, since they may be of different tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_events.errors import RewardError
from relax_events.events.parts import TopicOffset
from relax_events.events.types import LogprobsComputed, SampleRolledOut, SampleScored
from relax_events.kafka.records import Record

Key = tuple[str, int]
TopicPartition = tuple[str, int]


@dataclass(slots=True)
class JoinedGroup:
    """One generation of a prompt group, as far as it has arrived."""

    prompt_group_id: str
    policy_version: int
    partition: int
    generation_digest: str = ""
    samples: dict[str, SampleRolledOut] = field(default_factory=dict)
    scores: dict[str, SampleScored] = field(default_factory=dict)
    logprobs: dict[str, dict[str, LogprobsComputed]] = field(default_factory=dict)
    failure: str = ""
    records: list[tuple[TopicPartition, int]] = field(default_factory=list)

    @property
    def has_all_samples(self) -> bool:
        """Whether all samples have been generated, so that its lease was or will be settled."""
        return (
            bool(self.samples)
            and len(self.samples) == next(iter(self.samples.values())).key.samples_per_prompt
        )

    def is_complete(self, logprob_roles: frozenset[str], *, needs_scores: bool = True) -> bool:
        """Whether every sample has its score and its evaluations."""
        return (
            self.has_all_samples
            and (not needs_scores or self.scores.keys() >= self.samples.keys())
            and all(
                self.logprobs.get(name, {}).keys() >= self.samples.keys() for name in logprob_roles
            )
        )

    def reward_of(self, sample: SampleRolledOut) -> float:
        """Return the reward of a sample that was scored.

        Raises:
            RewardError: Scoring it failed.
        """
        score = self.scores[sample.sample_id]
        if score.reward is None:
            raise RewardError(
                f"sample {sample.sample_id} has no reward: {score.error or 'none was given'}"
            )
        return score.reward

    def ordered_samples(self) -> list[SampleRolledOut]:
        """Return the samples by their index."""
        return sorted(self.samples.values(), key=lambda sample: sample.key.sample_index)


class PromptGroupJoin:
    """The open prompt groups of the partitions that this worker holds."""

    def __init__(self, *, logprob_roles: frozenset[str], needs_scores: bool = True) -> None:
        self._logprob_roles, self._needs_scores = logprob_roles, needs_scores
        self._open: dict[Key, dict[str, JoinedGroup]] = {}
        """By prompt group and version, then by generation."""
        self._held: dict[TopicPartition, dict[int, Key]] = {}
        self._positions: dict[TopicPartition, int] = {}
        self._done: dict[Key, str | None] = {}
        """The generation that was joined; None where the prompt group was over otherwise."""
        self.num_dropped = 0
        """Records of generations that were not joined, since another one of the same prompt group
        and version was."""

    @property
    def num_open(self) -> int:
        """Prompt groups that are not complete."""
        return len(self._open)

    def add(
        self, record: Record, event: SampleRolledOut | SampleScored | LogprobsComputed
    ) -> JoinedGroup | None:
        """Take in one event; return its prompt group when that makes a generation of it complete.
        What came before is ignored.
        """
        group = self._group_of(
            record, (event.prompt_group_id, event.policy_version), event.key.generation_digest
        )
        if group is None:
            return None
        if isinstance(event, SampleRolledOut):
            group.samples.setdefault(event.sample_id, event)
        elif isinstance(event, SampleScored):
            group.scores.setdefault(event.sample_id, event)
        else:
            group.logprobs.setdefault(event.model_role, {}).setdefault(event.sample_id, event)
        return (
            group
            if group.is_complete(self._logprob_roles, needs_scores=self._needs_scores)
            else None
        )

    def fail(self, record: Record, reason: str) -> JoinedGroup | None:
        """Note that a record of a prompt group is unusable: the prompt group is over, in all its
        generations. Return it the first time.
        """
        key = (record.key, -1 if record.policy_version is None else record.policy_version)
        group = self._group_of(record, key, next(iter(self._open.get(key, ("",)))))
        if group is not None:
            group.failure = reason
        return group

    def skip(self, record: Record) -> None:
        """Note a record that was read and is of no use, such as one whose version left the
        window.
        """
        self._positions[record.topic, record.partition] = record.offset + 1

    def close(self, group: JoinedGroup) -> None:
        """Forget a prompt group that was dealt with, with its other generations; late records of
        any of them are ignored.
        """
        key = (group.prompt_group_id, group.policy_version)
        is_joined = not group.failure and group.is_complete(
            self._logprob_roles, needs_scores=self._needs_scores
        )
        if is_joined:
            self.num_dropped += sum(
                len(other.records) for other in self._open[key].values() if other is not group
            )
        self._forget(key)
        self._done[key] = group.generation_digest if is_joined else None

    def evict_older_than(self, oldest_version: int) -> list[JoinedGroup]:
        """Return the open prompt groups of versions below `oldest_version`, and forget finished
        ones of such versions.

        Of several generations it is one whose samples are all there, if any is.
        """
        for key in [key for key in self._done if key[1] < oldest_version]:
            del self._done[key]
        late = [
            generations.values()
            for (_, version), generations in self._open.items()
            if version < oldest_version
        ]
        return [max(generations, key=lambda group: group.has_all_samples) for generations in late]

    def drop_partition(self, topic: str, partition: int) -> None:
        """Forget what belongs to a partition that went to another member; it will read it again."""
        self._positions.pop((topic, partition), None)
        for key in [
            key
            for key, generations in self._open.items()
            if next(iter(generations.values())).partition == partition
        ]:
            self._forget(key)

    def pending_offsets(self) -> list[TopicOffset]:
        """Return, for each input partition, the position below which nothing is needed any more."""
        marks = []
        for (topic, partition), position in self._positions.items():
            oldest = next(iter(self._held.get((topic, partition), ())), position)
            marks.append(TopicOffset(topic, partition, oldest))
        return marks

    def _forget(self, key: Key) -> None:
        for group in self._open.pop(key).values():
            for topic_partition, offset in group.records:
                self._held[topic_partition].pop(offset, None)

    def _group_of(self, record: Record, key: Key, generation: str) -> JoinedGroup | None:
        topic_partition = (record.topic, record.partition)
        self._positions[topic_partition] = record.offset + 1
        if key in self._done:
            self.num_dropped += self._done[key] not in (None, generation)
            return None
        generations = self._open.setdefault(key, {})
        group = generations.get(generation)
        if group is None:
            group = generations[generation] = JoinedGroup(
                key[0], key[1], record.partition, generation
            )
        if record.offset not in self._held.setdefault(topic_partition, {}):
            self._held[topic_partition][record.offset] = key
            group.records.append((topic_partition, record.offset))
        return group
