"""Runs a processor over `rollout.samples`: consume, process, produce, commit, in that order.

An input offset is committed only after the outputs are acknowledged. After a crash in between, the
successor writes the same outputs again, under the same ids, and their readers keep the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

from relax_events.deadline import Deadline
from relax_events.errors import PoisonSample
from relax_events.events.parts import TopicOffset
from relax_events.events.tensors import dense
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.runtime.control_follower import Listener
from relax_events.runtime.join import PromptGroupJoin
from relax_events.runtime.sample_input import IDLE_SECONDS, SampleInput, next_offsets
from relax_events.runtime.worker import Worker
from relax_events.topics.names import ROLLOUT_SAMPLES

PART_SECONDS = 0.05
"""The time of a part whose size adapts: requests to the broker are few, and results come soon."""
TAKE_SECONDS = 10.0
"""Seconds of reading records from log and object store after which a part ends."""
MAX_PART_SAMPLES = 256
DecodedSample = tuple[Record, SampleRolledOut]


class Processor(Protocol):
    """Computes the output records of samples."""

    def __call__(self, samples: Sequence[SampleRolledOut], /) -> Sequence[ProducerRecord]:
        """Return the outputs of the samples.

        Raises:
            PoisonSample: One of the samples can't be processed; the processor is then called for
                the samples of each record alone.
        """


class SampleGatherer(Protocol):
    """Decides when a sample is processed, and which input offsets may be committed."""

    def add(self, record: Record, samples: Sequence[SampleRolledOut]) -> list[DecodedSample]:
        """Add the samples of a record; return the samples that can be processed now."""

    def fail(self, record: Record) -> None:
        """Handle a record without a usable sample."""

    def done_offsets(self, records: Sequence[Record]) -> list[TopicOffset]:
        """Return the committable offsets after a part that consists of these records."""

    def evict_older_than(self, policy_version: int) -> None:
        """Drop samples of versions that left the window."""

    def release(self, offsets: Sequence[TopicOffset]) -> list[TopicOffset]:
        """Drop the state of revoked partitions; return the offsets to commit before."""


class SingleSamples:
    """Passes every sample on at once."""

    def add(self, record: Record, samples: Sequence[SampleRolledOut]) -> list[DecodedSample]:
        """Return the samples themselves."""
        return [(record, sample) for sample in samples]

    def fail(self, record: Record) -> None:
        """Do nothing: no sample waits for another."""

    def done_offsets(self, records: Sequence[Record]) -> list[TopicOffset]:
        """Return the positions behind the records."""
        return next_offsets(records)

    def evict_older_than(self, policy_version: int) -> None:
        """Do nothing: no sample is held."""

    def release(self, offsets: Sequence[TopicOffset]) -> list[TopicOffset]:
        """Return nothing: every part is committed already."""
        return []


class WholePromptGroups:
    """Passes the samples of a prompt group on together, ordered by index, once all have arrived.

    An input offset is committed once no open prompt group needs its record, so a successor
    gathers the held samples again. A prompt group that is never completed, because
    its generation was aborted, is dropped when its version leaves the window.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._join = PromptGroupJoin(logprob_roles=frozenset(), needs_scores=False)

    def add(self, record: Record, samples: Sequence[SampleRolledOut]) -> list[DecodedSample]:
        """Add samples; return their prompt group when that is complete now."""
        if (group := self._join.add(record, samples)) is None:
            return []
        self._join.close(group)
        return [(record, member) for member in group.ordered_samples()]

    def fail(self, record: Record) -> None:
        """Drop the prompt group of an unusable sample."""
        if (group := self._join.fail(record, "one of its samples is unusable")) is not None:
            self._join.close(group)

    def done_offsets(self, records: Sequence[Record]) -> list[TopicOffset]:
        """Return the offsets below which no open prompt group needs a record."""
        for record in {(record.topic, record.partition): record for record in records}.values():
            if self._worker.control.is_expired(record.policy_version):
                self._join.skip(record)  # the join knows the others
        return self._join.pending_offsets()

    def evict_older_than(self, policy_version: int) -> None:
        """Drop open prompt groups of older versions."""
        for group in self._join.evict_older_than(policy_version):
            self._join.close(group)

    def release(self, offsets: Sequence[TopicOffset]) -> list[TopicOffset]:
        """Drop partitions; return the offsets below which no open prompt group needs a record."""
        pending = self._join.pending_offsets()
        for offset in offsets:
            self._join.drop_partition(offset.topic, offset.partition)
        return pending


class SampleLoop:
    """The loop of a role that processes samples in parts.

    Each iteration polls, takes one part of the fetched records, processes and commits it. So the
    time to a commit does not grow with the number of fetched records, a drain loses one part at
    most, and a rebalance waits for one part at most. The loop waits for records; the broker wakes
    it, or a timeout of half a second for the heartbeat. Records whose version left the window are
    skipped without being decoded, and a newly published version moves the consumer past the stale
    records in its slot.
    """

    def __init__(
        self,
        worker: Worker,
        processor: Processor,
        *,
        gatherer: SampleGatherer | None = None,
        max_records: int = 256,
        max_tokens: int | None = None,
        min_part_samples: int | None = None,
        listeners: Sequence[Listener] = (),
        after_part: Callable[[], None] = lambda: None,
        may_work: Callable[[bool], bool] = lambda _: True,
    ) -> None:
        """Join the consumer group.

        Args:
            worker: The role's worker.
            processor: Computes the outputs of a part.
            gatherer: Decides when samples are processed; by default each at once.
            max_records: Maximum number of fetched records in memory.
            max_tokens: A part ends with the sample that reaches this number of tokens.
            min_part_samples: Samples of the first part, and of parts that take longer than
                `PART_SECONDS`; faster ones grow until they take as long. By default a part has
                `MAX_PART_SAMPLES`.
            listeners: Receive control events.
            after_part: Called after every part, and every half second without one.
            may_work: Returns whether samples may be processed now, given whether there are any;
                called before every part, and every half second without one.
        """
        self._worker, self._processor, self._max_tokens = worker, processor, max_tokens
        self._gatherer = gatherer or SingleSamples()
        self._min_part_samples = self._part_samples = min_part_samples or MAX_PART_SAMPLES
        self._operation = choose_operation(worker)
        self._listeners, self._after_part, self._may_work = listeners, after_part, may_work
        self._input = SampleInput(worker, max_records=max_records, on_revoked=self._release)

    def run(self) -> None:
        """Work until the drain starts; then finish the current part and leave the consumer
        group.
        """
        worker, control = self._worker, self._worker.control
        control.follow(self._input.apply_version, *self._listeners)
        is_allowed = True
        while not worker.drain.requested:
            is_busy = bool(self._input.fetched) and not control.is_paused and is_allowed
            self._input.fetch(timeout_seconds=0.0 if is_busy else IDLE_SECONDS)
            has_work = bool(self._input.fetched) and not control.is_paused
            is_allowed = self._may_work(has_work)
            is_working = has_work and is_allowed
            if is_working:
                self._process_part()
            self._input.skip_stale()
            self._gatherer.evict_older_than(
                control.policy_version - worker.config.run.max_staleness
            )
            self._after_part()
            worker.lifecycle.tick(working=is_working)
        self._input.close()

    def _process_part(self) -> None:
        """Take a part, process it, commit it."""
        started, heartbeat = time.monotonic(), self._worker.heartbeat
        records, num_samples, ready = self._take_part(started)
        heartbeat.set_in_flight(len(ready))
        if ready:
            with self._worker.records.traces.trace_groups(
                self._operation,
                (sample.prompt_group_id for _, sample in ready),
                topic=ROLLOUT_SAMPLES,
            ):
                for output in self._outputs(ready):
                    self._worker.records.producer.send(output)
        self._input.flush_and_commit(self._gatherer.done_offsets(records))
        heartbeat.set_in_flight(0)
        self._worker.lifecycle.record_processed(num_samples, started)
        self._resize_parts(num_samples, time.monotonic() - started)

    def _resize_parts(self, num_samples: int, seconds: float) -> None:
        """Let the next part take `PART_SECONDS`, at the rate of this one."""
        fitting = int(num_samples * PART_SECONDS / max(seconds, 1e-6))
        self._part_samples = min(max(fitting, self._min_part_samples), MAX_PART_SAMPLES)

    def _take_part(self, started: float) -> tuple[list[Record], int, list[DecodedSample]]:
        """Take records until they bring a part's worth of samples; return them, the number of their
        samples, and the samples that can be processed now. A record without usable samples counts
        as one.
        """
        records: list[Record] = []
        ready: list[DecodedSample] = []
        num_samples = num_tokens = 0
        while (
            self._input.fetched
            and num_samples < self._part_samples
            and (self._max_tokens is None or num_tokens < self._max_tokens)
        ):
            record = self._input.fetched.popleft()
            records.append(record)
            samples: list[SampleRolledOut] = []
            if self._worker.control.is_expired(record.policy_version):
                self._worker.metrics.count_expired(1)
            elif not (samples := self._input.decode(record)):
                self._gatherer.fail(record)
            else:
                ready += self._gatherer.add(record, samples)
                num_tokens += sum(
                    len(dense(sample.tokens, what=f"sample {sample.sample_id}: tokens"))
                    for sample in samples
                )
            num_samples += max(len(samples), 1)
            self._worker.lifecycle.record_progress()  # large arrays are fetched here
            if time.monotonic() - started > TAKE_SECONDS:
                break
        return records, num_samples, ready

    def _outputs(self, samples: Sequence[DecodedSample]) -> Sequence[ProducerRecord]:
        """Process samples together; if one is poison, process the samples of each record alone, and
        write its record to the dead letters.
        """
        try:
            return self._processor([sample for _, sample in samples]) if samples else ()
        except PoisonSample as error:
            records = [list(members) for _, members in groupby(samples, key=lambda one: id(one[0]))]
            if len(records) > 1:
                return [output for members in records for output in self._outputs(members)]
            self._input.reject(samples[0][0], error)
            return ()

    def _release(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        if pending := self._gatherer.release(offsets):
            self._input.commit(pending, wait=deadline)


def choose_operation(worker: Worker) -> str:
    """Return the name of the role's operation in traces."""
    return "score" if worker.role in ("reward", "judge") else "evaluate"
