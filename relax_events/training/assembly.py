"""Puts the trainer's input together: complete prompt groups, each at most once, and the ends of those that won't come.

Pure state of one rank: records of advantage.samples go in; prompt groups that are ready, prompt groups that ended
untrained, and the position up to which everything is decided come out. The trainer alone decides how a prompt group
ended, and it decides once: whatever arrives for a decided prompt group afterwards is a duplicate and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from relax_events.broker.records import Record
from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.types import PromptGroupEnded, SampleReady
from relax_events.policy import IssuedGroup, ReadyGroup, end_of, is_expired, is_guest

Key = tuple[str, int]
ID_WINDOW = 100_000


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample and the position of its record."""

    sample: SampleReady
    partition: int
    offset: int


@dataclass(slots=True)
class _Assembling:
    version: int
    samples: dict[str, PlacedSample] = field(default_factory=dict)

    def is_complete(self) -> bool:
        return bool(self.samples) and len(self.samples) == next(iter(self.samples.values())).sample.samples_per_prompt


class DecidedGroups:
    """The ids of prompt groups whose end is committed: the id window. Its memory is bounded.

    What is forgotten is remembered as a whole: everything issued for a step as old as the newest forgotten one counts as
    decided, since it lies tens of thousands of prompt groups behind.
    """

    def __init__(self, group_ids: Iterable[str]) -> None:
        self._ids: dict[str, None] = {}
        self._forgotten_step = -1
        for group_id in sorted(group_ids):
            self.add(group_id)

    def add(self, group_id: str) -> None:
        """Add an id; forget the older half when there are too many."""
        self._ids[group_id] = None
        if len(self._ids) > ID_WINDOW:
            for old in list(self._ids)[: ID_WINDOW // 2]:
                del self._ids[old]
                if not is_guest(old):  # a guest's step is whatever its producer wrote
                    self._forgotten_step = max(self._forgotten_step, IssuedGroup.parse(old).place.train_step)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._ids or (self._forgotten_step >= 0 and IssuedGroup.parse(group_id).place.train_step <= self._forgotten_step)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)


class GroupAssembler:
    """See the module's docstring."""

    def __init__(self, *, topic: str, max_staleness: int, decided: set[str]) -> None:
        self._topic, self._max_staleness = topic, max_staleness
        self._decided = DecidedGroups(decided)
        self._parts: dict[Key, _Assembling] = {}
        self._held: dict[int, dict[int, Key]] = {}
        self._positions: dict[int, int] = {}
        self._ended: dict[str, PromptGroupEnded] = {}
        self._taken: set[str] = set()
        self.num_duplicates = 0

    def add(self, record: Record, event: SampleReady | PromptGroupEnded, *, trainer_version: int) -> None:
        """Take in a record. One whose version left the window ends its prompt group as expired."""
        self._positions[record.partition] = record.offset + 1
        group_id = event.prompt_group_id
        if self._is_settled(group_id):
            self.num_duplicates += 1
        elif isinstance(event, PromptGroupEnded):
            self._end(event)
        elif event.max_policy_version > trainer_version:
            reason = f"version {event.max_policy_version} lies ahead of the trainer's version {trainer_version}"
            self._end(end_of(group_id, Outcome.FAILED, reason=reason, policy_version=event.policy_version, trainer_version=trainer_version))
        elif is_expired(event.policy_version, trainer_version=trainer_version, max_staleness=self._max_staleness):
            self._expire(group_id, event.policy_version, trainer_version)
        else:
            self._add_sample(record, event)

    def reject(self, record: Record, reason: str, *, trainer_version: int) -> None:
        """Note a record that can't be used: its prompt group, if the key names one, has failed."""
        self._positions[record.partition] = record.offset + 1
        if record.key and not self._is_settled(record.key):
            version = trainer_version if record.policy_version is None else record.policy_version
            self._end(end_of(record.key, Outcome.FAILED, reason=reason, policy_version=version, trainer_version=trainer_version))

    def skip(self, record: Record) -> None:
        """Pass over a record that is nobody's."""
        self._positions[record.partition] = record.offset + 1

    def fail(self, group_id: str, reason: str, *, policy_version: int, trainer_version: int) -> None:
        """End a prompt group that turned out to be untrainable."""
        self._end(end_of(group_id, Outcome.FAILED, reason=reason, policy_version=policy_version, trainer_version=trainer_version))

    def _is_settled(self, group_id: str) -> bool:
        """Tell whether nothing can change any more: what the step at hand has taken will be trained, whatever still arrives."""
        return group_id in self._decided or group_id in self._ended or group_id in self._taken

    def _add_sample(self, record: Record, sample: SampleReady) -> None:
        key = (sample.prompt_group_id, sample.policy_version)
        part = self._parts.setdefault(key, _Assembling(sample.policy_version))
        if sample.sample_id in part.samples:
            self.num_duplicates += 1
            return
        part.samples[sample.sample_id] = PlacedSample(sample, record.partition, record.offset)
        self._held.setdefault(record.partition, {})[record.offset] = key

    def advance(self, trainer_version: int) -> None:
        """End what left the window now that the trainer is at `trainer_version`."""
        for group_id, version in list(self._parts):
            if is_expired(version, trainer_version=trainer_version, max_staleness=self._max_staleness):
                self._expire(group_id, version, trainer_version)

    def _expire(self, group_id: str, version: int, trainer_version: int) -> None:
        """End a prompt group as expired, unless another generation of it is still in the window."""
        self._drop((group_id, version))
        if any(other == group_id for other, _ in self._parts):
            return
        reason = f"version {version} left the window of version {trainer_version}"
        self._end(end_of(group_id, Outcome.EXPIRED, reason=reason, policy_version=version, trainer_version=trainer_version))

    def _end(self, ended: PromptGroupEnded) -> None:
        self._ended[ended.prompt_group_id] = ended
        self._drop_all(ended.prompt_group_id)

    def ready(self) -> list[ReadyGroup]:
        """Return the complete prompt groups that have not been taken; of one that was generated twice, the fresher generation."""
        found: dict[str, ReadyGroup] = {}
        for (group_id, version), part in sorted(self._parts.items()):
            if part.is_complete() and group_id not in self._taken:
                issued = IssuedGroup.parse(group_id)
                found[group_id] = ReadyGroup(issued.place.train_step, issued.place.group_index, issued.attempt, version, group_id)
        return list(found.values())

    def take(self, group: ReadyGroup) -> list[PlacedSample]:
        """Take a ready prompt group's samples, in order. Its records stay undecided until `decide`."""
        self._taken.add(group.prompt_group_id)
        part = self._parts[group.prompt_group_id, group.policy_version]
        return sorted(part.samples.values(), key=lambda placed: placed.sample.sample_index)

    def pending_ends(self) -> list[PromptGroupEnded]:
        """Return the ends that are to be committed."""
        return list(self._ended.values())

    def decide(self, group_ids: list[str]) -> None:
        """Note that the ends of these prompt groups are committed: they will never be looked at again."""
        for group_id in group_ids:
            self._decided.add(group_id)
            self._taken.discard(group_id)
            self._ended.pop(group_id, None)
            self._drop_all(group_id)

    def consumed(self) -> list[TopicOffset]:
        """Return, for each partition, the position below which everything is decided or pending its end's commit."""
        return [
            TopicOffset(self._topic, partition, next(iter(self._held.get(partition, ())), position))
            for partition, position in sorted(self._positions.items())
        ]

    def id_window(self) -> list[str]:
        """Return the ids of decided prompt groups, oldest first, for the checkpoint."""
        return list(self._decided)

    def _drop_all(self, group_id: str) -> None:
        for key in [key for key in self._parts if key[0] == group_id]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        part = self._parts.pop(key, None)
        for placed in part.samples.values() if part else ():
            self._held[placed.partition].pop(placed.offset, None)
