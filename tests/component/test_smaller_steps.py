"""A step that ran out of memory in its optimizer step is trained by the next process in smaller
passes, then path by path, then without paths that fit nowhere."""

from __future__ import annotations

from pathlib import Path

from thread_ranks import ThreadRank, run_ranks

from relax_events.config.topology import Topology
from relax_events.errors import OutOfMemory
from relax_events.objects import ObjectStore
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
