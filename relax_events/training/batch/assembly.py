"""Assembles the trainer's input: complete prompt groups, each at most once, and the outcomes of
prompt groups that can't be trained.

Pure state of one rank. Records of advantage.samples and prompt.end-requests go in. Ready prompt
groups, outcomes of untrained prompt groups, and the offsets below which every prompt group is done
come out. The trainer alone decides the outcome of a prompt group, once: records that arrive later
for the prompt group are dropped as duplicates.

Every record of a prompt group that is not done, end requests included, holds back the committed
offset of its partition. So no committed offset passes a prompt group whose outcome is not
committed, however far the trainer reads ahead.

A sample that has arrays in the object store is kept as its record: with them it would take many
times the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from relax_events.events.immutable import immutable
from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.types import PromptGroupEnded, SampleReady
from relax_events.kafka.records import Record
from relax_events.staleness import (
    IssuedGroup,
    ReadyGroup,
    build_group_end,
    describe_left,
    is_expired,
    is_external,
)

Partition = tuple[str, int]
"""A topic and one of its partitions."""
DEDUP_WINDOW_SIZE = 100_000


@immutable(frozen=True, slots=True)
class LocatedSample:
    """A sample and the partition and offset of its record."""

    sample: SampleReady
    partition: int
    offset: int


HeldSample = Record | LocatedSample
"""A sample that waits for its step: as its record, or decoded."""


@immutable(frozen=True, slots=True)
class _Buffered:
    held: HeldSample
    sample_index: int
    samples_per_prompt: int
    path_lengths: tuple[int, ...]


@dataclass(slots=True)
class _PartialGroup:
    generations: dict[str, dict[str, _Buffered]] = field(default_factory=dict)
    """Samples by generation digest, then by sample id."""

    def complete(self) -> dict[str, _Buffered] | None:
        """Return the samples of a complete generation, or None."""
        complete = (
            samples
            for samples in self.generations.values()
            if len(samples) == next(iter(samples.values())).samples_per_prompt
        )
        return next(complete, None)


class DedupWindow:
    """The ids of prompt groups whose outcome is committed, bounded in number.

    Every prompt group issued for the newest evicted step or an older one counts as done, since it
    is tens of thousands of prompt groups old.
    """

    def __init__(self, group_ids: Iterable[str], *, forgotten_step: int = -1) -> None:
        self._ids: dict[str, None] = {}
        self.forgotten_step = forgotten_step
        for group_id in sorted(group_ids):
            self.add(group_id)

    def add(self, group_id: str) -> None:
        """Add an id; evict the older half when there are too many."""
        self._ids[group_id] = None
        if len(self._ids) > DEDUP_WINDOW_SIZE:
            for old in list(self._ids)[: DEDUP_WINDOW_SIZE // 2]:
                del self._ids[old]
                if not is_external(old):  # an external id's step is chosen by its producer
                    self.forgotten_step = max(
                        self.forgotten_step, IssuedGroup.parse(old).slot.train_step
                    )

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._ids or (
            self.forgotten_step >= 0
            and IssuedGroup.parse(group_id).slot.train_step <= self.forgotten_step
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)


class BatchAssembler:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        max_staleness: int,
        decided: set[str],
        forgotten_step: int = -1,
        in_order: bool = False,
    ) -> None:
        """Start with no sample.

        Args:
            max_staleness: The bound, in policy versions.
            decided: Ids of the prompt groups whose outcome is committed.
            forgotten_step: Prompt groups issued for it or an older step are done; -1 for none.
            in_order: Whether a step trains only prompt groups issued for it: those that it leaves
                end as expired.
        """
        self._max_staleness, self._in_order = max_staleness, in_order
        self._done = DedupWindow(decided, forgotten_step=forgotten_step)
        self._decided = decided
        """Prompt groups that ended before the first step of this process."""
        self._ended_slots: list[tuple[int, int]] = []
        self._partial_groups: dict[str, dict[int, _PartialGroup]] = {}
        """By prompt group, then by policy version."""
        self._ready: dict[str, ReadyGroup] = {}
        self._changed: dict[str, None] = {}
        """Prompt groups that became ready, or no longer are, since the last report."""
        self._pending_offsets: dict[Partition, dict[int, str]] = {}
        self._offsets_by_group: dict[str, list[tuple[Partition, int]]] = {}
        self._positions: dict[Partition, int] = {}
        self._ended: dict[str, PromptGroupEnded] = {}
        self._taken_ids: set[str] = set()

    def add(
        self,
        record: Record,
        event: SampleReady | PromptGroupEnded,
        *,
        trainer_version: int,
        keep_decoded: bool = False,
    ) -> None:
        """Add an event of a record. If its version is too stale, its prompt group ends as expired.

        Args:
            record: Of the event; if `keep_decoded` is false, of it alone.
            event: A sample that can be trained, or the request to end a prompt group.
            trainer_version: The policy version that is trained now.
            keep_decoded: Whether to hold the decoded sample in the place of its record.
        """
        group_id = event.prompt_group_id
        self._track_offset(record, group_id)
        if self._is_final(group_id):
            return
        if isinstance(event, PromptGroupEnded):
            self._end(event)
        elif event.key.max_policy_version > trainer_version:
            reason = (
                f"version {event.key.max_policy_version} lies ahead of the trainer's version "
                f"{trainer_version}"
            )
            self._end(
                build_group_end(
                    group_id,
                    Outcome.FAILED,
                    reason=reason,
                    policy_version=event.policy_version,
                    trainer_version=trainer_version,
                )
            )
        elif self._is_left(group_id, trainer_version):
            self._end_left(group_id, event.policy_version, trainer_version)
        elif is_expired(
            event.policy_version, trainer_version=trainer_version, max_staleness=self._max_staleness
        ):
            self._expire(group_id, event.policy_version, trainer_version)
        else:
            self._add_sample(
                LocatedSample(event, record.partition, record.offset) if keep_decoded else record,
                event,
            )

    def reject(self, record: Record, reason: str, *, trainer_version: int) -> None:
        """Skip an invalid record; the prompt group that its key names, if any, has failed."""
        self._track_offset(record, record.key)
        if record.key and not self._is_final(record.key):
            version = trainer_version if record.policy_version is None else record.policy_version
            self._end(
                build_group_end(
                    record.key,
                    Outcome.FAILED,
                    reason=reason,
                    policy_version=version,
                    trainer_version=trainer_version,
                )
            )

    def skip(self, record: Record) -> None:
        """Skip a record that belongs to no prompt group."""
        self._track_offset(record, "")

    def _track_offset(self, record: Record, group_id: str) -> None:
        """Advance the partition's position past a record, and keep the offset pending until its
        prompt group is done.
        """
        topic_partition = (record.topic, record.partition)
        self._positions[topic_partition] = record.offset + 1
        if group_id and group_id not in self._done:
            pending = self._pending_offsets.setdefault(topic_partition, {})
            if record.offset not in pending:  # else of another sample of the record
                pending[record.offset] = group_id
                self._offsets_by_group.setdefault(group_id, []).append(
                    (topic_partition, record.offset)
                )

    def fail(
        self, group_id: str, reason: str, *, policy_version: int, trainer_version: int
    ) -> None:
        """End a prompt group that turned out to be untrainable."""
        self._end(
            build_group_end(
                group_id,
                Outcome.FAILED,
                reason=reason,
                policy_version=policy_version,
                trainer_version=trainer_version,
            )
        )

    def _is_final(self, group_id: str) -> bool:
        """Return whether the outcome can no longer change: done, ended, or taken by the current
        step.
        """
        return group_id in self._done or group_id in self._ended or group_id in self._taken_ids

    def _add_sample(self, held: HeldSample, sample: SampleReady) -> None:
        group_id, version = sample.prompt_group_id, sample.policy_version
        part = self._partial_groups.setdefault(group_id, {}).setdefault(version, _PartialGroup())
        samples = part.generations.setdefault(sample.key.generation_digest, {})
        if sample.sample_id in samples:
            return
        samples[sample.sample_id] = _Buffered(
            held,
            sample.key.sample_index,
            sample.key.samples_per_prompt,
            tuple(sample.path_lengths) or (len(sample.tokens),),
        )
        self._note_readiness(group_id)

    def advance(self, trainer_version: int) -> None:
        """End prompt groups that are too stale at `trainer_version`, or left by an earlier step."""
        for group_id in self._decided:
            self._note_end(group_id, first_step=trainer_version)
        self._decided = set()
        for group_id, versions in list(self._partial_groups.items()):
            if self._is_left(group_id, trainer_version):
                self._end_left(group_id, min(versions), trainer_version)
        stale = [
            (group_id, version)
            for group_id, versions in self._partial_groups.items()
            for version in versions
            if is_expired(
                version, trainer_version=trainer_version, max_staleness=self._max_staleness
            )
        ]
        for group_id, version in stale:
            self._expire(group_id, version, trainer_version)

    def _is_left(self, group_id: str, trainer_version: int) -> bool:
        """Return whether the step that a prompt group was issued for has its batch."""
        return (
            self._in_order
            and not is_external(group_id)
            and IssuedGroup.parse(group_id).slot.train_step < trainer_version
        )

    def _end_left(self, group_id: str, version: int, trainer_version: int) -> None:
        self._end(
            build_group_end(
                group_id,
                Outcome.EXPIRED,
                reason=describe_left(trainer_version),
                policy_version=version,
                trainer_version=trainer_version,
            )
        )

    def _expire(self, group_id: str, version: int, trainer_version: int) -> None:
        """End a prompt group as expired, unless another generation of it is fresh enough."""
        versions = self._partial_groups.get(group_id, {})
        versions.pop(version, None)
        if versions:
            self._note_readiness(group_id)
            return
        reason = f"version {version} left the window of version {trainer_version}"
        self._end(
            build_group_end(
                group_id,
                Outcome.EXPIRED,
                reason=reason,
                policy_version=version,
                trainer_version=trainer_version,
            )
        )

    def _end(self, ended: PromptGroupEnded) -> None:
        self._ended[ended.prompt_group_id] = ended
        self._note_end(ended.prompt_group_id, first_step=0)
        self._drop_all(ended.prompt_group_id)

    def _note_end(self, group_id: str, *, first_step: int) -> None:
        if not is_external(group_id):
            slot = IssuedGroup.parse(group_id).slot
            if slot.train_step >= first_step:
                self._ended_slots.append((slot.train_step, slot.group_index))

    def _note_readiness(self, group_id: str) -> None:
        """Note whether a prompt group is complete, and was not taken; if it was generated twice, by
        its newer generation.
        """
        complete = [
            version
            for version, part in self._partial_groups.get(group_id, {}).items()
            if part.complete() is not None and group_id not in self._taken_ids
        ]
        if complete:
            issued, version = IssuedGroup.parse(group_id), max(complete)
            slot = issued.slot
            ready = ReadyGroup(slot.train_step, slot.group_index, issued.attempt, version, group_id)
            if self._ready.get(group_id) != ready:
                self._ready[group_id] = ready
                self._changed[group_id] = None
        elif self._ready.pop(group_id, None) is not None:
            self._changed[group_id] = None

    def pop_changes(self) -> tuple[list[ReadyGroup], list[str]]:
        """Return the prompt groups that became ready since the last call, and the ids of those that
        no longer are without having been taken; if a prompt group was generated twice, the newer
        generation takes the place of the older.
        """
        changed, self._changed = self._changed, {}
        ready = [self._ready[group_id] for group_id in changed if group_id in self._ready]
        return ready, [group_id for group_id in changed if group_id not in self._ready]

    def pop_ended_slots(self) -> list[tuple[int, int]]:
        """Return train step and index of the prompt groups that ended since the last call."""
        ended, self._ended_slots = self._ended_slots, []
        return ended

    def is_ready(self, group: ReadyGroup) -> bool:
        """Return whether a complete prompt group is of this rank, and was not taken."""
        return self._ready.get(group.prompt_group_id) == group

    def take(self, group: ReadyGroup) -> list[HeldSample]:
        """Take a ready prompt group's samples, in order. Their records stay pending until
        `mark_done`.
        """
        self._taken_ids.add(group.prompt_group_id)
        self._ready.pop(group.prompt_group_id, None)
        return [buffered.held for buffered in self._ordered(group)]

    def lengths(self, group: ReadyGroup) -> list[tuple[int, ...]]:
        """Return the tokens of each path of a ready prompt group's samples, in order."""
        return [buffered.path_lengths for buffered in self._ordered(group)]

    def _ordered(self, group: ReadyGroup) -> list[_Buffered]:
        samples = self._partial_groups[group.prompt_group_id][group.policy_version].complete() or {}
        return sorted(samples.values(), key=lambda buffered: buffered.sample_index)

    def pending_outcomes(self) -> list[PromptGroupEnded]:
        """Return the outcomes that are to be committed."""
        return list(self._ended.values())

    def mark_done(self, group_ids: list[str]) -> None:
        """Mark prompt groups whose outcome is committed, or is part of the next transaction; later
        records of them are dropped.
        """
        for group_id in group_ids:
            self._done.add(group_id)
            self._taken_ids.discard(group_id)
            self._ended.pop(group_id, None)
            self._drop_all(group_id)
            for topic_partition, offset in self._offsets_by_group.pop(group_id, ()):
                del self._pending_offsets[topic_partition][offset]

    def consumed(self) -> list[TopicOffset]:
        """Return, for each partition, the offset below which every prompt group is done."""
        return [
            TopicOffset(
                *topic_partition,
                next(iter(self._pending_offsets.get(topic_partition, ())), position),
            )
            for topic_partition, position in sorted(self._positions.items())
        ]

    @property
    def forgotten_step(self) -> int:
        """Prompt groups issued for this train step or an older one count as done; -1 for none."""
        return self._done.forgotten_step

    def done_group_ids(self) -> list[str]:
        """Return the ids of prompt groups that are done, oldest first, for the checkpoint."""
        return list(self._done)

    def _drop_all(self, group_id: str) -> None:
        self._partial_groups.pop(group_id, None)
        self._note_readiness(group_id)
