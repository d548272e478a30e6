"""Reads the batches of committed steps back from the log, for recovery and for replays.

Each rank gets its own part of a step, in trained order, and model-parallel peers get the same. If
the number of data-parallel ranks differs from the recorded one, the recorded micro-batches are
dealt to them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np

from relax_events.errors import CorruptRecord, ObjectError, PoisonSample, RunFailed, SchemaError
from relax_events.events.types import Event, SampleReady, TrainStepCommitted
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.runtime.validation import check_ready
from relax_events.runtime.worker import Worker
from relax_events.topics.names import TRAINING_SAMPLES
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.ranks import Ranks

MAX_STEPS_AT_ONCE = 16
MAX_BYTES_AT_ONCE = 1 << 30
"""Encoded records that are read ahead, unless a single step has more."""
Decode = Callable[[Record], Event]
DecodeSamples = Callable[[Record], Sequence[Event]]
Relabel = Callable[[list[LocatedSample]], list[LocatedSample]]


@dataclass(frozen=True, slots=True)
class CommittedSample:
    """A sample of a committed step: its (partition, offset), the data-parallel rank that trains
    it, and the index of its micro-batch there.
    """

    sample_id: str
    position: tuple[int, int]
    rank: int
    micro_batch: int

    @property
    def prompt_group_id(self) -> str:
        """Prompt group of the sample."""
        return self.sample_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """What a rank trains of a committed step; `micro_batches` says for each sample in which one it
    was trained. All ranks have `num_rounds`, in each of which they train at most one.
    """

    step: TrainStepCommitted
    samples: list[LocatedSample]
    micro_batches: list[int]
    num_rounds: int

    def rounds(self) -> Iterator[list[LocatedSample]]:
        """Yield the micro-batch of each round, empty where other ranks have more."""
        by_round: dict[int, list[LocatedSample]] = {}
        for sample, number in zip(self.samples, self.micro_batches, strict=True):
            by_round.setdefault(number, []).append(sample)
        return (by_round.get(number, []) for number in range(self.num_rounds))

    def parts(self) -> Iterator[list[LocatedSample]]:
        """Yield the samples of each micro-batch, or of two where a prompt group was divided
        between them.
        """
        part: list[LocatedSample] = []
        for index, sample in enumerate(self.samples):
            if (
                part
                and self.micro_batches[index] != self.micro_batches[index - 1]
                and sample.sample.prompt_group_id != part[-1].sample.prompt_group_id
            ):
                yield part
                part = []
            part.append(sample)
        if part:
            yield part


class RecordedBatches:
    """See the module's docstring.

    Args:
        worker: Of the trainer; its plan says on which topic the samples lie.
        ranks: This process and its peers.
        decode: Turns a record into its samples, arrays fetched; by default as the worker does.
        relabel: Replaces the recorded rewards and advantages; called with whole prompt groups.
    """

    def __init__(
        self,
        worker: Worker,
        ranks: Ranks,
        *,
        decode: DecodeSamples | None = None,
        relabel: Relabel | None = None,
    ) -> None:
        self._ranks = ranks
        self._topic = worker.plan.topic(TRAINING_SAMPLES)
        records = worker.records
        self._decode: DecodeSamples = decode or (
            lambda record: records.fetch_samples(records.codec.decode(record.value))
        )
        self._relabel = relabel

    def read(
        self, reader: LogReader, steps: Sequence[TrainStepCommitted]
    ) -> Iterator[RecordedBatch]:
        """Yield this rank's part of each step. Records are read ahead up to a number of bytes and
        decoded step by step.

        Raises:
            BrokerError: A record was purged; the text names it.
            RunFailed: A record differs from the trained one.
        """
        begin, num_steps = 0, 1  # the first step shows how many bytes a step has
        while begin < len(steps):
            parts = [
                (step, self._own_samples(deal_recorded(step, num_ranks=self._ranks.topology.data)))
                for step in steps[begin : begin + num_steps]
            ]
            records = reader.read_at(
                self._topic, {item.position for _, (part, _) in parts for item in part}
            )
            begin += len(parts)
            num_bytes = sum(len(record.value) for record in records.values()) // len(parts)
            num_steps = min(max(1, MAX_BYTES_AT_ONCE // max(1, num_bytes)), MAX_STEPS_AT_ONCE)
            for step, (part, num_rounds) in parts:
                samples = self._decode_samples(records, part)
                yield self._build_batch(step, part, samples, num_rounds)

    def _own_samples(
        self, committed: Sequence[CommittedSample]
    ) -> tuple[list[CommittedSample], int]:
        """Return the samples that this rank must read, and the number of rounds. Relabelling needs
        whole prompt groups, of which other ranks may train a part.
        """
        mine = [item for item in committed if item.rank == self._ranks.at.data]
        if self._relabel is not None:
            groups = {item.prompt_group_id for item in mine}
            mine = [item for item in committed if item.prompt_group_id in groups]
        return mine, 1 + max((item.micro_batch for item in committed), default=-1)

    def _build_batch(
        self,
        step: TrainStepCommitted,
        part: Sequence[CommittedSample],
        samples: list[LocatedSample],
        num_rounds: int,
    ) -> RecordedBatch:
        if self._relabel is not None:
            samples = self._relabel(samples)
        mine = [
            (sample, item.micro_batch)
            for sample, item in zip(samples, part, strict=True)
            if item.rank == self._ranks.at.data
        ]
        return RecordedBatch(
            step, [sample for sample, _ in mine], [number for _, number in mine], num_rounds
        )

    def _decode_samples(
        self, records: MutableMapping[tuple[int, int], Record], part: Sequence[CommittedSample]
    ) -> list[LocatedSample]:
        """Take the records of a step, decode each once, and return its samples in trained order."""
        by_position: dict[tuple[int, int], dict[str, SampleReady]] = {}
        samples = []
        for item in part:
            if item.position not in by_position:
                record = records.pop(item.position)
                by_position[item.position] = self._decode_record(record, item.sample_id)
            decoded = by_position[item.position]
            if item.sample_id not in decoded:
                raise RunFailed(
                    f"{self._topic}[{item.position[0]}]@{item.position[1]} held sample "
                    f"{item.sample_id} when it was trained, and holds {', '.join(decoded)} now; "
                    "was the topic created again?"
                )
            samples.append(LocatedSample(decoded[item.sample_id], *item.position))
        return samples

    def _decode_record(self, record: Record, sample_id: str) -> dict[str, SampleReady]:
        """Return the samples of a record by their ids."""
        try:
            ready = check_ready(self._decode(record))
        except (CorruptRecord, SchemaError, ObjectError, PoisonSample) as error:
            raise RunFailed(
                f"{record.location} held sample {sample_id} when it was trained, and can't be read "
                f"now: {error}"
            ) from error
        return {sample.sample_id: sample for sample in ready}


def deal_recorded(step: TrainStepCommitted, *, num_ranks: int) -> list[CommittedSample]:
    """Return the samples of a committed step in trained order, each with the rank and the
    micro-batch in which so many data-parallel ranks train it: those recorded, if the step was
    trained by as many ranks.
    """
    ranks, numbers = (np.asarray(column).tolist() for column in (step.ranks, step.micro_batches))
    recorded = list(zip(ranks, numbers, strict=True))
    if max(ranks, default=0) + 1 == num_ranks:
        assigned = {recorded_at: recorded_at for recorded_at in recorded}
    else:
        assigned = {
            recorded_at: (index % num_ranks, index // num_ranks)
            for index, recorded_at in enumerate(dict.fromkeys(recorded))
        }
    return [
        CommittedSample(sample_id, position, *assigned[recorded_at])
        for sample_id, position, recorded_at in zip(
            step.sample_ids, step.positions, recorded, strict=True
        )
    ]
