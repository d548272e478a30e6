"""The staleness rules, alone and together: a whole run over the pure functions, with workers that
finish in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from relax_events.events.parts import Outcome
from relax_events.staleness import (
    BatchSlot,
    IssuedGroup,
    ReadyGroup,
    ReadyGroups,
    admitted_steps,
    build_reissue,
    compute_staleness,
    find_skip_targets,
    find_unissued_slots,
    is_expired,
    window,
)
from relax_events.staleness.window import SampleOrder
from relax_events.topics import compute_partition, compute_slot, count_slots, list_slot_partitions

STALENESS = st.integers(0, 5)
VERSIONS = st.integers(0, 1000)
SEEDS = st.integers(0, 2**32)


@given(version=VERSIONS, max_staleness=STALENESS)
def test_versions_of_a_window_and_the_next_one_own_distinct_slots(
    version: int, max_staleness: int
) -> None:
    slots = [
        compute_slot(member, num_slots=count_slots(max_staleness))
        for member in [*window(version, max_staleness=max_staleness), version + 1]
    ]
    assert len(set(slots)) == len(slots)


@given(
    group_id=st.text(max_size=20),
    version=VERSIONS,
    max_staleness=STALENESS,
    shards=st.integers(1, 8),
)
def test_partition_lies_in_the_slot_of_its_version(
    group_id: str, version: int, max_staleness: int, shards: int
) -> None:
    slots = count_slots(max_staleness)
    partition = compute_partition(group_id, version, num_slots=slots, shards=shards)
    assert partition in list_slot_partitions(version % slots, shards=shards)
    assert 0 <= partition < slots * shards
    again = compute_partition(group_id, version + slots, num_slots=slots, shards=shards)
    assert again == partition


@given(slots=st.integers(2, 7), shards=st.integers(1, 8))
def test_slots_split_the_partitions_without_overlap(slots: int, shards: int) -> None:
    assert [
        partition
        for slot in range(slots)
        for partition in list_slot_partitions(slot, shards=shards)
    ] == list(range(slots * shards))


@given(sample=VERSIONS, trainer=VERSIONS, max_staleness=STALENESS)
def test_versions_before_the_window_are_expired(
    sample: int, trainer: int, max_staleness: int
) -> None:
    expired = is_expired(sample, trainer_version=trainer, max_staleness=max_staleness)
    if sample <= trainer:
        assert expired == (sample not in window(trainer, max_staleness=max_staleness))
    else:
        assert not expired


@given(
    positions=st.dictionaries(st.integers(0, 7), st.integers(0, 99)),
    starts=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 99)), unique_by=lambda s: s[0]),
)
def test_skip_targets_only_move_forward_and_only_in_assigned_partitions(
    positions: dict[int, int], starts: list[tuple[int, int]]
) -> None:
    targets = find_skip_targets(positions, starts)
    for partition, offset in targets.items():
        assert offset > positions[partition]
    assert all(
        positions[partition] >= offset
        for partition, offset in starts
        if partition in positions and partition not in targets
    )


@given(step=st.integers(0, 10**7), index=st.integers(0, 10**5), attempt=st.integers(0, 10**4))
def test_prompt_group_id_parses_back_to_its_fields(step: int, index: int, attempt: int) -> None:
    group = IssuedGroup(BatchSlot(step, index), attempt, -1)
    assert IssuedGroup.parse(group.prompt_group_id) == group


@given(published=st.integers(-1, 20), max_staleness=STALENESS, num_steps=st.integers(1, 20))
def test_admitted_steps_are_those_whose_oldest_allowed_version_is_published(
    published: int, max_staleness: int, num_steps: int
) -> None:
    admitted = admitted_steps(published, max_staleness=max_staleness, num_steps=num_steps)
    wanted = [
        step for step in range(num_steps) if published >= 0 and step - max_staleness <= published
    ]
    assert list(admitted) == wanted


@given(taken=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_unissued_batch_slots_are_listed_in_order(taken: set[tuple[int, int]]) -> None:
    empty_slots = find_unissued_slots(
        [BatchSlot(*slot) for slot in taken], steps=range(1, 3), prompts_per_step=3
    )
    assert [(empty_slot.train_step, empty_slot.group_index) for empty_slot in empty_slots] == [
        (step, index) for step in (1, 2) for index in range(3) if (step, index) not in taken
    ]


@given(outcome=st.sampled_from(Outcome), attempt=st.integers(0, 5), row=st.integers(0, 99))
def test_reissue_keeps_the_batch_slot_and_retries_expired_prompts(
    outcome: Outcome, attempt: int, row: int
) -> None:
    successor = build_reissue(
        IssuedGroup(BatchSlot(3, 1), attempt, row), outcome=outcome, next_row=100
    )
    if outcome is Outcome.TRAINED:
        assert successor is None
    else:
        assert successor == IssuedGroup(
            BatchSlot(3, 1), attempt + 1, row if outcome is Outcome.EXPIRED else 100
        )


@dataclass
class SimulatedRun:
    """Prompter, engines and trainer as state over the pure functions; `chance` decides who moves
    next."""

    max_staleness: int
    order: SampleOrder
    chance: random.Random
    failing_ratio: float
    num_steps: int = 6
    prompts_per_step: int = 3
    version: int = 0
    next_row: int = 0
    taken_slots: set[BatchSlot] = field(default_factory=set)
    waiting: list[tuple[IssuedGroup, int]] = field(default_factory=list)
    running: list[tuple[IssuedGroup, int]] = field(default_factory=list)
    ready: list[tuple[IssuedGroup, int]] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    trained_ids: list[str] = field(default_factory=list)
    seen_staleness: list[int] = field(default_factory=list)

    def run(self) -> None:
        self.admit()
        for _ in range(20_000):
            if self.version == self.num_steps:
                return
            self.chance.choice([self.start, self.finish, self.train])()
        raise AssertionError("the run got stuck")

    def admit(self) -> None:
        steps = admitted_steps(
            self.version, max_staleness=self.max_staleness, num_steps=self.num_steps
        )
        for empty_slot in find_unissued_slots(
            self.taken_slots, steps=steps, prompts_per_step=self.prompts_per_step
        ):
            self.issue(
                IssuedGroup(empty_slot, 0, self.next_row),
                required=max(empty_slot.train_step - self.max_staleness, 0),
            )
            self.next_row += 1

    def issue(self, group: IssuedGroup, *, required: int) -> None:
        self.taken_slots.add(group.slot)
        self.waiting.append((group, required))

    def start(self) -> None:
        """An engine that has any version from the required one to the newest takes any waiting
        prompt group."""
        if self.waiting:
            group, required = self.waiting.pop(self.chance.randrange(len(self.waiting)))
            self.running.append((group, self.chance.randint(required, self.version)))

    def finish(self) -> None:
        if self.running:
            group, version = self.running.pop(self.chance.randrange(len(self.running)))
            if self.chance.random() < self.failing_ratio:
                self.end(group, Outcome.FAILED)
            else:
                self.ready.append((group, version))

    def end(self, group: IssuedGroup, outcome: Outcome) -> None:
        self.outcomes[outcome] += 1
        if (successor := build_reissue(group, outcome=outcome, next_row=self.next_row)) is not None:
            self.next_row += 1
            self.issue(successor, required=self.version)

    def train(self) -> None:
        for group, version in list(self.ready):
            if is_expired(version, trainer_version=self.version, max_staleness=self.max_staleness):
                self.ready.remove((group, version))
                self.end(group, Outcome.EXPIRED)
        rows = [
            ReadyGroup(
                group.slot.train_step,
                group.slot.group_index,
                group.attempt,
                version,
                group.prompt_group_id,
            )
            for group, version in self.ready
        ]
        waiting = ReadyGroups(order=self.order)
        waiting.apply(rows, [])
        chosen = waiting.take(self.prompts_per_step, trainer_version=self.version)
        if len(chosen) < self.prompts_per_step:
            return
        for row in chosen:
            self.seen_staleness.append(
                compute_staleness(row.policy_version, trainer_version=self.version)
            )
            self.trained_ids.append(row.prompt_group_id)
            self.outcomes[Outcome.TRAINED] += 1
        taken = {row.prompt_group_id for row in chosen}
        self.ready = [
            (group, version) for group, version in self.ready if group.prompt_group_id not in taken
        ]
        self.version += 1
        self.admit()


@given(max_staleness=st.integers(0, 3), seed=SEEDS, failing_ratio=st.sampled_from([0.0, 0.3]))
def test_in_order_run_never_trains_too_stale_and_expires_nothing(
    max_staleness: int, seed: int, failing_ratio: float
) -> None:
    run = SimulatedRun(max_staleness, "fifo", random.Random(seed), failing_ratio)
    run.run()
    assert max(run.seen_staleness) <= max_staleness
    assert len(set(run.trained_ids)) == len(run.trained_ids) == 18
    assert run.outcomes[Outcome.EXPIRED] == 0
    taken_slots = [IssuedGroup.parse(group_id).slot for group_id in run.trained_ids]
    assert sorted(taken_slots) == [
        BatchSlot(step, index) for step in range(6) for index in range(3)
    ]


@given(max_staleness=st.integers(0, 3), seed=SEEDS)
def test_ready_first_run_never_trains_too_stale_and_reaches_its_goal(
    max_staleness: int, seed: int
) -> None:
    run = SimulatedRun(max_staleness, "ready_first", random.Random(seed), 0.1)
    run.run()
    assert max(run.seen_staleness) <= max_staleness
    assert len(set(run.trained_ids)) == len(run.trained_ids) == 18


def select_groups(
    ready: Iterable[ReadyGroup], *, trainer_version: int, count: int, order: SampleOrder
) -> list[ReadyGroup]:
    """Return the oldest eligible prompt groups, by a look at all of them."""
    eligible = [
        group for group in ready if order == "ready_first" or group.train_step <= trainer_version
    ]
    return sorted(eligible)[:count]


def ready_group(slot: int, attempt: int, version: int) -> ReadyGroup:
    group = IssuedGroup(BatchSlot(slot // 3, slot % 3), attempt, -1)
    return ReadyGroup(slot // 3, slot % 3, attempt, version, group.prompt_group_id)


READY = st.lists(st.builds(ready_group, st.integers(0, 8), st.integers(0, 1), st.integers(0, 2)))
ROUNDS = st.lists(
    st.tuples(READY, READY.map(lambda groups: [group.prompt_group_id for group in groups])),
    max_size=12,
)


@given(rounds=ROUNDS, order=st.sampled_from(["fifo", "ready_first"]), data=st.data())
def test_each_round_selects_the_oldest_eligible_groups_of_all_that_wait(
    rounds: list[tuple[list[ReadyGroup], list[str]]], order: SampleOrder, data: st.DataObject
) -> None:
    """What is selected from changes equals what was selected from all prompt groups, sorted again in
    each round; the ranks may report in any order."""
    waiting, every = ReadyGroups(order=order), dict[str, ReadyGroup]()
    version = 0
    for ready, removed in rounds:
        newest = {group.prompt_group_id: group for group in ready}
        waiting.apply(data.draw(st.permutations(list(newest.values()))), removed)
        every = {name: group for name, group in every.items() if name not in removed} | newest
        version += data.draw(st.integers(0, 1))
        count = data.draw(st.integers(0, 4))
        expected = select_groups(every.values(), trainer_version=version, count=99, order=order)
        assert waiting.count_eligible(version) == len(expected)
        assert waiting.take(count, trainer_version=version) == expected[:count]
        for group in expected[:count]:
            del every[group.prompt_group_id]
