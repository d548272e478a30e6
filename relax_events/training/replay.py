"""Recovery by replay: the recorded batches are read back from the log and trained again, in the recorded order.

No rollout is generated twice, and the other roles go on meanwhile. On the CPU the weights come out bit for bit as they
were published, which each step's recorded digest proves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

import structlog

from relax_events.broker.consumer import LogReader
from relax_events.errors import RunFailed
from relax_events.events.types import SampleReady, TrainStepCommitted
from relax_events.pipeline.validation import check_ready
from relax_events.pipeline.worker import Worker
from relax_events.training.protocol import TrainerBackend
from relax_events.training.ranks import Ranks
from relax_events.weights.artifacts import weights_digest

log = structlog.get_logger()
STEPS_AT_ONCE = 16


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
        log.info("train_steps.replayed", num_steps=len(steps), policy_version=self._backend.policy_version, identical=same, seconds=time.monotonic() - started)
        return same

    def _train(self, reader: LogReader, steps: Sequence[TrainStepCommitted]) -> None:
        shares = [self._share_of(step) for step in steps]
        records = reader.read_exactly(self._topic, {place for share in shares for place, _ in share})
        for step, share in zip(steps, shares, strict=True):
            if step.train_step != self._backend.policy_version:
                raise RunFailed(f"the log goes from version {self._backend.policy_version} to step {step.train_step}; the control log has a gap")
            for _, members in groupby(share, key=lambda item: item[1]):
                self._backend.accumulate([self._sample(records[place].value) for place, _ in members])
            self._backend.step()
            self._worker.tick(working=True)

    def _share_of(self, step: TrainStepCommitted) -> list[tuple[tuple[int, int], int]]:
        """Return (partition, offset) and micro-batch of the samples that this rank trains, in trained order."""
        num_ranks = int(step.ranks.max()) + 1
        rows = zip(step.partitions.tolist(), step.offsets.tolist(), step.ranks.tolist(), step.micro_batches.tolist(), strict=True)
        if num_ranks == self._ranks.size:
            return [((partition, offset), batch) for partition, offset, rank, batch in rows if rank == self._ranks.rank]
        shards = self._worker.plan.shards
        return [
            ((partition, offset), rank * 1_000_000 + batch)
            for partition, offset, rank, batch in rows
            if partition % shards % self._ranks.size == self._ranks.rank
        ]

    def _sample(self, value: bytes) -> SampleReady:
        event = self._worker.codec.decode(value)
        return check_ready(self._worker.fetched(event))
