"""The assembler decides each prompt group once, in any order of arrival, and a restart reaches the
same decisions.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from event_samples import ended, ready
from hypothesis import given
from hypothesis import strategies as st

from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.types import PromptGroupEnded, SampleReady
from relax_events.kafka.records import Record
from relax_events.staleness import IssuedGroup, ReadyGroup
from relax_events.training.batch import assembly
from relax_events.training.batch.assembly import BatchAssembler, HeldSample, LocatedSample

TOPIC, REQUESTS = "relax.test.advantage.samples", "relax.test.prompt.end-requests"
MAX_STALENESS = 1
SHARDS = 2
Item = SampleReady | PromptGroupEnded
TopicPartition = tuple[str, int]


def partition_of(group_id: str, version: int) -> int:
    """Versions 0 and 2 share a slot of a ring of two, the smallest allowed distance."""
    return version % 2 * SHARDS + int(group_id[10]) % SHARDS


@st.composite
def logs(draw: st.DrawFn) -> list[tuple[Record, Item]]:
    """Generate the records of both topics: prompt groups, some generated again at a later version, some
    doubled, some with an end, some asked to end."""
    events: list[tuple[TopicPartition, Item]] = []
    for index in range(4):
        group_id = f"000000-000{index}-0"
        for version in draw(st.sets(st.integers(0, 2), min_size=1, max_size=2)):
            events += [
                ((TOPIC, partition_of(group_id, version)), ready(group_id, sample, version=version))
                for sample in range(2)
            ]
        for topic in draw(st.sets(st.sampled_from([TOPIC, REQUESTS]))):
            events.append(((topic, partition_of(group_id, 1)), ended(group_id, version=1)))
    events += draw(st.lists(st.sampled_from(events), max_size=6))
    offsets: Counter[TopicPartition] = Counter()
    log = []
    for topic_partition, event in draw(st.permutations(events)):
        log.append(
            (
                Record(
                    *topic_partition, offsets[topic_partition], event.prompt_group_id, b"", {}, 0
                ),
                event,
            )
        )
        offsets[topic_partition] += 1
    return log


class WatchedAssembler(BatchAssembler):
    """Keeps the ready prompt groups by the changes that the assembler reports."""

    waiting: dict[str, ReadyGroup]

    def ready(self) -> list[ReadyGroup]:
        """Return what is ready, which must be what a look at all prompt groups finds."""
        ready, removed = self.pop_changes()
        for group_id in removed:
            self.waiting.pop(group_id, None)
        self.waiting |= {group.prompt_group_id: group for group in ready}
        assert self.waiting == self._find_all_ready()
        assert all(map(self.is_ready, self.waiting.values()))
        return sorted(self.waiting.values())

    def take(self, group: ReadyGroup) -> list[HeldSample]:
        del self.waiting[group.prompt_group_id]
        return super().take(group)

    def _find_all_ready(self) -> dict[str, ReadyGroup]:
        groups: dict[str, ReadyGroup] = {}
        for group_id, versions in self._partial_groups.items():
            for version, part in sorted(versions.items()):
                if part.complete() is not None and group_id not in self._taken_ids:
                    issued = IssuedGroup.parse(group_id)
                    slot = issued.slot
                    groups[group_id] = ReadyGroup(
                        slot.train_step, slot.group_index, issued.attempt, version, group_id
                    )
        return groups


class Trainer:
    """A trainer around the assembler: it takes what is ready, commits ends at once, and a step's
    groups with the offsets."""

    def __init__(
        self,
        log: list[tuple[Record, Item]],
        *,
        decided: set[str],
        positions: dict[TopicPartition, int],
        version: int,
    ) -> None:
        self._log = [
            (record, event)
            for record, event in log
            if record.offset >= positions.get((record.topic, record.partition), 0)
        ]
        self._events = {
            (record.partition, record.offset): event
            for record, event in log
            if isinstance(event, SampleReady)
        }
        self.version = version
        self.assembler = open_assembler(decided)
        self.committed: Counter[str] = Counter()
        self.outcomes: dict[str, Outcome] = {}
        self.positions = dict(positions)

    def work(self, num_records: int, *, step_every: int) -> None:
        """Read records one by one; after every few of them, train and commit a step."""
        taken: list[ReadyGroup] = []
        for count, (record, event) in enumerate(self._log[:num_records], start=1):
            if isinstance(event, SampleReady) and event.policy_version > self.version:
                self.version = event.policy_version
                self._step(taken)
                taken = []
            self.assembler.add(record, event, trainer_version=self.version)
            self._commit_ends()
            for group in self.assembler.ready():
                samples = [
                    self._events[record.partition, record.offset]
                    for record in self.assembler.take(group)
                ]
                assert [sample.key.sample_index for sample in samples] == [0, 1]
                assert all(
                    self.version - sample.policy_version <= MAX_STALENESS for sample in samples
                )
                taken.append(group)
            if count % step_every == 0:
                self._step(taken)
                taken = []

    def _step(self, taken: list[ReadyGroup]) -> None:
        """What one transaction makes real; a crash before it leaves the taken groups undecided."""
        for group in taken:
            self._commit(group.prompt_group_id, Outcome.TRAINED)
        self.assembler.mark_done([group.prompt_group_id for group in taken])
        self.positions |= {
            (offset.topic, offset.partition): offset.offset for offset in self.assembler.consumed()
        }
        self.assembler.advance(self.version)
        self._commit_ends()

    def _commit_ends(self) -> None:
        ends = self.assembler.pending_outcomes()
        for end in ends:
            self._commit(end.prompt_group_id, end.outcome)
        self.assembler.mark_done([end.prompt_group_id for end in ends])

    def _commit(self, group_id: str, outcome: Outcome) -> None:
        self.committed[group_id] += 1
        self.outcomes[group_id] = outcome


@given(log=logs(), step_every=st.integers(1, 5))
def test_every_group_is_decided_once(log: list[tuple[Record, Item]], step_every: int) -> None:
    trainer = Trainer(log, decided=set(), positions={}, version=0)
    trainer.work(len(log), step_every=step_every)
    trainer.work(0, step_every=1)
    trainer._step([])
    assert max(trainer.committed.values(), default=1) == 1


@given(log=logs(), step_every=st.integers(1, 5), data=st.data())
def test_restart_decides_every_group_once(
    log: list[tuple[Record, Item]], step_every: int, data: st.DataObject
) -> None:
    """The successor knows the committed ends and positions only; between both lives each prompt
    group ends exactly once."""
    crash = data.draw(st.integers(0, len(log)))
    first = Trainer(log, decided=set(), positions={}, version=0)
    first.work(crash, step_every=step_every)
    second = Trainer(
        log, decided=set(first.committed), positions=first.positions, version=first.version
    )
    second.work(len(log), step_every=1)
    second.version += MAX_STALENESS + 1
    second._step([])
    both = first.committed + second.committed
    assert both == Counter({f"000000-000{index}-0": 1 for index in range(4)})


@given(st.data())
def test_group_with_two_generations_is_taken_entirely_from_one(data: st.DataObject) -> None:
    events = [ready(index=index, generation_digest=digest) for digest in "ab" for index in range(2)]
    lost = data.draw(st.sampled_from([None, *range(4)]))
    assembler = open_assembler()
    order = data.draw(st.permutations([number for number in range(4) if number != lost]))
    for offset, number in enumerate(order):
        assembler.add(record(offset), events[number], trainer_version=0)
    samples = [events[order[taken.offset]] for taken in assembler.take(assembler.ready()[0])]
    assert [sample.key.sample_index for sample in samples] == [0, 1]
    assert len({sample.key.generation_digest for sample in samples}) == 1


def test_assembler_holds_no_decoded_sample_unasked() -> None:
    """A window of samples whose arrays are in the object store would not fit into memory: their
    records are held until they are taken."""
    assembler, events = open_assembler(), [ready(index=index) for index in range(2)]
    alive = []
    for offset, event in enumerate(events):
        tokens = np.array([5, 6, 7, 8], np.int32)
        alive.append(weakref.ref(tokens))
        assembler.add(record(offset), replace(event, tokens=tokens), trainer_version=0)
        del tokens
    assert [reference() for reference in alive] == [None, None]
    assert len(assembler.take(assembler.ready()[0])) == 2


def test_a_decoded_sample_is_held_in_the_place_of_its_record() -> None:
    assembler, events = open_assembler(), [ready(index=index) for index in range(2)]
    for offset, event in enumerate(events):
        assembler.add(
            record(offset, partition=3), event, trainer_version=0, keep_decoded=offset == 1
        )
    first, second = assembler.take(assembler.ready()[0])
    assert first == record(0, partition=3)
    assert isinstance(second, LocatedSample)
    assert (second.sample, second.partition, second.offset) == (events[1], 3, 1)
    assert second.sample is events[1]


def record(
    offset: int,
    *,
    key: str = "000000-0000-0",
    partition: int = 0,
    headers: dict[str, str] | None = None,
) -> Record:
    return Record(TOPIC, partition, offset, key, b"", headers or {}, 0)


def open_assembler(decided: Iterable[str] = ()) -> WatchedAssembler:
    assembler = WatchedAssembler(max_staleness=MAX_STALENESS, decided=set(decided))
    assembler.waiting = {}
    return assembler


def add_group(
    assembler: BatchAssembler, group_id: str, *, version: int, offset: int, trainer_version: int
) -> None:
    for index in range(2):
        assembler.add(
            record(offset + index, key=group_id),
            ready(group_id, index, version=version),
            trainer_version=trainer_version,
        )


def ends_of(assembler: BatchAssembler) -> list[tuple[str, Outcome]]:
    return [(end.prompt_group_id, end.outcome) for end in assembler.pending_outcomes()]


def consumed(assembler: BatchAssembler) -> dict[int, int]:
    return {offset.partition: offset.offset for offset in assembler.consumed()}


def test_group_is_ready_once_when_it_is_complete() -> None:
    assembler = open_assembler()
    assembler.add(record(0), ready(index=1, version=0), trainer_version=0)
    assert assembler.ready() == []
    assembler.add(record(1), ready(index=0, version=0), trainer_version=0)
    (group,) = assembler.ready()
    assert group == ReadyGroup(0, 0, 0, 0, "000000-0000-0")
    assert [placed.offset for placed in assembler.take(group)] == [1, 0]
    assert assembler.ready() == []


def test_records_are_held_until_their_group_is_decided() -> None:
    assembler = open_assembler()
    add_group(assembler, "000000-0000-0", version=0, offset=5, trainer_version=0)
    add_group(assembler, "000000-0001-0", version=0, offset=7, trainer_version=0)
    assert consumed(assembler) == {0: 5}
    for group in assembler.ready():
        assembler.take(group)
    assert consumed(assembler) == {0: 5}
    assembler.mark_done(["000000-0001-0"])
    assert consumed(assembler) == {0: 5}
    assembler.mark_done(["000000-0000-0"])
    assert consumed(assembler) == {0: 9}


def test_end_request_has_no_effect_once_the_group_is_being_trained() -> None:
    assembler = open_assembler()
    add_group(assembler, "000000-0000-0", version=0, offset=0, trainer_version=0)
    assembler.take(assembler.ready()[0])
    assembler.add(record(2), ended(version=0), trainer_version=0)
    assembler.reject(record(3), "poison", trainer_version=0)
    assert assembler.pending_outcomes() == []


def test_end_request_ends_a_waiting_group() -> None:
    assembler = open_assembler()
    add_group(assembler, "000000-0000-0", version=0, offset=0, trainer_version=0)
    assembler.add(record(2), ended(outcome=Outcome.FILTERED), trainer_version=0)
    assert (assembler.ready(), ends_of(assembler)) == ([], [("000000-0000-0", Outcome.FILTERED)])
    assert consumed(assembler) == {0: 0}
    assembler.mark_done(["000000-0000-0"])
    assert consumed(assembler) == {0: 3}


def test_end_request_holds_back_only_the_offset_of_its_own_topic() -> None:
    assembler = open_assembler()
    add_group(assembler, "000000-0000-0", version=0, offset=4, trainer_version=0)
    assembler.add(replace(record(0), topic=REQUESTS), ended(version=0), trainer_version=0)
    assembler.add(
        replace(record(1, key="000000-0001-0"), topic=REQUESTS),
        ended("000000-0001-0", version=0),
        trainer_version=0,
    )
    assert ends_of(assembler) == [
        ("000000-0000-0", Outcome.FAILED),
        ("000000-0001-0", Outcome.FAILED),
    ]
    assert assembler.consumed() == [TopicOffset(TOPIC, 0, 4), TopicOffset(REQUESTS, 0, 0)]
    assembler.mark_done(["000000-0000-0"])
    assert assembler.consumed() == [TopicOffset(TOPIC, 0, 6), TopicOffset(REQUESTS, 0, 1)]


def test_waiting_group_expires_when_the_trainer_moves_on() -> None:
    assembler = open_assembler()
    add_group(assembler, "000000-0000-0", version=0, offset=0, trainer_version=0)
    assembler.advance(1)
    assert len(assembler.ready()) == 1
    assembler.advance(2)
    (end,) = assembler.pending_outcomes()
    assert (end.outcome, end.policy_version, end.trainer_version) == (Outcome.EXPIRED, 0, 2)
    assert end.reason == "version 0 left the window of version 2"
    assert assembler.ready() == []


def test_group_that_was_generated_twice_is_ready_once() -> None:
    assembler = open_assembler()
    add_group(assembler, "000000-0000-0", version=1, offset=0, trainer_version=1)
    add_group(assembler, "000000-0000-0", version=0, offset=2, trainer_version=1)
    assert [group.policy_version for group in assembler.ready()] == [1]
    assembler.take(assembler.ready()[0])
    assert assembler.ready() == []


def test_newer_generation_in_the_window_replaces_an_expired_one() -> None:
    assembler = open_assembler()
    add_group(assembler, "000000-0000-0", version=0, offset=0, trainer_version=1)
    add_group(assembler, "000000-0000-0", version=1, offset=2, trainer_version=1)
    assembler.advance(2)
    assert assembler.pending_outcomes() == []
    assert [group.policy_version for group in assembler.ready()] == [1]
    assert consumed(assembler) == {0: 0}
    assembler.mark_done(["000000-0000-0"])
    assert consumed(assembler) == {0: 4}


def test_stale_sample_ends_its_group_when_it_arrives_late() -> None:
    assembler = open_assembler()
    assembler.add(record(0), ready(version=0), trainer_version=2)
    assert ends_of(assembler) == [("000000-0000-0", Outcome.EXPIRED)]


def test_sample_of_a_future_version_fails_its_group() -> None:
    assembler = open_assembler()
    assembler.add(record(0), ready(version=5), trainer_version=2)
    (end,) = assembler.pending_outcomes()
    assert (end.outcome, end.reason) == (
        Outcome.FAILED,
        "version 5 lies ahead of the trainer's version 2",
    )


def test_rejected_record_fails_its_group() -> None:
    assembler = open_assembler()
    assembler.add(record(0), ready(version=0), trainer_version=1)
    assembler.reject(
        record(1, headers={"policy-version": "0"}),
        "poison: tokens must be finite",
        trainer_version=1,
    )
    (end,) = assembler.pending_outcomes()
    assert (end.outcome, end.reason, end.policy_version) == (
        Outcome.FAILED,
        "poison: tokens must be finite",
        0,
    )
    assembler.skip(record(2, key=""))
    assert consumed(assembler) == {0: 0}
    assembler.mark_done(["000000-0000-0"])
    assert consumed(assembler) == {0: 3}


def test_failed_group_ends_with_its_reason() -> None:
    assembler = open_assembler()
    add_group(assembler, "000000-0000-0", version=0, offset=0, trainer_version=0)
    assembler.fail("000000-0000-0", "too long", policy_version=0, trainer_version=0)
    assert ends_of(assembler) == [("000000-0000-0", Outcome.FAILED)]


def test_dedup_window_is_bounded_and_counts_forgotten_ids_as_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly, "DEDUP_WINDOW_SIZE", 10)
    decided = assembly.DedupWindow(f"{step:06d}-0000-0" for step in range(25))
    assert len(list(decided)) <= 10
    assert all(f"{step:06d}-0000-0" in decided for step in range(25))
    assert "000003-0007-2" in decided
    assert "000025-0000-0" not in decided
