"""A step that ran out of memory in its optimizer step is trained by the next process in smaller
passes, then path by path, then without paths that fit nowhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from event_samples import rolled_out
from numpy.typing import NDArray
from thread_ranks import ThreadRank, run_ranks

from relax_events.config.topology import Topology
from relax_events.errors import OutOfMemory, RankLost
from relax_events.events.types import SampleRolledOut
from relax_events.objects import ObjectStore
from relax_events.training.critic_learning import read_bounds
from relax_events.training.critic_ranks import LeadingCritic, follow_leader
from relax_events.training.ranks import SingleRank
from relax_events.training.smaller_steps import SmallerSteps, StepBounds

BUDGET = 1000


def out_of_memory(num_paths: int, num_cells: int) -> OutOfMemory:
    """Return the error of a pass."""
    return OutOfMemory("out of memory", sample_id="s", num_paths=num_paths, num_cells=num_cells)


def begin(store: ObjectStore, step: int) -> SmallerSteps:
    """Return the bounds as a process reads them that begins with a step."""
    steps = SmallerSteps(store, SingleRank())
    steps.read(step)
    return steps


def test_each_death_leaves_less_to_the_next_process(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    seen = []
    for error in (out_of_memory(5, 900), out_of_memory(2, 400), out_of_memory(1, 300)):
        begin(store, 7).write(7, error, budget=BUDGET)
        seen.append(begin(store, 7).bounds(7))
    assert seen == [StepBounds(450), StepBounds(1), StepBounds(1, 300)]
    assert begin(store, 7).bounds(8) == StepBounds()


def test_a_micro_batch_above_the_budget_leaves_half_of_the_budget(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    begin(store, 0).write(0, out_of_memory(5, 9 * BUDGET), budget=BUDGET)
    assert begin(store, 0).bounds(0) == StepBounds(BUDGET // 2)


def test_step_is_bounded_where_the_one_before_was_not_committed(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    begin(store, 4).write(5, out_of_memory(2, 100), budget=BUDGET)
    assert begin(store, 4).bounds(5) == begin(store, 5).bounds(5) == StepBounds(50)
    assert begin(store, 6).bounds(5) == StepBounds()


def test_paths_as_long_as_one_that_did_not_fit_are_left_out() -> None:
    bounds = StepBounds(1, 300)
    assert not bounds.describe_too_long(299)
    assert "out of memory: a path of 300 tokens" in bounds.describe_too_long(300)
    assert "run.max_failed_prompt_groups" in bounds.describe_too_long(301)
    assert not StepBounds(1).describe_too_long(10**6)


def test_every_rank_has_the_bounds_that_one_wrote(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    topology = Topology.of(2)
    for error in (out_of_memory(4, 800), out_of_memory(1, 500)):

        def die(rank: ThreadRank, error: OutOfMemory = error) -> None:
            steps = SmallerSteps(store, rank)
            steps.read(3)
            if rank.rank == 1:
                steps.write(3, error, budget=BUDGET)

        run_ranks(topology, die)

    def read(rank: ThreadRank) -> StepBounds:
        steps = SmallerSteps(store, rank)
        steps.read(3)
        return steps.bounds(3)

    assert run_ranks(topology, read) == [StepBounds(400, 500)] * 2


class FullCritic:
    """One rank's part of a critic, which rank 1 has no memory for."""

    def __init__(self, rank: int) -> None:
        self.policy_version, self.max_cells = 5, BUDGET
        self._rank, self.num_discarded = rank, 0

    def on_progress(self, report_progress: Callable[[], None]) -> None:
        """Report nothing."""

    def discard(self) -> None:
        """Count."""
        self.num_discarded += 1

    def step(self) -> None:
        """Run out of memory on one rank; the other notices that it died."""
        if self._rank:
            raise out_of_memory(3, 700)
        raise RankLost("rank 1 died")


class ValueCritic(FullCritic):
    """One rank's part of a critic, whose rank 1 has memory for the values of one short path."""

    def score(self, samples: Sequence[SampleRolledOut]) -> list[NDArray[np.float32]]:
        """Run out of memory on one rank; the other notices that it died."""
        lengths = [len(sample.tokens) for sample in samples]
        if self.max_cells > 1 or max(lengths) > 5:
            num_paths = len(lengths) if self.max_cells > 1 else 1
            if self._rank:
                raise out_of_memory(num_paths, sum(lengths) if num_paths > 1 else max(lengths))
            raise RankLost("rank 1 died")
        return [np.zeros(length, np.float32) for length in lengths]


class Alive:
    """Takes no note of anything."""

    def tick(self, *, working: bool) -> None:
        """Do nothing."""

    def piece(self, name: str) -> nullcontext[None]:
        """Return an empty context."""
        return nullcontext()

    transfer = piece


def test_a_rank_of_a_critic_that_runs_out_of_memory_bounds_the_step_for_all(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    seen: list[StepBounds] = []

    def learn(rank: ThreadRank) -> tuple[int, int]:
        critic: Any = FullCritic(rank.rank)
        bounds = read_bounds(store, rank)
        seen.append(bounds.steps.bounds(5))
        checkpoints: Any = None
        if rank.rank:
            with pytest.raises(OutOfMemory):
                follow_leader(critic, checkpoints, ranks=rank, bounds=bounds, lifecycle=Alive())
        else:
            leader = LeadingCritic(
                critic, checkpoints, ranks=rank, bounds=bounds, timeout_seconds=60
            )
            leader.set_max_cells(bounds.steps.bounds(5).max_cells or BUDGET)
            leader.discard()
            with pytest.raises(RankLost):
                leader.step()
        return critic.max_cells, critic.num_discarded

    assert run_ranks(Topology.of(2), learn) == [(BUDGET, 1)] * 2
    assert run_ranks(Topology.of(2), learn) == [(350, 1)] * 2
    assert seen == [StepBounds(), StepBounds(), StepBounds(350), StepBounds(350)]
    assert begin(store, 5).bounds(5) == StepBounds(), "the trainer's steps are others"


def test_values_that_do_not_fit_are_computed_by_the_next_ranks_in_smaller_passes(
    tmp_path: Path,
) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    samples = [rolled_out("000003-0000-0", index, version=3) for index in range(2)]
    longer = np.arange(9, dtype=np.int32)
    samples.append(replace(rolled_out("000003-0001-0", version=3), tokens=longer))
    seen: list[StepBounds] = []
    named: list[str] = []

    def compute(rank: ThreadRank) -> int:
        critic: Any = ValueCritic(rank.rank)
        bounds, checkpoints = read_bounds(store, rank), cast("Any", None)
        if rank.rank:
            try:
                follow_leader(critic, checkpoints, ranks=rank, bounds=bounds, lifecycle=Alive())
            except RankLost:
                return -1
            return int(critic.max_cells)
        seen.append(bounds.values.bounds(3))
        leader = LeadingCritic(critic, checkpoints, ranks=rank, bounds=bounds, timeout_seconds=60)
        try:
            leader.score(samples)
        except RankLost:
            return -1
        except OutOfMemory as error:
            named.append(error.sample_id)
        assert len(leader.score(samples[:2])) == 2
        leader.set_max_cells(BUDGET)
        leader.end()
        return int(critic.max_cells)

    deaths = [run_ranks(Topology.of(2), compute) for _ in range(4)]
    assert deaths == [[-1, -1]] * 3 + [[BUDGET, BUDGET]]
    assert seen == [StepBounds(), StepBounds(8), StepBounds(1), StepBounds(1, 9)]
    assert named == ["000003-0001-0/0"]
    assert read_bounds(store, SingleRank()).steps.bounds(3) == StepBounds()
