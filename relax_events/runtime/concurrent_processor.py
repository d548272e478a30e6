"""A map role that works on many samples side by side: each is answered as soon as it is done,
whichever came first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from relax_events.deadline import Deadline
from relax_events.events.parts import TopicOffset
from relax_events.events.types import SampleRolledOut
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.runtime.processors import IDLE_SECONDS, MapRole
from relax_events.runtime.worker import Worker
from relax_events.telemetry.traces import TracedWork

STEP_SECONDS = 0.25
DRAIN_COMMIT_SECONDS = 5.0
Place = tuple[str, int]
Key = tuple[str, int, int]
"""Topic, partition and offset of a sample's record."""
Done = tuple[Key, Sequence[ProducerRecord]]


class Flow(Protocol):
    """What works on samples. Used by one thread; a sample that was begun comes back exactly once,
    by `poll`, unless it is dropped.
    """

    @property
    def room(self) -> int:
        """Samples that can be begun now."""
        ...

    @property
    def progress(self) -> int:
        """A count that grows while work goes on."""
        ...

    def begin(self, key: Key, sample: SampleRolledOut) -> None:
        """Begin work on a sample."""
        ...

    def poll(self, *, timeout_seconds: float) -> list[Done]:
        """Give what is done, waiting for the first; at once when nothing is at work."""
        ...

    def drop(self, keys: Collection[Key]) -> None:
        """Give up work on samples that nobody waits for."""
        ...


class FlowMapRole(MapRole):
    """The loop of a map role whose work on a sample takes long, and costs little more beside that
    on others.

    Waits for records while nothing is at work, else for the first sample that is done; takes new
    ones as there is room. An input offset is committed once every record before it is answered, so
    a successor does what we held. What leaves the window is given up. A drain takes nothing new and
    finishes what is at work, until its deadline.
    """

    def __init__(self, worker: Worker, flow: Flow, *, max_records: int = 256) -> None:
        super().__init__(worker, lambda _: (), max_records=max_records)
        self._flow = flow
        self._held: dict[Place, dict[int, tuple[int, TracedWork]]] = {}
        """Version and trace of each sample at work, in the order of their offsets."""
        self._behind: dict[Place, int] = {}
        """Behind the last record that was taken."""
        self._committed: dict[Place, int] = {}

    def run(self) -> None:
        """Work until the drain starts, and finish what is at work."""
        worker = self._worker
        worker.control.follow(self._note_version)
        while not worker.drain.requested:
            self._turn(takes=not worker.control.is_paused)
        while self._num_held and not worker.drain.deadline_passed:
            self._turn(takes=False)
        self._commit(wait=Deadline(DRAIN_COMMIT_SECONDS))
        self._consumer.close()

    @property
    def _num_held(self) -> int:
        return sum(map(len, self._held.values()))

    def _turn(self, *, takes: bool) -> None:
        started, is_busy = time.monotonic(), self._num_held > 0
        self._fetch(timeout_seconds=0.0 if is_busy or (takes and self._fetched) else IDLE_SECONDS)
        while takes and self._fetched and self._flow.room > 0:
            self._take(self._fetched.popleft())
            self._worker.lifecycle.record_progress()
        done = self._flow.poll(timeout_seconds=STEP_SECONDS) if self._num_held else []
        self._finish(done, started)
        self._take_versions()
        self._worker.heartbeat.set_in_flight(self._num_held)
        self._worker.heartbeat.advance_to(self._flow.progress)
        self._worker.lifecycle.tick(working=is_busy)

    def _take(self, record: Record) -> None:
        place = (record.topic, record.partition)
        self._behind[place] = record.offset + 1
        if self._worker.control.is_expired(record.policy_version):
            self._worker.metrics.expired(1)
        elif (sample := self._sample(record)) is not None:
            work = self._worker.records.traces.begin(
                self._operation, sample.prompt_group_id, topic="rollout.samples"
            )
            self._held.setdefault(place, {})[record.offset] = (sample.policy_version, work)
            self._flow.begin((*place, record.offset), sample)

    def _finish(self, done: Sequence[Done], started: float) -> None:
        """Send answers, and commit as far as all is answered."""
        num_done = 0
        for (topic, partition, offset), records in done:
            if (held := self._held.get((topic, partition), {}).pop(offset, None)) is None:
                continue  # the partition went to another member, who does it again
            for record in records:
                self._worker.records.producer.send(record)
            held[1].end()
            num_done += 1
        self._commit()
        if num_done:
            self._worker.lifecycle.record_processed(num_done, started)

    def _commit(self, *, wait: Deadline | None = None) -> None:
        """Commit up to the oldest record that is at work, where that has moved; everywhere when it
        is waited for, since others may be lost.
        """
        marks = {
            place: next(iter(self._held.get(place, ())), behind)
            for place, behind in self._behind.items()
        }
        moved = {
            place: mark
            for place, mark in marks.items()
            if wait is not None or self._committed.get(place) != mark
        }
        if moved:
            self._commit_when_safe(
                [TopicOffset(*place, mark) for place, mark in moved.items()], wait=wait
            )
            self._committed |= moved

    def _take_versions(self) -> None:
        """Move past what is stale, and give up what became stale at work."""
        if not self._published:
            return
        super()._take_versions()
        stale = self._keys(lambda place, version: self._worker.control.is_expired(version))
        self._worker.metrics.expired(len(stale))
        self._let_go(stale, error="left the window")

    def _give_back(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        self._commit(wait=deadline)
        places = {(offset.topic, offset.partition) for offset in offsets}
        self._let_go(
            self._keys(lambda place, version: place in places),
            error="the partition went to another worker",
        )
        for place in places:
            for kept in (self._held, self._behind, self._committed):
                kept.pop(place, None)

    def _keys(self, is_meant: Callable[[Place, int], bool]) -> list[Key]:
        return [
            (*place, offset)
            for place, held in self._held.items()
            for offset, (version, _) in held.items()
            if is_meant(place, version)
        ]

    def _let_go(self, keys: Sequence[Key], *, error: str) -> None:
        self._flow.drop(keys)
        for topic, partition, offset in keys:
            self._held[topic, partition].pop(offset)[1].end(error=error)
