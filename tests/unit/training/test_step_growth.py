"""What a step costs grows with its prompt groups, and not with their square: operations are counted
in steps of 1,000 prompt groups and of 4,000.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from event_samples import ready, rolled_out, scored
from run_events import make_heartbeat

from relax_events.errors import ObjectError, PoisonSample
from relax_events.events.types import SampleReady
from relax_events.kafka.records import Record
from relax_events.roles.redelivery import RedeliveryGuard
from relax_events.runtime.join import PromptGroupJoin
from relax_events.training.batch.assembly import BatchAssembler, LocatedSample
from relax_events.training.batch.live_batches import LiveBatches
from relax_events.training.batch.lockstep_batch import LockstepBatch, UndecodedSample
from relax_events.training.batch.packing import MicroBatcher
from relax_events.training.batch.step_batch import PassBudget, StepBatch
from relax_events.training.batch.step_plan import GroupSize, PlanRules, plan_step
from relax_events.training.commit import build_trained_outcomes
from relax_events.training.ranks import SingleRank
from relax_events.training.step_record import RankStepResult, StepRecord

SMALL, LARGE = 1_000, 4_000
TOPIC = "relax.test.advantage.samples"
GROWTH = 6.0
"""Bound for four times the prompt groups: 4, what sorting adds, and ids that exceed a cache; a square
gives 16."""


class CountedId(str):
    """An id whose comparisons are operations of this interpreter, so that they are counted."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True


def count_operations(work: Callable[[], object], *, at_most: float = inf) -> int:
    """Return how many instructions of Python code a call executes; end it where it takes more."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
            assert count <= at_most, f"more than {at_most:,.0f} operations"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def group_id(index: int, step: int = 0) -> str:
    return CountedId(f"{step:06d}-{index:04d}-0")


def assembled(number: int, *, mode: str, waiting: bool) -> Callable[[], None]:
    """Return a step whose prompt groups arrive one a round, while those of the next one wait."""
    config = SimpleNamespace(
        run=SimpleNamespace(mode=mode, sample_order="fifo", prompts_per_step=number)
    )
    assembler = BatchAssembler(max_staleness=1, decided=set())
    worker: Any = SimpleNamespace(config=config)
    opener: Any = SimpleNamespace(ranks=SingleRank())
    turns: Any = SimpleNamespace(are_taken=False)
    unused: Any = None
    batches = LiveBatches(
        worker, unused, opener, assembler=assembler, intake=unused, commits=unused, turns=turns
    )
    steps = range(1 + waiting)
    names = [group_id(index, step) for step in steps for index in range(number)]
    samples = [ready(name, of=1) for name in reversed(names)]
    records = [
        Record(TOPIC, 0, at, one.prompt_group_id, b"", {}, 0) for at, one in enumerate(samples)
    ]

    def work() -> None:
        remaining = number
        for record, sample in zip(records, samples, strict=True):
            assembler.add(record, sample, trainer_version=0)
            num_taken, mine = batches._choose(0, remaining)
            remaining -= num_taken
            for group in mine:
                assembler.take(group)
        assert remaining == 0
        assembler.mark_done([one.prompt_group_id for one in samples[-number:]])
        assembler.consumed()
        assembler.advance(2)
        assert len(assembler.pending_outcomes()) == len(names) - number

    return work


def refused(number: int) -> Callable[[], None]:
    """Return a step of which every second prompt group can't be trained."""

    def accumulate(samples: Sequence[SampleReady]) -> None:
        if int(samples[0].prompt_group_id[7:11]) % 2:
            raise PoisonSample("poison")

    groups = [[LocatedSample(ready(group_id(index), of=1), 0, index)] for index in range(number)]
    batch = StepBatch(
        RankStepResult(0),
        MicroBatcher(max_tokens=4),
        trainer_version=0,
        accumulate=accumulate,
        discard=lambda: None,
        passes=PassBudget(lambda _: None, budget=4),
    )

    def work() -> None:
        for members in groups:
            batch.feed(members)
        batch.flush()
        assert len(batch.pop_untrainable()) == number // 2

    return work


def in_rounds(number: int) -> Callable[[], None]:
    """Return a step in rounds, of which every second prompt group can't be read."""
    batch = LockstepBatch(
        RankStepResult(0),
        SingleRank(),
        trainer_version=0,
        accumulate=lambda _: None,
        discard=lambda: None,
        passes=PassBudget(lambda _: None, budget=4),
    )

    def undecoded(index: int) -> UndecodedSample:
        sample = ready(group_id(index), of=1)

        def decode() -> LocatedSample:
            if index % 2:
                raise ObjectError("it is gone")
            return LocatedSample(sample, 0, index)

        return UndecodedSample(sample.prompt_group_id, (0, index), decode)

    rounds = [[undecoded(index)] for index in range(number)]

    def work() -> None:
        assert len(batch.train(rounds)) == number // 2

    return work


def planned(number: int) -> Callable[[], object]:
    groups = [GroupSize(group_id(index), ((7,), (3,), (5,))) for index in range(number)]
    rules = PlanRules(num_ranks=4, max_tokens=64, waits_each_round=True)
    return lambda: plan_step(groups, rules)


def recorded(number: int) -> Callable[[], None]:
    results = [RankStepResult(0)]
    for index in range(number):
        results[0].prompt_group_ids.append(group_id(index))
        located = LocatedSample(ready(group_id(index), of=1), 0, index)
        results[0].add_micro_batch([located], trainer_version=0)

    def work() -> None:
        StepRecord.merge(results)
        build_trained_outcomes(results, 0)

    return work


def joined(number: int) -> Callable[[], None]:
    """Return a step whose samples are all written before their scores."""
    join = PromptGroupJoin(logprob_roles=frozenset())
    names = [group_id(index) for index in range(number)]
    events: Iterable[Any] = [
        *(rolled_out(name, of=1) for name in names),
        *(scored(name) for name in names),
    ]

    def work() -> None:
        for offset, event in enumerate(events):
            group = join.add(Record(TOPIC, 0, offset, event.prompt_group_id, b"", {}, 0), [event])
            if group is not None:
                join.close(group)
            join.pending_offsets()
        join.evict_older_than(1)
        assert join.num_open == 0

    return work


def delivered_again(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a step all of whose prompt groups are delivered once more, after an outage."""
    names = [group_id(index) for index in range(number)]
    config = SimpleNamespace(workers=SimpleNamespace(heartbeat_seconds=1.0))
    worker: Any = SimpleNamespace(config=config)
    lease: Any = SimpleNamespace(delivery_count=5, done=lambda: None)
    guard = RedeliveryGuard(worker, clock=lambda: 0.0)
    for name in names:
        guard.hold(name, lease)
    sent = replace(
        make_heartbeat("rollout-0", at_seconds=0.0),
        prompt_groups_in_flight=names[::2],
        prompt_groups_written=names[1::2],
    )
    monkeypatch.setattr(guard, "_read_heartbeats", lambda: [sent])

    def work() -> None:
        assert guard.find_unclaimed() == []
        assert len(guard._held) == number // 2

    return work


@pytest.mark.parametrize(
    "make",
    [
        partial(assembled, mode="async", waiting=True),
        partial(assembled, mode="sync", waiting=False),
        refused,
        in_rounds,
        planned,
        recorded,
        joined,
    ],
    ids=["assembled", "assembled whole", "refused", "in rounds", "planned", "recorded", "joined"],
)
def test_four_times_the_prompt_groups_take_about_four_times_the_operations(
    make: Callable[[int], Callable[[], object]],
) -> None:
    small = count_operations(make(SMALL))
    count_operations(make(LARGE), at_most=GROWTH * small)


def test_prompt_groups_that_are_delivered_again_are_found_in_one_look_at_each_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = count_operations(delivered_again(SMALL, monkeypatch))
    count_operations(delivered_again(LARGE, monkeypatch), at_most=GROWTH * small)
