"""Reads the batches of committed steps back from the log, for recovery and for replays.

Each rank gets its own part of a step, in trained order. If the number of ranks differs from the
recorded one, shards assign samples to ranks; a prompt group is in one partition, so it is never
split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from relax_events.errors import CorruptRecord, ObjectError, PoisonSample, RunFailed, SchemaError
from relax_events.events.types import Event, SampleReady, TrainStepCommitted
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.runtime.validation import check_ready
from relax_events.runtime.worker import Worker
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.ranks import Ranks

MAX_STEPS_AT_ONCE = 16
MAX_BYTES_AT_ONCE = 1 << 30
"""Encoded records that are read ahead, unless a single step has more."""
Decode = Callable[[Record], Event]
Relabel = Callable[[list[LocatedSample]], list[LocatedSample]]


@dataclass(frozen=True, slots=True)
class CommittedSample:
    """A sample of a committed step: its (partition, offset), and the (rank, index) of its
    micro-batch.
    """

    sample_id: str
    position: tuple[int, int]
    micro_batch: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """What a rank trains of a committed step; `micro_batches` says for each sample in which one it
    was trained.
    """

    step: TrainStepCommitted
    samples: list[LocatedSample]
    micro_batches: list[tuple[int, int]]


class RecordedBatches:
    """See the module's docstring.

    Args:
        worker: Of the trainer; its plan says on which topic the samples lie.
        ranks: This process and its peers.
        decode: Turns a record into its event, arrays fetched; by default as the worker does.
        relabel: Replaces the recorded rewards and advantages; called with whole prompt groups.
    """

    def __init__(
        self,
        worker: Worker,
        ranks: Ranks,
        *,
        decode: Decode | None = None,
        relabel: Relabel | None = None,
    ) -> None:
        self._ranks, self._shards = ranks, worker.plan.partitions_per_version
        self._topic = worker.plan.topic("advantage.samples")
        self._decode: Decode = decode or (
            lambda record: worker.records.fetch_arrays(worker.records.codec.decode(record.value))
        )
        self._relabel: Relabel = relabel or (lambda samples: samples)

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
            parts = [(step, self._own_samples(step)) for step in steps[begin : begin + num_steps]]
            records = reader.read_at(
                self._topic, {item.position for _, part in parts for item in part}
            )
            begin += len(parts)
            num_bytes = sum(len(record.value) for record in records.values()) // len(parts)
            num_steps = min(max(1, MAX_BYTES_AT_ONCE // max(1, num_bytes)), MAX_STEPS_AT_ONCE)
            for step, part in parts:
                samples = [self._decode_sample(records.pop(item.position), item) for item in part]
                yield RecordedBatch(
                    step, self._relabel(samples), [item.micro_batch for item in part]
                )

    def _own_samples(self, step: TrainStepCommitted) -> list[CommittedSample]:
        ranks = np.asarray(step.ranks).tolist()
        same_ranks = max(ranks) + 1 == self._ranks.size
        columns = (
            np.asarray(column).tolist()
            for column in (step.partitions, step.offsets, step.micro_batches)
        )
        part = []
        for sample_id, rank, partition, offset, micro_batch in zip(
            step.sample_ids, ranks, *columns, strict=True
        ):
            owner = rank if same_ranks else partition % self._shards % self._ranks.size
            if owner == self._ranks.rank:
                part.append(CommittedSample(sample_id, (partition, offset), (rank, micro_batch)))
        return part

    def _decode_sample(self, record: Record, recorded: CommittedSample) -> LocatedSample:
        try:
            sample: SampleReady = check_ready(self._decode(record))
        except (CorruptRecord, SchemaError, ObjectError, PoisonSample) as error:
            raise RunFailed(
                f"{record.location} held sample {recorded.sample_id} when it was trained, and "
                f"can't be read now: {error}"
            ) from error
        if sample.sample_id != recorded.sample_id:
            raise RunFailed(
                f"{record.location} held sample {recorded.sample_id} when it was trained, and "
                f"holds {sample.sample_id} now; was the topic created again?"
            )
        return LocatedSample(sample, *recorded.position)
