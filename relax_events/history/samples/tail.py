"""Follows samples as they are generated and scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from relax_events.events.generations import TrajectoryKey, trajectory_of
from relax_events.events.types import PolicyVersionPublished, SampleRolledOut, SampleScored
from relax_events.history.run_log import DecodedRecord, RunLog, TopicPartition
from relax_events.history.samples.filter import SampleFilter
from relax_events.history.samples.reader import build_view
from relax_events.history.samples.view import SampleLine
from relax_events.kafka.records import Record

SCORE_SECONDS = 30.0
"""How long a sample waits for its score."""
MAX_WAITING = 10_000


class LiveSamples:
    """Joins samples with their scores as the records come, in any order between the topics.

    A sample is returned once it is scored, or unscored when its score is overdue. Memory is
    bounded: the oldest sample is returned first.
    """

    def __init__(
        self,
        wanted: SampleFilter,
        *,
        newest_version: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted, self._clock = wanted, clock
        self._newest_version = newest_version
        self._waiting: dict[TrajectoryKey, tuple[float, DecodedRecord[SampleRolledOut]]] = {}
        self._scores: dict[TrajectoryKey, SampleScored] = {}

    def add(
        self, found: DecodedRecord[SampleRolledOut | SampleScored | PolicyVersionPublished]
    ) -> SampleLine | None:
        """Add an event; return the sample that it completes, if it matches."""
        event = found.event
        if isinstance(event, PolicyVersionPublished):
            self._newest_version = max(self._newest_version, event.policy_version)
            return None
        key = trajectory_of(event)
        if isinstance(event, SampleScored):
            if key in self._waiting:
                return self._line(self._waiting.pop(key)[1], event)
            self._remember(key, event)
            return None
        sample = DecodedRecord(event, found.position, found.written_at)
        if key in self._scores:
            return self._line(sample, self._scores.pop(key))
        self._waiting[key] = (self._clock(), sample)
        return None

    def pop_overdue(self) -> Iterator[SampleLine]:
        """Yield the samples that have waited too long for their score."""
        while self._waiting:
            key, (since, found) = next(iter(self._waiting.items()))
            if self._clock() - since < SCORE_SECONDS and len(self._waiting) <= MAX_WAITING:
                return
            del self._waiting[key]
            if (line := self._line(found, None)) is not None:
                yield line

    def _remember(self, key: TrajectoryKey, score: SampleScored) -> None:
        """Keep a score whose sample has not come; without one it belongs to a sample before the
        start.
        """
        self._scores[key] = score
        if len(self._scores) > MAX_WAITING:
            del self._scores[next(iter(self._scores))]

    def _line(
        self, found: DecodedRecord[SampleRolledOut], score: SampleScored | None
    ) -> SampleLine | None:
        view = build_view(found, score, None)
        return view.line(self._newest_version) if self._wanted.matches(view) else None


def follow_samples(
    log: RunLog, wanted: SampleFilter, starts: dict[TopicPartition, int]
) -> Iterator[SampleLine]:
    """Yield matching samples as they come, forever.

    Args:
        log: The run's log.
        wanted: Which samples.
        starts: Start offsets, as `live_starts` gave them before older samples were read.
    """
    live = LiveSamples(wanted, newest_version=log.newest_version)
    for record in log.follow(starts):
        line = _take(log, live, record) if record is not None else None
        if line is not None:
            yield line
        yield from live.pop_overdue()


def live_starts(log: RunLog) -> dict[TopicPartition, int]:
    """Return the current end offsets of the followed topics."""
    every, one = range(log.plan.num_sample_partitions), range(1)
    spans = (
        log.full_ranges("rollout.samples", every)
        | log.full_ranges("reward.scores", every)
        | log.full_ranges("control.policy-versions", one)
    )
    return {topic_partition: stop for topic_partition, (_, stop) in spans.items()}


def _take(log: RunLog, live: LiveSamples, record: Record) -> SampleLine | None:
    event = log.decode(record)
    if not isinstance(event, SampleRolledOut | SampleScored | PolicyVersionPublished):
        return None
    return live.add(DecodedRecord(event, record.location, record.timestamp_ms))
