"""Recovery by replay: the recorded batches are read back from the log and trained again, in the recorded order.

No rollout is generated twice, and the other roles go on meanwhile. On the CPU the weights come out bit for bit as they
were published, which each step's recorded digest proves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import structlog

from relax_events.broker.consumer import LogReader
from relax_events.broker.records import Record
from relax_events.errors import CorruptRecord, ObjectError, PoisonSample, RunFailed, SchemaError
from relax_events.events.types import SampleReady, TrainStepCommitted
from relax_events.pipeline.validation import check_ready
from relax_events.pipeline.worker import Worker
from relax_events.training.protocol import TrainerBackend
from relax_events.training.ranks import Ranks
from relax_events.weights.artifacts import weights_digest

log = structlog.get_logger()
STEPS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """A sample of a committed step: its (partition, offset), and the (rank, index) of its micro-batch."""

    sample_id: str
    place: tuple[int, int]
    micro_batch: tuple[int, int]


class Replay:
    """Trains committed steps again. Collective: every rank replays its own share of each step."""

    def __init__(self, worker: Worker, backend: TrainerBackend, ranks: Ranks) -> None:
        self._worker, self._backend, self._ranks = worker, backend, ranks
        self._topic = worker.plan.topic("advantage.samples")

    def run(self, steps: Sequence[TrainStepCommitted]) -> bool:
        """Train the steps again; return whether the resulting weights are those that the last step recorded.

        Raises:
            RunFailed: The steps don't follow the backend's version, or a recorded record is not what was trained.
        """
        if not steps:
            return True
        started = time.monotonic()
        reader = LogReader(self._worker.connection)
        try:
            for start in range(0, len(steps), STEPS_AT_ONCE):
                self._train(reader, steps[start : start + STEPS_AT_ONCE])
        finally:
            reader.close()
        same = weights_digest(self._backend.weights()) == steps[-1].weights_digest
        log.info(
            "train_steps.replayed",
            num_steps=len(steps),
            policy_version=self._backend.policy_version,
            identical=same,
            seconds=time.monotonic() - started,
        )
        return same

    def _train(self, reader: LogReader, steps: Sequence[TrainStepCommitted]) -> None:
        shares = [self._share_of(step) for step in steps]
        records = reader.read_exactly(self._topic, {item.place for share in shares for item in share})
        for step, share in zip(steps, shares, strict=True):
            if step.train_step != self._backend.policy_version:
                raise RunFailed(f"the log goes from version {self._backend.policy_version} to step {step.train_step}; the control log has a gap")
            for _, members in groupby(share, key=lambda item: item.micro_batch):
                self._backend.accumulate([self._sample(records[item.place], item) for item in members])
            self._backend.step()
            self._worker.tick(working=True)

    def _share_of(self, step: TrainStepCommitted) -> list[RecordedSample]:
        """Return the samples that this rank trains, in trained order. With another number of ranks, shards decide whose they are."""
        shards = self._worker.plan.shards
        ranks = np.asarray(step.ranks).tolist()
        same_ranks = max(ranks) + 1 == self._ranks.size
        columns = (np.asarray(column).tolist() for column in (step.partitions, step.offsets, step.micro_batches))
        rows = zip(step.sample_ids, ranks, *columns, strict=True)
        share = []
        for sample_id, rank, partition, offset, micro_batch in rows:
            owner = rank if same_ranks else partition % shards % self._ranks.size
            if owner == self._ranks.rank:
                share.append(RecordedSample(sample_id, (partition, offset), (rank, micro_batch)))
        return share

    def _sample(self, record: Record, recorded: RecordedSample) -> SampleReady:
        try:
            sample = check_ready(self._worker.fetched(self._worker.codec.decode(record.value)))
        except (CorruptRecord, SchemaError, ObjectError, PoisonSample) as error:
            raise RunFailed(f"{record.place} held sample {recorded.sample_id} when it was trained, and can't be read now: {error}") from error
        if sample.sample_id != recorded.sample_id:
            raise RunFailed(
                f"{record.place} held sample {recorded.sample_id} when it was trained, and holds {sample.sample_id} now; was the topic made anew?"
            )
        return sample
