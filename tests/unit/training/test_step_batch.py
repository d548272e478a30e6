"""A prompt group that a backend rejects is left out of its step whole, and the step's record names
exactly the trained samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from event_samples import changed, ready
from hypothesis import given
from hypothesis import strategies as st

from relax_events.errors import ObjectError, OutOfMemory, PoisonSample
from relax_events.events.types import SampleReady
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.batch.packing import MicroBatcher, micro_batch_slices
from relax_events.training.batch.row_layout import read_array
from relax_events.training.batch.step_batch import PassBudget, StepBatch, UntrainableGroup
from relax_events.training.step_record import RankStepResult

PER_GROUP = 4


class Backend:
    """Keeps the ids of what it was given, and refuses some samples."""

    def __init__(self, poison: set[str]) -> None:
        self.poison = poison
        self.micro_batches: list[list[str]] = []

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        ids = [sample.sample_id for sample in micro_batch]
        if bad := [sample_id for sample_id in ids if sample_id in self.poison]:
            raise PoisonSample(f"sample {bad[0]} is poison")
        self.micro_batches.append(ids)

    def discard(self) -> None:
        self.micro_batches = []


class SmallDevice(Backend):
    """Runs passes of consecutive samples, and has memory for so many tokens of one; an error leaves
    a part of the step behind.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__(set())
        self.memory, self.max_cells = max_tokens, 0
        self.largest: list[int] = []

    def set_max_cells(self, max_cells: int) -> None:
        self.max_cells = max_cells

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        self.micro_batches.append([])
        lengths = [len(read_array(sample, "tokens")) for sample in micro_batch]
        for part in micro_batch_slices(lengths, max_tokens=self.max_cells):
            if (size := sum(lengths[part])) > self.memory:
                raise OutOfMemory(
                    "out of memory: too large",
                    sample_id=micro_batch[part.start].sample_id,
                    num_paths=len(lengths[part]),
                    num_cells=size,
                )
            self.largest.append(size)
            self.micro_batches[-1] += [sample.sample_id for sample in micro_batch[part]]


def group(index: int) -> list[LocatedSample]:
    group_id = f"000000-{index:04d}-0"
    return [
        LocatedSample(ready(group_id, number, of=PER_GROUP), 0, PER_GROUP * index + number)
        for number in range(PER_GROUP)
    ]


def ids_of(members: Sequence[LocatedSample]) -> list[str]:
    return [item.sample.sample_id for item in members]


def run_step(
    groups: Sequence[list[LocatedSample]],
    backend: Backend,
    *,
    num_samples: int,
    whole: bool,
    max_cells: int = 0,
) -> StepBatch:
    num_tokens = len(groups[0][0].sample.tokens) * num_samples
    batcher = MicroBatcher(max_tokens=num_tokens, whole_prompt_groups=whole)
    batch = StepBatch(
        RankStepResult(0),
        batcher,
        trainer_version=0,
        accumulate=backend.accumulate,
        discard=backend.discard,
        passes=PassBudget(
            getattr(backend, "set_max_cells", lambda _: None),
            budget=num_tokens,
            max_cells=max_cells,
        ),
    )
    for members in groups:
        batch.feed(members)
    batch.flush()
    return batch


@given(
    poison=st.sets(st.tuples(st.integers(0, 3), st.integers(0, PER_GROUP - 1)), max_size=4),
    num_samples=st.integers(1, 9),
    whole=st.booleans(),
)
def test_step_contains_every_trainable_group_once(
    poison: set[tuple[int, int]], num_samples: int, whole: bool
) -> None:
    groups = [group(index) for index in range(4)]
    backend = Backend({groups[index][number].sample.sample_id for index, number in poison})
    batch = run_step(groups, backend, num_samples=num_samples, whole=whole)
    left_out = {index for index, _ in poison}
    kept = [members for index, members in enumerate(groups) if index not in left_out]
    trained = [sample_id for micro_batch in backend.micro_batches for sample_id in micro_batch]
    assert sorted(trained) == sorted(sample_id for members in kept for sample_id in ids_of(members))
    assert batch.share.prompt_group_ids == [members[0].sample.prompt_group_id for members in kept]
    assert batch.share.sample_ids == trained
    assert batch.share.pop_micro_batches() == backend.micro_batches
    refused = batch.pop_untrainable()
    assert {item.prompt_group_id for item in refused} == {
        groups[index][0].sample.prompt_group_id for index in left_out
    }
    assert all(" is poison" in str(item.error) for item in refused)
    assert batch.pop_untrainable() == []


def test_step_restarts_without_a_group_found_untrainable_after_partial_training() -> None:
    groups = [group(0), group(1), group(2)]
    backend = Backend({"000000-0001-0/3"})
    batch = run_step(groups, backend, num_samples=6, whole=False)
    assert backend.micro_batches == [ids_of(groups[0]), ids_of(groups[2])]
    assert batch.share.offsets == [0, 1, 2, 3, 8, 9, 10, 11]
    assert batch.share.num_micro_batches == 2
    (refused,) = batch.pop_untrainable()
    assert (refused.prompt_group_id, refused.policy_version) == ("000000-0001-0", 0)
    assert (0, 7) in refused.positions


def test_group_with_unavailable_samples_is_excluded() -> None:
    backend = Backend(set())
    batch = run_step([group(0)], backend, num_samples=4, whole=True)
    batch.exclude(
        UntrainableGroup("000000-0001-0", 0, [(0, 4)], ObjectError("an object is missing"))
    )
    assert [item.prompt_group_id for item in batch.pop_untrainable()] == ["000000-0001-0"]
    assert batch.share.prompt_group_ids == ["000000-0000-0"]


@given(
    long=st.sets(st.tuples(st.integers(0, 3), st.integers(0, PER_GROUP - 1)), max_size=3),
    num_samples=st.integers(1, 9),
    whole=st.booleans(),
    memory=st.integers(1, 6),
)
def test_step_is_trained_again_in_passes_that_fit_without_what_fits_none(
    long: set[tuple[int, int]], num_samples: int, whole: bool, memory: int
) -> None:
    groups = [group(index) for index in range(4)]
    num_tokens = len(groups[0][0].sample.tokens)
    for index, number in long:
        item = groups[index][number]
        groups[index][number] = replace(
            item, sample=changed(item.sample, tokens=np.ones(8 * num_tokens, np.int32))
        )
    groups.insert(0, group(4))
    backend = SmallDevice(memory * num_tokens)
    batch = run_step(groups, backend, num_samples=num_samples, whole=whole)
    too_long = {groups[index + 1][0].sample.prompt_group_id for index, _ in long}
    refused = batch.pop_untrainable()
    assert {one.prompt_group_id for one in refused} == too_long
    assert all(not one.positions and isinstance(one.error, OutOfMemory) for one in refused)
    trained = [sample_id for micro_batch in backend.micro_batches for sample_id in micro_batch]
    kept = [one for one in groups if one[0].sample.prompt_group_id not in too_long]
    assert sorted(trained) == sorted(sample_id for members in kept for sample_id in ids_of(members))
    assert batch.share.sample_ids == trained
    assert batch.share.prompt_group_ids == [members[0].sample.prompt_group_id for members in kept]
    assert max(backend.largest) <= memory * num_tokens
    budget = num_samples * num_tokens
    assert batch.share.max_cells == (0 if backend.max_cells == budget else backend.max_cells)


def test_recorded_step_begins_with_its_passes() -> None:
    backend, num_tokens = SmallDevice(10_000), len(group(0)[0].sample.tokens)
    batch = run_step([group(0)], backend, num_samples=4, whole=False, max_cells=2 * num_tokens)
    assert backend.largest == [2 * num_tokens] * 2
    assert batch.share.max_cells == 2 * num_tokens


def test_other_errors_are_not_swallowed() -> None:
    class Broken(Backend):
        def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
            raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        run_step([group(0)], Broken(set()), num_samples=1, whole=False)
