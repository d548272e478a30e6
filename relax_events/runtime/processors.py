"""A role that makes one output record of each input record: consume, process, produce, commit, in
that order.

The input offset is committed only after the outputs are acknowledged. A crash in between gives the
same outputs again, under the same ids; whoever reads them keeps the first.

A map role whose handler gets whole prompt groups: it holds samples until the last one of theirs has
arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from relax_events.deadline import Deadline
from relax_events.errors import CorruptRecord, PoisonSample
from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.tensors import dense
from relax_events.events.types import Event, PolicyVersionPublished, SampleRolledOut
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.runtime.control_follower import Listener
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.join import GroupJoin
from relax_events.runtime.validation import check_sample
from relax_events.runtime.worker import Worker
from relax_events.staleness import skip_targets

Handle = Callable[[Sequence[SampleRolledOut]], Sequence[ProducerRecord]]
"""Raises PoisonSample when one of the samples can't be handled; it is then called for each
alone."""
Fit = tuple[Record, SampleRolledOut]
IDLE_SECONDS = 0.5
TAKING_SECONDS = 10.0
"""A part ends when taking its records from log and object store has lasted so long."""


class MapRole:
    """The loop of a role over `rollout.samples`.

    Each turn polls, takes one part of what was fetched, handles it, and commits it: so the time to
    a commit does not grow with what was fetched, a drain loses one part at most, and a rebalance
    waits for one part at most. The partition with the oldest version goes first: who waits for the
    first outputs does not wait for the last. Waits for records; is unblocked by the broker, or
    every half second to beat. While the worker is paused it polls and takes nothing. Records whose
    version left the window are passed over without being decoded, and a newly published version
    moves the consumer past what is stale in its slot. `between` is called after every part, and
    every half second without one.
    """

    def __init__(
        self,
        worker: Worker,
        handle: Handle,
        *,
        max_records: int = 256,
        max_tokens: int | None = None,
        max_part_records: int | None = None,
        listeners: Sequence[Listener] = (),
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Join the consumer group.

        Args:
            worker: Of the role.
            handle: Makes the outputs of a part.
            max_records: How many records are held that no part has taken yet.
            max_tokens: A part ends with the sample that brings it to so many tokens.
            max_part_records: How many records a part takes at most; all that are held by default.
            listeners: Are told of control events.
            between: See above.
        """
        self._worker, self._handle, self._max_records, self._max_tokens = (
            worker,
            handle,
            max_records,
            max_tokens,
        )
        self._max_part_records = max_part_records or max_records
        self._topic = worker.plan.topic("rollout.samples")
        self._operation = "score" if worker.role in ("reward", "judge") else "evaluate"
        self._published: list[PolicyVersionPublished] = []
        self._listeners, self._between = listeners, between
        self._fetched: deque[Record] = deque()
        self._consumer = SubscribedConsumer(
            worker.connection,
            consumer_group=worker.plan.consumer_group(worker.role),
            topics=[self._topic],
            on_revoked=self._revoked,
        )
        worker.lifecycle.track_lag(self._consumer)

    def run(self) -> None:
        """Work until the drain starts; then finish the part at hand and leave the group."""
        worker = self._worker
        worker.control.follow(self._note_version, *self._listeners)
        while not worker.drain.requested:
            is_busy = bool(self._fetched) and not worker.control.is_paused
            self._fetch(timeout_seconds=0.0 if is_busy else IDLE_SECONDS)
            is_working = bool(self._fetched) and not worker.control.is_paused
            if is_working:
                self._process()
            self._take_versions()
            self._between()
            worker.lifecycle.tick(working=is_working)
        self._consumer.close()

    def _fetch(self, *, timeout_seconds: float) -> None:
        """Poll, which keeps the membership whatever else happens, and hold what comes: nothing
        while the worker is paused, or enough is held.
        """
        room = self._max_records - len(self._fetched)
        if self._worker.control.is_paused or room <= 0:
            self._consumer.pause()
        else:
            self._consumer.resume()
        if records := self._consumer.fetch(max(room, 1), timeout_seconds=timeout_seconds):
            self._fetched = deque(oldest_version_first((*self._fetched, *records)))

    def _process(self) -> None:
        """Take a part, handle it, commit it."""
        started, beats = time.monotonic(), self._worker.heartbeat
        taken, ready = self._take_part(started)
        beats.num_in_flight = len(ready)
        if ready:
            with self._worker.records.traces.trace_groups(
                self._operation,
                (sample.prompt_group_id for _, sample in ready),
                topic="rollout.samples",
            ):
                for out in self._outputs(ready):
                    self._worker.records.producer.send(out)
        self._commit_when_safe(self._done_offsets(taken))
        beats.num_in_flight = 0
        self._worker.lifecycle.record_processed(len(taken), started)

    def _take_part(self, started: float) -> tuple[list[Record], list[Fit]]:
        """Take records until they bring a part's worth of samples; return them, and the samples
        that can be handled now.
        """
        taken: list[Record] = []
        ready: list[Fit] = []
        num_tokens = 0
        while (
            self._fetched
            and len(taken) < self._max_part_records
            and (self._max_tokens is None or num_tokens < self._max_tokens)
        ):
            record = self._fetched.popleft()
            taken.append(record)
            if self._worker.control.is_expired(record.policy_version):
                self._worker.metrics.expired(1)
            elif (sample := self._sample(record)) is not None:
                ready += self._ready([(record, sample)])
                num_tokens += len(dense(sample.tokens, what=f"sample {sample.sample_id}: tokens"))
            self._worker.lifecycle.record_progress()  # large arrays are fetched here
            if time.monotonic() - started > TAKING_SECONDS:
                break
        return taken, ready

    def _commit_when_safe(
        self, offsets: list[TopicOffset], *, wait: Deadline | None = None
    ) -> None:
        """Commit inputs once all that was sent is acknowledged."""
        failpoint(f"{self._worker.role}.before_flush")
        self._worker.records.producer.flush()
        failpoint(f"{self._worker.role}.before_commit")
        self._consumer.commit(offsets, wait=wait)
        failpoint(f"{self._worker.role}.after_commit")

    def _ready(self, fit: list[Fit]) -> list[Fit]:
        """Return the samples that can be handled now: all of them."""
        return fit

    def _done_offsets(self, records: list[Record]) -> list[TopicOffset]:
        """Return up to where the inputs have been used up, after a part."""
        return next_offsets(records)

    def _revoked(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        """Let go of partitions: another member will read what no part has taken."""
        places = {(offset.topic, offset.partition) for offset in offsets}
        self._fetched = deque(
            record for record in self._fetched if (record.topic, record.partition) not in places
        )
        self._give_back(offsets, deadline)

    def _give_back(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        """Let go of what is held of partitions between parts: nothing."""

    def _outputs(self, fit: Sequence[tuple[Record, SampleRolledOut]]) -> Sequence[ProducerRecord]:
        """Handle the samples together; when one of them turns out to be poison, each for itself,
        and that one goes to the dead letters.
        """
        try:
            return self._handle([sample for _, sample in fit]) if fit else ()
        except PoisonSample as error:
            if len(fit) > 1:
                return [out for one in fit for out in self._outputs([one])]
            self._worker.records.dead_letter(fit[0][0], error)
            self._ask_to_end(fit[0][0], str(error))
            return ()

    def _sample(self, record: Record) -> SampleRolledOut | None:
        """Decode and check; what is unfit goes to the dead letters, and its prompt group is
        over.
        """
        event = self._worker.records.decode(record)
        if event is None:
            self._ask_to_end(record, "record could not be decoded")
            return None
        try:
            sample = check_sample(event)
            self._worker.control.wait_until_published(sample.policy_version)
        except PoisonSample as error:
            self._worker.records.dead_letter(record, error)
            self._ask_to_end(record, str(error))
            return None
        return sample

    def _ask_to_end(self, record: Record, reason: str) -> None:
        """Ask the trainer to end the prompt group of a record that we can't use.

        What is unusable to us may have been fit for the advantage role, as when an object got lost
        in between: it would wait for our output for ever, and the trainer with it.
        """
        with suppress(
            CorruptRecord
        ):  # a stranger's record belongs to no prompt group: its dead letter is all that can be done
            self._worker.records.producer.send(
                self._worker.records.build_end_request(record.key, Outcome.FAILED, f"{self._worker.role}: {reason}")
            )

    def _note_version(self, event: Event) -> None:
        if isinstance(event, PolicyVersionPublished):
            self._published.append(event)

    def _take_versions(self) -> None:
        """Move past what the versions published since the last time have made stale."""
        published, self._published = self._published, []
        for event in published:
            starts = [
                (offset.partition, offset.offset)
                for offset in event.start_offsets
                if offset.topic == self._topic
            ]
            positions = {
                partition: position for (_, partition), position in self._consumer.positions.items()
            }
            for partition, offset in skip_targets(positions, starts).items():
                self._worker.metrics.expired(offset - positions[partition])
                self._consumer.seek(self._topic, partition, offset)


def oldest_version_first(records: Iterable[Record]) -> list[Record]:
    """Order records by partition, that with the oldest version first: within a partition they stay
    as they were, so that offsets can be committed.
    """
    by_partition: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        by_partition.setdefault((record.topic, record.partition), []).append(record)
    ordered = sorted(
        by_partition.values(),
        key=lambda members: -1 if members[0].policy_version is None else members[0].policy_version,
    )
    return [record for members in ordered for record in members]


def next_offsets(records: Sequence[Record]) -> list[TopicOffset]:
    """Return the position behind the last record of each partition."""
    last = {(record.topic, record.partition): record.offset + 1 for record in records}
    return [TopicOffset(topic, partition, offset) for (topic, partition), offset in last.items()]


class GroupMapRole(MapRole):
    """The loop of a map role, with samples handed over by prompt group, in the order of their
    index, side by side.

    An input offset is committed once no open prompt group needs its record, so a successor gathers
    again what we held. A prompt group that is never completed, since its generation was cut short,
    is let go when its version leaves the window.
    """

    def __init__(
        self,
        worker: Worker,
        handle: Handle,
        *,
        max_records: int = 256,
        max_part_records: int | None = None,
    ) -> None:
        self._join = GroupJoin(evaluators=frozenset(), needs_scores=False)
        super().__init__(worker, handle, max_records=max_records, max_part_records=max_part_records)

    def _sample(self, record: Record) -> SampleRolledOut | None:
        sample = super()._sample(record)
        if (
            sample is None
            and (group := self._join.poison(record, "a sample of it is unusable")) is not None
        ):
            self._join.close(group)
        return sample

    def _ready(self, fit: list[Fit]) -> list[Fit]:
        ready: list[Fit] = []
        for record, sample in fit:
            if (group := self._join.add(record, sample)) is not None:
                self._join.close(group)
                ready += [(record, member) for member in group.ordered_samples()]
        return ready

    def _done_offsets(self, records: list[Record]) -> list[TopicOffset]:
        for record in {(record.topic, record.partition): record for record in records}.values():
            if self._worker.control.is_expired(record.policy_version):
                self._join.pass_over(record)  # the join knows the others
        return self._join.low_watermarks()

    def _take_versions(self) -> None:
        super()._take_versions()
        for group in self._join.expired(
            self._worker.control.policy_version - self._worker.config.run.max_staleness
        ):
            self._join.close(group)

    def _give_back(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        self._consumer.commit(self._join.low_watermarks(), wait=deadline)
        for offset in offsets:
            self._join.drop_partition(offset.topic, offset.partition)
