"""The staleness rules, alone and together: a whole run over the pure functions, with workers that
finish in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, islice

from hypothesis import given
from hypothesis import strategies as st

from relax_events.events.parts import Outcome
from relax_events.staleness import (
    SLOTS_PER_PROMPT,
    BatchSlot,
    BatchSupply,
    IssuedGroup,
    OrderedSupply,
    ReadyGroup,
    ReadyGroups,
    ReadySupply,
    admitted_steps,
    compute_staleness,
    count_missing,
    find_skip_targets,
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
    supply = ReadySupply(prompts_per_step=3, first_step=1)
    for slot in taken:
        supply.add(IssuedGroup(BatchSlot(*slot), 0, 0))
    empty_slots = [
        slot
        for step in range(supply.first_step, 3)
        for slot in supply.find_empty_slots(step, uses_spares=False)
    ]
    assert [(empty_slot.train_step, empty_slot.group_index) for empty_slot in empty_slots] == [
        (step, index) for step in (1, 2) for index in range(3) if (step, index) not in taken
    ]


@given(
    outcome=st.sampled_from([Outcome.FILTERED, Outcome.EXPIRED, Outcome.FAILED]),
    attempt=st.integers(0, 5),
    supply=st.sampled_from([OrderedSupply, ReadySupply]),
)
def test_replacement_takes_the_batch_slot_where_there_are_no_spares(
    outcome: Outcome, attempt: int, supply: type[OrderedSupply] | type[ReadySupply]
) -> None:
    group = IssuedGroup(BatchSlot(3, 1), attempt, 7)
    slots = supply(prompts_per_step=3, first_step=0)
    slots.add(group)
    slots.end(group, outcome)
    assert slots.find_replacements(group, outcome, uses_spares=False) == [(group.slot, attempt + 1)]


@dataclass
class SimulatedRun:
    """Prompter, engines and trainer as state over the pure functions; `chance` decides who moves
    next, and what a prompter that crashes has not written."""

    max_staleness: int
    order: SampleOrder
    chance: random.Random
    pass_ratio: float
    crashes: bool = False
    num_steps: int = 6
    prompts_per_step: int = 3
    version: int = 0
    used_rows: set[int] = field(default_factory=set)
    log: list[IssuedGroup | tuple[IssuedGroup, Outcome]] = field(default_factory=list)
    waiting: list[tuple[IssuedGroup, int]] = field(default_factory=list)
    running: list[tuple[IssuedGroup, int]] = field(default_factory=list)
    ready: list[tuple[IssuedGroup, int]] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    trained: list[IssuedGroup] = field(default_factory=list)
    seen_staleness: list[int] = field(default_factory=list)

    def run(self) -> None:
        self.supply = self.start_supply()
        self.admit()
        moves = [self.start, self.finish, self.train] + [self.restart] * self.crashes
        for _ in range(20_000):
            if self.version == self.num_steps:
                return
            self.chance.choice(moves)()
        raise AssertionError("the run got stuck")

    def start_supply(self) -> BatchSupply:
        if self.order == "ready_first":
            return ReadySupply(prompts_per_step=self.prompts_per_step, first_step=0)
        return OrderedSupply(
            prompts_per_step=self.prompts_per_step,
            first_step=0,
            returns_filtered=self.max_staleness == 0,
        )

    def passes(self, row: int) -> bool:
        return random.Random(f"row {row}").random() < self.pass_ratio

    def restart(self) -> None:
        """The prompter reads back what it issued, then the outcomes."""
        before, self.supply = self.supply, self.start_supply()
        for entry in self.log:
            if isinstance(entry, IssuedGroup):
                self.supply.add(entry)
        for entry in self.log:
            if not isinstance(entry, IssuedGroup):
                self.apply_end(*entry)
        assert self.supply.first_step == before.first_step
        assert self.supply.open_step == before.open_step
        assert self.supply.slots_used == before.slots_used
        assert self.supply.returned_rows == before.returned_rows
        self.admit()

    def apply_end(self, group: IssuedGroup, outcome: Outcome) -> None:
        if outcome is Outcome.TRAINED:
            self.supply.train(group.slot, trainer_version=group.slot.train_step)
        else:
            self.supply.end(group, outcome)

    def admit(self) -> None:
        steps = admitted_steps(
            self.version, max_staleness=self.max_staleness, num_steps=self.num_steps
        )
        slots = [
            slot
            for step in range(self.supply.first_step, steps.stop)
            for slot in self.supply.find_empty_slots(step, uses_spares=True)
        ]
        self.issue([(slot, 0) for slot in slots])

    def issue(self, slots: list[tuple[BatchSlot, int]], *, row: int | None = None) -> None:
        """Issue with the rows of unused spares, then with the next ones; a prompter that crashes
        has issued some of them."""
        returned = sorted(self.supply.returned_rows)[: len(slots)] if row is None else [row]
        new = (number for number in count() if number not in self.used_rows)
        rows = [*returned, *islice(new, len(slots) - len(returned))]
        groups = [
            IssuedGroup(slot, attempt, number)
            for (slot, attempt), number in zip(slots, rows, strict=True)
        ]
        crashes = self.crashes and row is None and self.chance.random() < 0.1
        if crashes:
            groups = [group for group in groups if self.chance.random() < 0.5]
        for group in groups:
            self.supply.add(group)
            self.log.append(group)
            self.used_rows.add(group.row)
            oldest = max(group.slot.train_step - self.max_staleness, 0)
            self.waiting.append((group, self.version if group.attempt else oldest))
        if crashes:
            self.restart()

    def start(self) -> None:
        """An engine that has any version from the required one to the newest takes any waiting
        prompt group."""
        if self.waiting:
            group, required = self.waiting.pop(self.chance.randrange(len(self.waiting)))
            self.running.append((group, self.chance.randint(required, self.version)))

    def finish(self) -> None:
        if self.running:
            group, version = self.running.pop(self.chance.randrange(len(self.running)))
            if self.passes(group.row):
                self.ready.append((group, version))
            else:
                self.end(group, Outcome.FILTERED)

    def end(self, group: IssuedGroup, outcome: Outcome) -> None:
        self.outcomes[outcome] += 1
        self.log.append((group, outcome))
        self.apply_end(group, outcome)
        slots = self.supply.find_replacements(group, outcome, uses_spares=True)
        is_same = bool(slots) and outcome is Outcome.EXPIRED
        self.issue(slots, row=group.row if is_same else None)

    def train(self) -> None:
        for group, version in list(self.ready):
            is_left = self.order == "fifo" and group.slot.train_step < self.version
            if is_left or is_expired(
                version, trainer_version=self.version, max_staleness=self.max_staleness
            ):
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
        waiting = ReadyGroups(order=self.order, prompts_per_step=self.prompts_per_step)
        ended = [
            (entry[0].slot.train_step, entry[0].slot.group_index)
            for entry in self.log
            if not isinstance(entry, IssuedGroup) and entry[1] is not Outcome.TRAINED
        ]
        waiting.apply(rows, [], ended)
        if waiting.count_eligible(self.version) < self.prompts_per_step:
            return
        chosen = {
            row.prompt_group_id
            for row in waiting.take(self.prompts_per_step, trainer_version=self.version)
        }
        taken = [one for one in self.ready if one[0].prompt_group_id in chosen]
        self.ready = [one for one in self.ready if one[0].prompt_group_id not in chosen]
        for group, version in sorted(taken, key=lambda one: one[0].slot):
            self.seen_staleness.append(compute_staleness(version, trainer_version=self.version))
            self.trained.append(group)
            self.outcomes[Outcome.TRAINED] += 1
            self.log.append((group, Outcome.TRAINED))
            self.supply.train(group.slot, trainer_version=self.version)
        self.version += 1
        self.admit()


@given(
    max_staleness=st.integers(0, 3),
    seed=SEEDS,
    pass_ratio=st.sampled_from([1.0, 0.7, 0.3]),
    crashes=st.booleans(),
)
def test_in_order_run_trains_each_steps_first_passing_groups_and_none_too_stale(
    max_staleness: int, seed: int, pass_ratio: float, crashes: bool
) -> None:
    run = SimulatedRun(max_staleness, "fifo", random.Random(seed), pass_ratio, crashes)
    run.run()
    assert max(run.seen_staleness) <= max_staleness
    assert len({group.prompt_group_id for group in run.trained}) == len(run.trained) == 18
    assert len({group.row for group in run.trained}) == 18
    assert [group.slot.train_step for group in run.trained] == [
        step for step in range(6) for _ in range(3)
    ]
    issued: dict[BatchSlot, IssuedGroup] = {
        entry.slot: entry for entry in run.log if isinstance(entry, IssuedGroup)
    }
    if all(group.attempt == 0 or group.slot.group_index >= 3 for group in issued.values()):
        for step in range(6):
            passing = [
                slot
                for slot, group in sorted(issued.items())
                if slot.train_step == step and run.passes(group.row)
            ]
            assert passing[:3] == [g.slot for g in run.trained if g.slot.train_step == step]
    assert max(slot.group_index for slot in issued) < SLOTS_PER_PROMPT * 3
    if pass_ratio == 1.0:
        assert sorted(issued) == [BatchSlot(step, index) for step in range(6) for index in range(3)]
        assert run.outcomes[Outcome.EXPIRED] == 0


@given(seed=SEEDS, pass_ratio=st.sampled_from([0.7, 0.4]))
def test_on_policy_run_trains_the_first_rows_that_pass_whatever_ends_first(
    seed: int, pass_ratio: float
) -> None:
    run = SimulatedRun(0, "fifo", random.Random(seed), pass_ratio)
    run.run()
    passing = [row for row in range(1000) if run.passes(row)]
    assert [group.row for group in run.trained] == passing[:18]


@given(max_staleness=st.integers(0, 3), seed=SEEDS)
def test_ready_first_run_never_trains_too_stale_and_reaches_its_goal(
    max_staleness: int, seed: int
) -> None:
    run = SimulatedRun(max_staleness, "ready_first", random.Random(seed), 0.9)
    run.run()
    assert max(run.seen_staleness) <= max_staleness
    assert len({group.prompt_group_id for group in run.trained}) == len(run.trained) == 18


@given(
    prompts=st.integers(1, 300),
    ratio=st.floats(0.1, 1.0),
    num_measured=st.integers(0, 2000),
    rounds=st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 400)).filter(lambda one: one[1] <= one[0]),
        max_size=4,
    ),
)
def test_prompt_groups_of_a_step_are_never_too_few(
    prompts: int, ratio: float, num_measured: int, rounds: list[tuple[int, int]]
) -> None:
    number = count_missing(
        rounds, prompts_per_step=prompts, pass_ratio=ratio, num_measured=num_measured
    )
    num_left = sum(issued - ended for issued, ended in rounds)
    assert num_left + number >= prompts
    if ratio == 1.0:
        assert number == max(prompts - num_left, 0)
    assert number <= 1.25 * prompts / ratio


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
    waiting, every = ReadyGroups(order=order, prompts_per_step=3), dict[str, ReadyGroup]()
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
