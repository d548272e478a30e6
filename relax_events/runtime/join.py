"""Joins the samples of a prompt group with their scores and log-probabilities, and tracks the
offsets that may be committed.

Pure state: records go in, complete prompt groups come out. All inputs are partitioned alike, so a
join never crosses a partition. A prompt group that was generated on two policy versions forms two
joins, one in each slot; the trainer keeps the first that it reads. If it was generated twice on one
version, the first complete generation is joined. Records of different generations are never
combined, because their tokens may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relax_events.events.parts import TopicOffset
from relax_events.events.types import SampleEvaluated, SampleRolledOut, SampleScored
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
    logprobs: dict[str, dict[str, SampleEvaluated]] = field(default_factory=dict)
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
        """Return whether every sample has its score and its log-probabilities."""
        if not self.has_all_samples:
            return False
        needed: list[Mapping[str, object]] = [self.logprobs.get(name, {}) for name in logprob_roles]
        if needs_scores:
            needed.append(self.scores)
        return all(
            len(results) >= len(self.samples) and results.keys() >= self.samples.keys()
            for results in needed
        )

    def ordered_samples(self) -> list[SampleRolledOut]:
        """Return the samples, ordered by index."""
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
        """The joined generation; None if the prompt group ended in another way."""
        self.num_dropped = 0
        """Records of duplicate generations: another one of the same prompt group and version was
        joined."""

    @property
    def num_open(self) -> int:
        """Prompt groups that are not complete."""
        return len(self._open)

    def add(
        self, record: Record, events: Sequence[SampleRolledOut | SampleScored | SampleEvaluated]
    ) -> JoinedGroup | None:
        """Add the events of a record, all of one generation; return their prompt group if this
        completes it. Duplicates are ignored.
        """
        key = events[0].key
        group = self._assign_group(
            record, (key.prompt_group_id, key.policy_version), key.generation_digest
        )
        if group is None:
            return None
        for event in events:
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
        """Fail a prompt group with an unusable record, in all its generations; return it the first
        time.
        """
        key = (record.key, -1 if record.policy_version is None else record.policy_version)
        group = self._assign_group(record, key, next(iter(self._open.get(key, ("",)))))
        if group is not None:
            group.failure = reason
        return group

    def skip(self, record: Record) -> None:
        """Advance past a record that is not joined, such as one whose version left the window."""
        self._positions[record.topic, record.partition] = record.offset + 1

    def close(self, group: JoinedGroup) -> None:
        """Drop a finished prompt group with all generations; its later records are ignored."""
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
        """Return the open prompt groups of versions below `oldest_version`, and drop the finished
        ones.

        Of several generations one with all samples is returned, if there is one.
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
        """Drop the state of a revoked partition; its new owner reads the records again."""
        self._positions.pop((topic, partition), None)
        for key in [
            key
            for key, generations in self._open.items()
            if next(iter(generations.values())).partition == partition
        ]:
            self._forget(key)

    def pending_offsets(self) -> list[TopicOffset]:
        """Return the committable offset of each input partition: no open prompt group needs an
        earlier record.
        """
        marks = []
        for (topic, partition), position in self._positions.items():
            oldest = next(iter(self._held.get((topic, partition), ())), position)
            marks.append(TopicOffset(topic, partition, oldest))
        return marks

    def _forget(self, key: Key) -> None:
        for group in self._open.pop(key).values():
            for topic_partition, offset in group.records:
                self._held[topic_partition].pop(offset, None)

    def _assign_group(self, record: Record, key: Key, generation: str) -> JoinedGroup | None:
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
