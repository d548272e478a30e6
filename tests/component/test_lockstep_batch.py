"""Ranks that train in rounds call the backend equally often, train exactly the prompt groups that
can be trained, and agree on those that can't; samples reach the rank that trains them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from event_samples import changed, ready
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ThreadRank, run_ranks

from relax_events.config.topology import Topology
from relax_events.errors import ObjectError, OutOfMemory, PoisonSample
from relax_events.events.types import SampleReady
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.batch.balanced_batches import (
    EncodedSample,
    exchange_samples,
    read_samples,
    write_samples,
)
from relax_events.training.batch.lockstep_batch import (
    ExcludedGroup,
    LockstepBatch,
    UndecodedSample,
)
from relax_events.training.batch.packing import micro_batch_slices
from relax_events.training.batch.row_layout import read_array
from relax_events.training.batch.step_batch import PassBudget
from relax_events.training.step_record import RankStepResult

PER_GROUP = 3
NUM_GROUPS = 5
EVERY = [(group, index) for group in range(NUM_GROUPS) for index in range(PER_GROUP)]
SampleName = tuple[int, int]


def id_of(group: int) -> str:
    """Return a prompt group's id."""
    return f"000000-{group:04d}-0"


class Backend:
    """Keeps what it was given, and refuses some samples."""

    def __init__(self, poison: set[str]) -> None:
        self.poison = poison
        self.num_calls = self.max_cells = 0
        self.trained: list[str] = []

    def set_max_cells(self, max_cells: int) -> None:
        """Take the budget of a pass."""
        self.max_cells = max_cells

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Keep the ids, or refuse the whole micro-batch."""
        ids = [sample.sample_id for sample in micro_batch]
        if bad := [sample_id for sample_id in ids if sample_id in self.poison]:
            raise PoisonSample(f"sample {bad[0]} is poison")
        self.num_calls += 1
        self.trained += ids

    def discard(self) -> None:
        """Forget the step."""
        self.trained = []


class SmallDevice(Backend):
    """Runs passes of consecutive samples, and has memory for so many tokens of one; an error leaves
    a part of the step behind.
    """

    def __init__(self, poison: set[str], max_tokens: int) -> None:
        super().__init__(poison)
        self.memory = max_tokens

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Keep the ids, as far as the memory suffices."""
        lengths = [len(read_array(sample, "tokens")) for sample in micro_batch]
        for part in micro_batch_slices(lengths, max_tokens=self.max_cells):
            if (size := sum(lengths[part])) > self.memory:
                self.trained.append("a part of one that did not fit")
                raise OutOfMemory(
                    "out of memory: too large",
                    sample_id=micro_batch[part.start].sample_id,
                    num_paths=len(lengths[part]),
                    num_cells=size,
                )
        super().accumulate(micro_batch)


def make_batch(
    rank: ThreadRank,
    backend: Backend,
    *,
    worker: int | None = None,
    budget: int = 1000,
    max_cells: int = 0,
) -> LockstepBatch:
    """Return the batch of a rank's first step."""
    return LockstepBatch(
        RankStepResult(rank.rank if worker is None else worker),
        rank,
        trainer_version=0,
        accumulate=backend.accumulate,
        discard=backend.discard,
        passes=PassBudget(backend.set_max_cells, budget=budget, max_cells=max_cells),
    )


def undecoded(
    name: SampleName, lost: set[SampleName], num_tokens: int | None = None
) -> UndecodedSample:
    """Return a sample that is decoded later, unless it is lost."""
    group, index = name

    def decode() -> LocatedSample:
        if name in lost:
            raise ObjectError(f"sample {index} of {id_of(group)} is lost")
        sample = ready(id_of(group), index, of=PER_GROUP)
        if num_tokens is not None:
            sample = changed(sample, tokens=np.ones(num_tokens, np.int32))
        return LocatedSample(sample, group, index)

    return UndecodedSample(id_of(group), (group, index), decode)


SAMPLES = st.sets(st.sampled_from(EVERY), max_size=3)


def owner_lists(num_rounds: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Draw the rank and the micro-batch of each sample of `EVERY`."""
    at = st.tuples(st.integers(0, 2), st.integers(0, num_rounds - 1))
    return st.lists(at, min_size=len(EVERY), max_size=len(EVERY))


def ids_of(names: Iterable[SampleName]) -> set[str]:
    """Return the ids of the prompt groups of samples."""
    return {id_of(group) for group, _ in names}


Trained = tuple[Backend, LockstepBatch, list[ExcludedGroup]]


def check_trained(results: Sequence[Trained], *, present: set[SampleName], bad: set[str]) -> None:
    """Require that the ranks call equally often, and train the groups that are not bad alone."""
    expected = sorted(
        f"{id_of(group)}/{index}" for group, index in present if id_of(group) not in bad
    )
    assert sorted(name for backend, _, _ in results for name in backend.trained) == expected
    assert sorted(name for _, batch, _ in results for name in batch.share.sample_ids) == expected
    assert len({backend.num_calls for backend, _, _ in results}) == 1
    for _, _, excluded in results:
        assert {group.prompt_group_id for group in excluded} == bad


@settings(max_examples=30)
@given(owners=owner_lists(4), poison=SAMPLES, lost=SAMPLES)
def test_all_trainable_groups_are_trained_once_and_ranks_call_equally_often(
    owners: list[tuple[int, int]], poison: set[SampleName], lost: set[SampleName]
) -> None:
    """Any sample may be in any micro-batch of any rank, prompt groups split over ranks included."""
    by_owner = dict(zip(EVERY, owners, strict=True))

    def program(rank: ThreadRank) -> Trained:
        backend = Backend({f"{id_of(group)}/{index}" for group, index in poison})
        batch = make_batch(rank, backend)
        mine = [
            [undecoded(name, lost) for name in EVERY if by_owner[name] == (rank.rank, number)]
            for number in range(rank.rank + 2)
        ]
        return backend, batch, batch.train(mine)

    results = run_ranks(Topology.of(3), program)

    present = {name for name, (rank, number) in by_owner.items() if number < rank + 2}
    check_trained(results, present=present, bad=ids_of((poison | lost) & present))
    for _, batch, excluded in results:
        assert all(group.error for group in excluded)
        assert batch.share.micro_batches == sorted(batch.share.micro_batches)


LENGTH, BUDGET = 10, 60


@settings(max_examples=60)
@given(owners=owner_lists(2), memory=st.integers(LENGTH, BUDGET), long=SAMPLES, poison=SAMPLES)
def test_ranks_train_again_together_in_passes_that_fit_without_what_fits_none(
    owners: list[tuple[int, int]],
    memory: int,
    long: set[SampleName],
    poison: set[SampleName],
) -> None:
    def program(rank: ThreadRank) -> Trained:
        backend = SmallDevice({f"{id_of(group)}/{index}" for group, index in poison}, memory)
        batch = make_batch(rank, backend, budget=BUDGET)
        mine = [
            [
                undecoded(name, set(), 2 * BUDGET if name in long else LENGTH)
                for name, at in zip(EVERY, owners, strict=True)
                if at == (rank.rank, number)
            ]
            for number in range(2)
        ]
        return backend, batch, batch.train(mine)

    results = run_ranks(Topology.of(3), program)

    check_trained(results, present=set(EVERY), bad=ids_of(long | poison))
    (max_cells,) = {backend.max_cells for backend, _, _ in results}
    for _, batch, excluded in results:
        assert batch.share.max_cells == (0 if max_cells == BUDGET else max_cells)
        for group in excluded:  # records of what is too large are valid
            assert bool(group.positions) == ("poison" in group.error)


def test_recorded_step_begins_with_its_passes_on_all_ranks() -> None:
    def program(rank: ThreadRank) -> tuple[int, int]:
        backend = SmallDevice(set(), BUDGET)
        batch = make_batch(rank, backend, budget=BUDGET, max_cells=20)
        batch.train([[undecoded((rank.rank, 0), set())]])
        return backend.max_cells, batch.share.max_cells

    assert run_ranks(Topology.of(2), program) == [(20, 20)] * 2


def test_micro_batches_of_a_second_part_of_a_step_are_counted_on() -> None:
    def program(rank: ThreadRank) -> RankStepResult:
        backend = Backend(set())
        batch = make_batch(rank, backend)
        batch.train([[undecoded((rank.rank, 0), set())]])
        batch.train([[undecoded((2, index), set())] for index in range(rank.rank)])
        assert backend.num_calls == 2
        return batch.share

    first, second = run_ranks(Topology.of(2), program)

    assert (first.micro_batches, second.micro_batches) == ([0], [0, 1])


def test_peers_train_the_same_and_the_data_leader_alone_records_it() -> None:
    topology = Topology.of(4, tensor=2)

    def program(rank: ThreadRank) -> tuple[Backend, RankStepResult]:
        backend = Backend(set())
        own = [
            EncodedSample(id_of(group), index, group, index, f"{group} {index}".encode())
            for group, index in EVERY
            if rank.at.is_data_leader and group % topology.data == rank.at.data
        ]
        targets = {(id_of(group), index): index % topology.data for group, index in EVERY}
        received = exchange_samples(own, targets, ranks=rank)
        batch = make_batch(rank, backend, worker=rank.at.data)
        assert all(
            sample.value == f"{sample.partition} {sample.offset}".encode()
            for sample in received.values()
        )
        batch.train([[undecoded((s.partition, s.offset), set()) for s in received.values()]])
        return backend, batch.share

    results = run_ranks(topology, program)

    trained = [sorted(backend.trained) for backend, _ in results]
    assert trained[0] == trained[1] == sorted(f"{id_of(g)}/{i}" for g, i in EVERY if i % 2 == 0)
    assert trained[2] == trained[3] == sorted(f"{id_of(g)}/{i}" for g, i in EVERY if i % 2 == 1)
    assert [len(share.sample_ids) for _, share in results] == [10, 0, 5, 0]


@given(
    st.lists(
        st.builds(
            EncodedSample,
            st.text(max_size=20),
            st.integers(0, 2**31 - 1),
            st.integers(0, 2**31 - 1),
            st.integers(0, 2**63 - 1),
            st.binary(max_size=50),
        )
    )
)
def test_written_samples_are_read_back(samples: list[EncodedSample]) -> None:
    assert list(read_samples(write_samples(samples))) == samples
