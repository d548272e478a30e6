"""Fills train batches that are balanced over ranks: the ranks wait for the prompt groups of a whole
step, plan it, move samples to the ranks that train them, and train in rounds.

Offsets, outcomes and dead letters of a prompt group stay with the rank that reads its partition;
only samples move, as the bytes of their records behind a header that says where they lie on the
log. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct

import orjson
import structlog

from relax_events.errors import PoisonSample
from relax_events.kafka.records import Record
from relax_events.runtime.record_io import ArraysAhead
from relax_events.staleness import ReadyGroup
from relax_events.training.batch.live_batches import LiveBatches
from relax_events.training.batch.lockstep_batch import ExcludedGroup, LockstepBatch, UndecodedSample
from relax_events.training.batch.step_batch import UntrainableGroup
from relax_events.training.batch.step_plan import (
    GroupSize,
    PlanRules,
    StepPlan,
    plan_step,
)
from relax_events.training.ranks import Ranks
from relax_events.training.step_record import RankStepResult

HEADER = Struct("<iqiHI")
"""Partition, offset, index in the prompt group, bytes of the prompt group's id, bytes of the
record."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A sample as its record's bytes, with the record's partition and offset."""

    prompt_group_id: str
    index: int
    partition: int
    offset: int
    value: bytes

    @property
    def sample_key(self) -> tuple[str, int]:
        """Prompt group and index: what a plan names the sample by."""
        return self.prompt_group_id, self.index

    @property
    def position(self) -> tuple[int, int]:
        """Partition and offset of the record."""
        return self.partition, self.offset


def exchange_samples(
    samples: Iterable[EncodedSample],
    ranks_by_sample: Mapping[tuple[str, int], int],
    *,
    ranks: Ranks,
) -> dict[tuple[str, int], EncodedSample]:
    """Return the samples that this rank trains; collective.

    Args:
        samples: Read by this rank; none on a rank that is no data leader.
        ranks_by_sample: Data-parallel rank of each sample, by prompt group and index.
        ranks: This process and its peers.
    """
    topology, data = ranks.topology, ranks.at.data
    kept: list[EncodedSample] = []
    leaving: dict[int, list[EncodedSample]] = {leader: [] for leader in topology.data_leaders()}
    for sample in samples:
        target = ranks_by_sample[sample.sample_key]
        (kept if target == data else leaving[topology.data_leader(target)]).append(sample)
    received = ranks.exchange_bytes(
        [write_samples(leaving.get(rank, ())) for rank in range(ranks.size)]
    )
    if ranks.at.is_data_leader:
        kept += [sample for part in received for sample in read_samples(part)]
    if topology.model > 1:
        mine = write_samples(kept) if ranks.at.is_data_leader else None
        kept = list(read_samples(ranks.share_with_peers(mine)))
    return {sample.sample_key: sample for sample in kept}


def write_samples(samples: Sequence[EncodedSample]) -> bytes:
    """Serialise samples."""
    frames: list[bytes] = []
    for sample in samples:
        group_id = sample.prompt_group_id.encode()
        header = sample.partition, sample.offset, sample.index, len(group_id), len(sample.value)
        frames += [HEADER.pack(*header), group_id, sample.value]
    return b"".join(frames)


def read_samples(data: bytes) -> Iterator[EncodedSample]:
    """Yield what `write_samples` wrote."""
    at = 0
    while at < len(data):
        partition, offset, index, id_bytes, num_bytes = HEADER.unpack_from(data, at)
        begin = at + HEADER.size
        value = begin + id_bytes
        at = value + num_bytes
        yield EncodedSample(data[begin:value].decode(), index, partition, offset, data[value:at])


class BalancedBatches(LiveBatches):
    """See the module's docstring."""

    def _begin(self, version: int) -> RankStepResult:
        self._rounds: LockstepBatch = self._opener.in_rounds(version)
        self._groups: dict[str, ReadyGroup] = {}
        self._sizes: list[GroupSize] = []
        self._samples: list[EncodedSample] = []
        return self._rounds.share

    def _feed(self, group: ReadyGroup) -> None:
        name = group.prompt_group_id
        self._groups[name] = group
        self._sizes.append(GroupSize(name, tuple(self._assembler.lengths(group))))
        for index, held in enumerate(self._assembler.take(group)):
            assert isinstance(held, Record)  # as the intake keeps them for ranks that exchange them
            self._samples.append(
                EncodedSample(name, index, held.partition, held.offset, held.value)
            )

    def _finish_batch(self, version: int) -> int:
        with self._worker.records.open_ahead() as ahead:
            planned = self._receive_planned(ahead)
            excluded = [*self._too_long, *self._rounds.train(planned)]
        for group in excluded:
            if group.prompt_group_id in self._groups:
                self._fail(self._untrainable(group), version)
        self._rounds.share.prompt_group_ids[:] = self._groups
        return len(excluded)

    def _untrainable(self, group: ExcludedGroup) -> UntrainableGroup:
        ready = self._groups.pop(group.prompt_group_id)
        return UntrainableGroup(
            group.prompt_group_id,
            ready.policy_version,
            group.positions,
            PoisonSample(group.error),
        )

    def _receive_planned(self, ahead: ArraysAhead) -> list[list[UndecodedSample]]:
        """Return this rank's micro-batches of the prompt groups that the ranks hold; collective."""
        with (
            self._commits.phases.measure("exchange"),
            self._worker.lifecycle.piece("exchange samples"),
        ):
            plan = self._plan()
            ranks_by_sample = plan.ranks_by_sample()
            mine = [one for one in self._samples if one.sample_key in ranks_by_sample]
            received = exchange_samples(mine, ranks_by_sample, ranks=self._ranks)
        data = self._ranks.at.data
        log.info(
            "train_batch.planned",
            efficiency=plan.efficiency,
            num_micro_batches=len(plan.micro_batches[data]),
            num_samples=len(received),
            num_samples_sent=sum(ranks_by_sample[sample.sample_key] != data for sample in mine),
        )
        self._sizes, self._samples = [], []
        micro_batches = [
            [received[planned.prompt_group_id, planned.index] for planned in micro_batch]
            for micro_batch in plan.micro_batches[data]
        ]
        encoded = [(one.value, one.position) for batch in micro_batches for one in batch]
        decodes = iter(self._intake.plan_decoding(encoded, ahead))
        return [
            [UndecodedSample(one.prompt_group_id, one.position, next(decodes)) for one in batch]
            for batch in micro_batches
        ]

    def _plan(self) -> StepPlan:
        """Plan the prompt groups that all ranks hold, without those that have no room in this step;
        collective.
        """
        rows = self._ranks.all_gather_bytes(
            orjson.dumps([(size.prompt_group_id, size.lengths) for size in self._sizes])
        )
        sizes = _read_sizes(rows)
        problems = {
            size.prompt_group_id: self._bounds.describe_too_long(max(map(max, size.lengths)))
            for size in sizes
        }
        self._too_long = [
            ExcludedGroup(name, [], problem) for name, problem in problems.items() if problem
        ]
        fitting = [size for size in sizes if not problems[size.prompt_group_id]]
        return plan_step(fitting, self._rules())

    def _rules(self) -> PlanRules:
        backend = self._commits.backend
        return PlanRules(
            num_ranks=self._ranks.topology.data,
            max_tokens=self._config.trainer.max_tokens_per_micro_batch,
            attention_cost=backend.attention_cost,
            whole_prompt_groups=self._config.algorithm.needs_whole_groups,
            waits_each_round=backend.is_collective,
        )


def _read_sizes(rows: Iterable[bytes]) -> list[GroupSize]:
    return [
        GroupSize(name, tuple(map(tuple, lengths)))
        for row in rows
        for name, lengths in orjson.loads(row)
    ]
