"""Runs a processor that handles many samples concurrently: each output is sent once it is ready, in
any order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from relax_events.deadline import Deadline
from relax_events.events.parts import TopicOffset
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.runtime.processors import choose_operation
from relax_events.runtime.sample_input import IDLE_SECONDS, SampleInput
from relax_events.runtime.worker import Worker
from relax_events.telemetry.traces import TracedWork
from relax_events.topics.names import ROLLOUT_SAMPLES

STEP_SECONDS = 0.25
DRAIN_COMMIT_SECONDS = 5.0
TopicPartition = tuple[str, int]
Position = tuple[int, int]
"""Offset of a sample's record, and its number among the record's samples."""
Key = tuple[str, int, Position]
"""Topic, partition and position of a sample."""
Done = tuple[Key, Sequence[ProducerRecord]]


class ConcurrentProcessor(Protocol):
    """Processes samples concurrently. Used by one thread; `poll` returns a submitted sample exactly
    once, unless it is cancelled.
    """

    @property
    def capacity(self) -> int:
        """Samples that can be submitted now."""
        ...

    @property
    def progress(self) -> int:
        """A count that grows while work makes progress."""
        ...

    def submit(self, key: Key, sample: SampleRolledOut) -> None:
        """Start to process a sample."""
        ...

    def poll(self, *, timeout_seconds: float) -> list[Done]:
        """Return finished samples, waiting for the first; at once when nothing is in flight."""
        ...

    def cancel(self, keys: Collection[Key]) -> None:
        """Cancel samples whose outputs are no longer wanted."""
        ...


class ConcurrentLoop:
    """The loop of a role that takes long for a sample, but can process many samples at once.

    The loop waits for records while nothing is in flight, else for the first finished sample; it
    takes new records while there is capacity. An input offset is committed once every sample before
    it is processed, so after a crash a successor processes the samples in flight again. Samples
    that leave the window are cancelled. A drain takes no new records and finishes the samples in
    flight, until its deadline.
    """

    def __init__(
        self, worker: Worker, processor: ConcurrentProcessor, *, max_records: int = 256
    ) -> None:
        self._worker, self._processor = worker, processor
        self._operation = choose_operation(worker)
        self._input = SampleInput(worker, max_records=max_records, on_revoked=self._release)
        self._held: dict[TopicPartition, dict[Position, tuple[int, TracedWork]]] = {}
        """Version and trace of each sample in flight, in the order of their positions."""
        self._waiting: deque[tuple[Key, SampleRolledOut]] = deque()
        """Samples of a taken record for which there is no capacity yet."""
        self._next_offsets: dict[TopicPartition, int] = {}
        """Offset after the last record that was taken."""
        self._committed: dict[TopicPartition, int] = {}

    def run(self) -> None:
        """Work until the drain starts, then finish the samples in flight."""
        worker = self._worker
        worker.control.follow(self._input.apply_version)
        while not worker.drain.requested:
            self._step(takes=not worker.control.is_paused)
        while self._num_held and not worker.drain.deadline_passed:
            self._step(takes=False)
        self._commit(wait=Deadline(DRAIN_COMMIT_SECONDS))
        self._input.close()

    @property
    def _num_held(self) -> int:
        return sum(map(len, self._held.values()))

    def _step(self, *, takes: bool) -> None:
        started, is_busy = time.monotonic(), self._num_held > 0
        self._input.fetch(
            timeout_seconds=0.0 if is_busy or (takes and self._input.fetched) else IDLE_SECONDS
        )
        while self._processor.capacity > 0:
            if self._waiting:
                self._processor.submit(*self._waiting.popleft())
            elif takes and self._input.fetched:
                self._take(self._input.fetched.popleft())
                self._worker.lifecycle.record_progress()
            else:
                break
        done = self._processor.poll(timeout_seconds=STEP_SECONDS) if self._num_held else []
        self._finish(done, started)
        self._skip_stale()
        self._worker.heartbeat.set_in_flight(self._num_held)
        self._worker.heartbeat.advance_to(self._processor.progress)
        self._worker.lifecycle.tick(working=is_busy)

    def _take(self, record: Record) -> None:
        partition_key = (record.topic, record.partition)
        self._next_offsets[partition_key] = record.offset + 1
        if self._worker.control.is_expired(record.policy_version):
            self._worker.metrics.count_expired(1)
            return
        for number, sample in enumerate(self._input.decode(record)):
            work = self._worker.records.traces.begin(
                self._operation, sample.prompt_group_id, topic=ROLLOUT_SAMPLES
            )
            position = (record.offset, number)
            self._held.setdefault(partition_key, {})[position] = (sample.policy_version, work)
            self._waiting.append(((*partition_key, position), sample))

    def _finish(self, done: Sequence[Done], started: float) -> None:
        """Send outputs, and commit up to the oldest record in flight."""
        num_done = 0
        for (topic, partition, position), records in done:
            if (held := self._held.get((topic, partition), {}).pop(position, None)) is None:
                continue  # the partition went to another member, which processes it again
            for record in records:
                self._worker.records.producer.send(record)
            held[1].end()
            num_done += 1
        self._commit()
        if num_done:
            self._worker.lifecycle.record_processed(num_done, started)

    def _commit(self, *, wait: Deadline | None = None) -> None:
        """Commit up to the oldest record in flight, where that has moved; everywhere when `wait` is
        given, since other commits may be lost.
        """
        offsets = {
            partition_key: next(iter(self._held.get(partition_key, ())), (next_offset, 0))[0]
            for partition_key, next_offset in self._next_offsets.items()
        }
        moved = {
            partition_key: offset
            for partition_key, offset in offsets.items()
            if wait is not None or self._committed.get(partition_key) != offset
        }
        if moved:
            self._input.flush_and_commit(
                [TopicOffset(*partition_key, offset) for partition_key, offset in moved.items()],
                wait=wait,
            )
            self._committed |= moved

    def _skip_stale(self) -> None:
        """Skip stale records, and cancel stale samples in flight."""
        if not self._input.skip_stale():
            return
        stale = self._keys(lambda partition_key, version: self._worker.control.is_expired(version))
        self._worker.metrics.count_expired(len(stale))
        self._cancel(stale, error="left the window")

    def _release(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        self._commit(wait=deadline)
        partitions = {(offset.topic, offset.partition) for offset in offsets}
        self._cancel(
            self._keys(lambda partition_key, version: partition_key in partitions),
            error="the partition went to another worker",
        )
        for partition_key in partitions:
            for kept in (self._held, self._next_offsets, self._committed):
                kept.pop(partition_key, None)

    def _keys(self, is_wanted: Callable[[TopicPartition, int], bool]) -> list[Key]:
        return [
            (*partition_key, position)
            for partition_key, held in self._held.items()
            for position, (version, _) in held.items()
            if is_wanted(partition_key, version)
        ]

    def _cancel(self, keys: Sequence[Key], *, error: str) -> None:
        cancelled = set(keys)
        self._processor.cancel(keys)
        self._waiting = deque(item for item in self._waiting if item[0] not in cancelled)
        for topic, partition, position in keys:
            self._held[topic, partition].pop(position)[1].end(error=error)
