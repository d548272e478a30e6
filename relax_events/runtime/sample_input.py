"""Reads `rollout.samples` for the loops of sample-processing roles: fetches, decodes and checks
samples, follows published versions, and commits offsets once the outputs are acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from relax_events.deadline import Deadline
from relax_events.errors import CorruptRecord, PoisonSample
from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.types import Event, PolicyVersionPublished, SampleRolledOut
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.records import Record
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.validation import check_samples
from relax_events.runtime.worker import Worker
from relax_events.staleness import find_skip_targets
from relax_events.topics.names import ROLLOUT_SAMPLES

IDLE_SECONDS = 0.5


class SampleInput:
    """The fetched records of a role's partitions of `rollout.samples`, oldest version first.

    The partition with the oldest version goes first, so that readers of the first outputs do not
    wait for the last. While the worker is paused, `fetch` polls and takes nothing.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        max_records: int,
        on_revoked: Callable[[list[TopicOffset], Deadline], None],
    ) -> None:
        """Join the consumer group.

        Args:
            worker: Of the role.
            max_records: Maximum number of fetched records in memory.
            on_revoked: Called with the partitions that go to another member, before they go.
        """
        self._worker, self._max_records, self._on_revoked = worker, max_records, on_revoked
        self._topic = worker.plan.topic(ROLLOUT_SAMPLES)
        self._published: list[PolicyVersionPublished] = []
        self.fetched: deque[Record] = deque()
        self._consumer = SubscribedConsumer(
            worker.connection,
            consumer_group=worker.plan.consumer_group(worker.role),
            topics=[self._topic],
            on_revoked=self._revoke,
        )
        worker.lifecycle.track_lag(self._consumer)

    def fetch(self, *, timeout_seconds: float) -> None:
        """Poll, which also keeps the group membership, and keep the records; take none while the
        worker is paused or the buffer is full.
        """
        room = self._max_records - len(self.fetched)
        if self._worker.control.is_paused or room <= 0:
            self._consumer.pause()
        else:
            self._consumer.resume()
        if records := self._consumer.fetch(max(room, 1), timeout_seconds=timeout_seconds):
            self.fetched = deque(oldest_version_first((*self.fetched, *records)))

    def decode(self, record: Record) -> list[SampleRolledOut]:
        """Decode and check the samples of a record. If one is invalid, there is none: the record
        becomes a dead letter, and its prompt group is ended.
        """
        events = self._worker.records.decode_samples(record)
        if not events:
            self._request_end(record, "record could not be decoded")
            return []
        try:
            samples = check_samples(events)
            self._worker.control.wait_until_published(samples[0].policy_version)
        except PoisonSample as error:
            self.reject(record, error)
            return []
        return samples

    def reject(self, record: Record, error: PoisonSample) -> None:
        """Write an unusable record to the dead letters, and request the end of its prompt group."""
        self._worker.records.dead_letter(record, error)
        self._request_end(record, str(error))

    def _request_end(self, record: Record, reason: str) -> None:
        """Ask the trainer to end the prompt group of an unusable record.

        The advantage role may have accepted the record, for example if an object was lost later.
        Then it would wait for this role's output forever, and so would the trainer.
        """
        # a record of an unknown producer belongs to no prompt group: its dead letter must do
        with suppress(CorruptRecord):
            self._worker.records.producer.send(
                self._worker.records.build_end_request(
                    record.key, Outcome.FAILED, f"{self._worker.role}: {reason}"
                )
            )

    def apply_version(self, event: Event) -> None:
        """Keep a published version for the next `skip_stale`; called from the control thread."""
        if isinstance(event, PolicyVersionPublished):
            self._published.append(event)

    def skip_stale(self) -> bool:
        """Seek past the records that the versions published since the last call made stale; return
        whether there were such versions.
        """
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
            for partition, offset in find_skip_targets(positions, starts).items():
                self._worker.metrics.count_expired(offset - positions[partition])
                self._consumer.seek(self._topic, partition, offset)
        return bool(published)

    def flush_and_commit(self, offsets: list[TopicOffset], *, wait: Deadline | None = None) -> None:
        """Commit inputs once all outputs sent so far are acknowledged."""
        failpoint(f"{self._worker.role}.before_flush")
        self._worker.records.producer.flush()
        failpoint(f"{self._worker.role}.before_commit")
        self._consumer.commit(offsets, wait=wait)
        failpoint(f"{self._worker.role}.after_commit")

    def commit(self, offsets: list[TopicOffset], *, wait: Deadline) -> None:
        """Commit inputs whose outputs are acknowledged."""
        self._consumer.commit(offsets, wait=wait)

    def close(self) -> None:
        """Leave the consumer group."""
        self._consumer.close()

    def _revoke(self, offsets: list[TopicOffset], deadline: Deadline) -> None:
        """Drop the records of revoked partitions: another member reads them again."""
        topic_partitions = {(offset.topic, offset.partition) for offset in offsets}
        self.fetched = deque(
            record
            for record in self.fetched
            if (record.topic, record.partition) not in topic_partitions
        )
        self._on_revoked(offsets, deadline)


def oldest_version_first(records: Iterable[Record]) -> list[Record]:
    """Order records by partition, the one with the oldest version first. The order within a
    partition is kept, so that offsets can be committed.
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
    """Return the offset after the last record of each partition."""
    last = {(record.topic, record.partition): record.offset + 1 for record in records}
    return [TopicOffset(topic, partition, offset) for (topic, partition), offset in last.items()]
