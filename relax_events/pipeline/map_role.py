"""A role that makes one output record of each input record: consume, process, produce, commit, in that order.

The input offset is committed only after the outputs are acknowledged. A crash in between gives the same outputs again,
under the same ids; whoever reads them keeps the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from relax_events.broker.consumer import GroupConsumer
from relax_events.broker.deadline import Deadline
from relax_events.broker.records import OutRecord, Record
from relax_events.errors import CorruptRecord, PoisonSample
from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.tensors import dense
from relax_events.events.types import Event, PolicyVersionPublished, SampleRolledOut
from relax_events.pipeline.control import Listener
from relax_events.pipeline.failpoints import failpoint
from relax_events.pipeline.validation import check_sample
from relax_events.pipeline.worker import Worker
from relax_events.policy import skip_targets

Handle = Callable[[Sequence[SampleRolledOut]], Sequence[OutRecord]]
"""Raises PoisonSample when one of the samples can't be handled; it is then called for each alone."""
Fit = tuple[Record, SampleRolledOut]
IDLE_SECONDS = 0.5


class MapRole:
    """The loop of a role over `rollout.samples`.

    Waits for records; is unblocked by the broker, or every half second to beat. Records whose version left the window
    are passed over without being decoded, and a newly published version moves the consumer past what is stale in its slot.
    With `max_tokens` a record batch is handled in parts, oldest version first, and each part's outputs go out at once: who waits for
    the first of them does not wait for the last. `between` is called after every record batch, and every half second without one.
    """

    def __init__(
        self,
        worker: Worker,
        handle: Handle,
        *,
        max_records: int = 256,
        max_tokens: int | None = None,
        listeners: Sequence[Listener] = (),
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker, self._handle, self._max_records, self._max_tokens = worker, handle, max_records, max_tokens
        self._topic = worker.plan.topic("rollout.samples")
        self._operation = "score" if worker.role in ("reward", "judge") else "evaluate"
        self._published: list[PolicyVersionPublished] = []
        self._listeners, self._between = listeners, between
        self._consumer = GroupConsumer(
            worker.connection, consumer_group=worker.plan.consumer_group(worker.role), topics=[self._topic], on_revoked=self._give_back
        )
        worker.reads(self._consumer)

    def run(self) -> None:
        """Work until the drain starts; then finish the record batch at hand and leave the group."""
        worker = self._worker
        worker.follow(self._note_version, *self._listeners)
        while not worker.drain.requested:
            records = [] if worker.paused else self._consumer.fetch(self._max_records, timeout_seconds=IDLE_SECONDS)
            if records:
                self._process(records)
            elif worker.paused:
                worker.drain.wait(IDLE_SECONDS)
            self._take_versions()
            self._between()
            worker.tick(working=bool(records))
        self._consumer.close()

    def _process(self, records: list[Record]) -> None:
        started = time.monotonic()
        live = [record for record in records if not self._worker.is_expired(record.policy_version)]
        self._worker.metrics.expired(len(records) - len(live))
        ready = self._ready([(record, sample) for record in live if (sample := self._sample(record)) is not None])
        self._worker.beats.num_in_flight = len(ready)
        for part in parts_of(ready, max_tokens=self._max_tokens):
            with self._worker.traces.each(self._operation, (sample.prompt_group_id for _, sample in part), topic="rollout.samples"):
                for out in self._outputs(part):
                    self._worker.producer.send(out)
        self._commit_when_safe(self._done_offsets(records))
        self._worker.beats.num_in_flight = 0
        self._worker.finished(len(records), started)

    def _commit_when_safe(self, offsets: list[TopicOffset], *, wait: Deadline | None = None) -> None:
        """Commit inputs once all that was sent is acknowledged."""
        failpoint(f"{self._worker.role}.before_flush")
        self._worker.producer.flush()
        failpoint(f"{self._worker.role}.before_commit")
        self._consumer.commit(offsets, wait=wait)
        failpoint(f"{self._worker.role}.after_commit")

    def _ready(self, fit: list[Fit]) -> list[Fit]:
        """Return the samples that can be handled now: all of them."""
        return fit

    def _done_offsets(self, records: list[Record]) -> list[TopicOffset]:
        """Return up to where the inputs have been used up, after a record batch."""
        return next_offsets(records)

    def _give_back(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        """Let go of partitions; nothing is held between record batches."""

    def _outputs(self, fit: Sequence[tuple[Record, SampleRolledOut]]) -> Sequence[OutRecord]:
        """Handle the samples together; when one of them turns out to be poison, each for itself, and that one goes to the dead letters."""
        try:
            return self._handle([sample for _, sample in fit]) if fit else ()
        except PoisonSample as error:
            if len(fit) > 1:
                return [out for one in fit for out in self._outputs([one])]
            self._worker.dead_letter(fit[0][0], error)
            self._ask_to_end(fit[0][0], str(error))
            return ()

    def _sample(self, record: Record) -> SampleRolledOut | None:
        """Decode and check; what is unfit goes to the dead letters, and its prompt group is over."""
        event = self._worker.decode(record)
        if event is None:
            self._ask_to_end(record, "record could not be decoded")
            return None
        try:
            sample = check_sample(event)
            self._worker.await_published(sample.policy_version)
        except PoisonSample as error:
            self._worker.dead_letter(record, error)
            self._ask_to_end(record, str(error))
            return None
        return sample

    def _ask_to_end(self, record: Record, reason: str) -> None:
        """Ask the trainer to end the prompt group of a record that we can't use.

        What is unusable to us may have been fit for the advantage role, as when an object got lost in between: it would wait for our output
        for ever, and the trainer with it.
        """
        with suppress(CorruptRecord):  # a stranger's record belongs to no prompt group: its dead letter is all that can be done
            self._worker.producer.send(self._worker.tombstone(record.key, Outcome.FAILED, f"{self._worker.role}: {reason}"))

    def _note_version(self, event: Event) -> None:
        if isinstance(event, PolicyVersionPublished):
            self._published.append(event)

    def _take_versions(self) -> None:
        """Move past what the versions published since the last time have made stale."""
        published, self._published = self._published, []
        for event in published:
            starts = [(offset.partition, offset.offset) for offset in event.start_offsets if offset.topic == self._topic]
            positions = {partition: position for (_, partition), position in self._consumer.positions.items()}
            for partition, offset in skip_targets(positions, starts).items():
                self._worker.metrics.expired(offset - positions[partition])
                self._consumer.seek(self._topic, partition, offset)


def parts_of(fit: Sequence[Fit], *, max_tokens: int | None) -> Iterator[list[Fit]]:
    """Cut samples, oldest version first, into parts of at most so many tokens; a longer sample is a part by itself."""
    if max_tokens is None:
        yield list(fit)
        return
    part: list[Fit] = []
    num_tokens = 0
    for one in sorted(fit, key=lambda one: one[1].policy_version):
        length = len(dense(one[1].tokens, what=f"sample {one[1].sample_id}: tokens"))
        if part and num_tokens + length > max_tokens:
            yield part
            part, num_tokens = [], 0
        part.append(one)
        num_tokens += length
    yield part


def next_offsets(records: Sequence[Record]) -> list[TopicOffset]:
    """Return the position behind the last record of each partition."""
    last = {(record.topic, record.partition): record.offset + 1 for record in records}
    return [TopicOffset(topic, partition, offset) for (topic, partition), offset in last.items()]
