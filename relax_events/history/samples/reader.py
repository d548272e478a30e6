"""Reads samples with their scores and outcomes from a run's log: finished ones by policy version or
position, and live ones as they are generated and scored.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from relax_events.events.generations import TrajectoryKey, get_trajectory_key
from relax_events.events.types import (
    PolicyVersionPublished,
    PromptGroupEnded,
    RunCommanded,
    SampleEvaluated,
    SampleReady,
    SampleRolledOut,
    SampleScored,
)
from relax_events.history.run_log import DecodedRecord, RunLog, TopicPartition
from relax_events.history.samples.filter import SampleFilter, VersionRange
from relax_events.history.samples.view import SampleLine, SampleView
from relax_events.kafka.records import Record
from relax_events.projections.base import RunPhase
from relax_events.topics import compute_shard
from relax_events.topics.names import COMMANDS, POLICY_VERSIONS, REWARD_SCORES, ROLLOUT_SAMPLES

VERSIONS_AT_ONCE = 32
"""Scores of so many versions are held at a time; reading a span costs some 10 ms, however short it
is."""

OfSample = TypeVar("OfSample", SampleRolledOut, SampleScored, SampleEvaluated, SampleReady)
Scores = dict[TrajectoryKey, SampleScored]


def read_samples(log: RunLog, selection: SampleFilter) -> Iterator[SampleView]:
    """Yield the matching samples, by blocks of versions, within a block by partition and offset;
    stored arrays stay in the object store.

    A sample that was written again in the same generation is yielded once; of several scores the
    first counts, as in training. One sample is held at a time.
    """
    extent = selection.version_range(log.plan, log.outcomes, newest_version=log.newest_version)
    for versions in version_blocks(extent.versions):
        yield from _read_block(log, selection, VersionRange(versions, extent.shard))


def read_last_lines(log: RunLog, selection: SampleFilter, *, count: int) -> list[SampleLine]:
    """Return the newest matching samples, oldest first; read backwards from the newest version only
    as far as necessary.
    """
    extent = selection.version_range(log.plan, log.outcomes, newest_version=log.newest_version)
    lines: list[SampleLine] = []
    for versions in version_blocks_backwards(extent.versions):
        block = (
            view.line(log.newest_version)
            for view in _read_block(log, selection, VersionRange(versions, extent.shard))
        )
        lines = heapq.nlargest(count, chain(block, lines), key=by_time)
        if len(lines) >= count:
            break
    return lines[::-1]


def read_last_samples(log: RunLog, selection: SampleFilter, *, count: int) -> Iterator[SampleView]:
    """Yield the newest matching samples, in the order of `read_samples`."""
    lines = read_last_lines(log, selection, count=count)
    wanted_samples = {(line.position, line.sample_id) for line in lines}
    oldest = min((line.policy_version for line in lines), default=0)
    newer = replace(selection, versions=(max(selection.versions[0], oldest), selection.versions[1]))
    return (
        view
        for view in read_samples(log, newer)
        if (view.position, view.sample.sample_id) in wanted_samples
    )


def read_lines(log: RunLog, selection: SampleFilter) -> Iterator[SampleLine]:
    """Yield all matching samples, those of a block of versions sorted by time."""
    extent = selection.version_range(log.plan, log.outcomes, newest_version=log.newest_version)
    for versions in version_blocks(extent.versions):
        lines = (
            view.line(log.newest_version)
            for view in _read_block(log, selection, VersionRange(versions, extent.shard))
        )
        yield from sorted(lines, key=by_time)


def by_time(line: SampleLine) -> tuple[int, str]:
    """Order lines as the samples were generated."""
    return line.rolled_out_at, line.sample_id


def version_blocks(versions: range) -> list[range]:
    """Split a range of versions into blocks that are read at once."""
    return [
        versions[start : start + VERSIONS_AT_ONCE]
        for start in range(0, len(versions), VERSIONS_AT_ONCE)
    ]


def version_blocks_backwards(versions: range) -> Iterator[range]:
    """Split a range of versions into blocks from its end: the newest version alone, then twice as
    many each time.
    """
    stop, size = len(versions), 1
    while stop > 0:
        yield versions[max(stop - size, 0) : stop]
        stop, size = stop - size, min(2 * size, VERSIONS_AT_ONCE)


def read_scores(log: RunLog, extent: VersionRange, *, entity: str = REWARD_SCORES) -> Scores:
    """Return the first score of each sample, in each of its generations."""
    scores: Scores = {}
    for record in log.read(
        log.offset_ranges(entity, extent.versions, shard=extent.shard), SampleScored
    ):
        scores.setdefault(get_trajectory_key(record.event), record.event)
    return scores


def read_sample_events(
    log: RunLog, sample: SampleRolledOut, entity: str, kind: type[OfSample]
) -> Iterator[DecodedRecord[OfSample]]:
    """Give what a sample topic holds for a sample; only the records of its version and shard are
    read.
    """
    extent = VersionRange(
        range(sample.policy_version, sample.policy_version + 1),
        compute_shard(sample.prompt_group_id, shards=log.plan.partitions_per_version),
    )
    records = log.read(log.offset_ranges(entity, extent.versions, shard=extent.shard), kind)
    return (
        item for item in records if get_trajectory_key(item.event) == get_trajectory_key(sample)
    )


def build_view(
    record: DecodedRecord[SampleRolledOut],
    score: SampleScored | None,
    ended: DecodedRecord[PromptGroupEnded] | None,
) -> SampleView:
    """Put a sample together with what is known of it."""
    return SampleView(
        record.event, record.position, record.written_at, score, ended.event if ended else None
    )


def _read_block(log: RunLog, selection: SampleFilter, extent: VersionRange) -> Iterator[SampleView]:
    scores = read_scores(log, extent)
    for topic_partition, span in log.offset_ranges(
        ROLLOUT_SAMPLES, extent.versions, shard=extent.shard
    ).items():
        seen: set[TrajectoryKey] = set()
        for record in log.read({topic_partition: span}, SampleRolledOut):
            key = get_trajectory_key(record.event)
            if key not in seen and selection.matches_sample(record.event):
                seen.add(key)
                view = build_view(
                    record, scores.get(key), log.outcomes.get(record.event.prompt_group_id)
                )
                if selection.matches(view):
                    yield view


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
        selection: SampleFilter,
        *,
        newest_version: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selection, self._clock = selection, clock
        self._newest_version = newest_version
        self._waiting: dict[TrajectoryKey, tuple[float, DecodedRecord[SampleRolledOut]]] = {}
        self._scores: dict[TrajectoryKey, SampleScored] = {}

    def add(
        self, record: DecodedRecord[SampleRolledOut | SampleScored | PolicyVersionPublished]
    ) -> SampleLine | None:
        """Add an event; return the sample that it completes, if it matches."""
        event = record.event
        if isinstance(event, PolicyVersionPublished):
            self._newest_version = max(self._newest_version, event.policy_version)
            return None
        key = get_trajectory_key(event)
        if isinstance(event, SampleScored):
            if key in self._waiting:
                return self._line(self._waiting.pop(key)[1], event)
            self._remember(key, event)
            return None
        sample = DecodedRecord(event, record.position, record.written_at)
        if key in self._scores:
            return self._line(sample, self._scores.pop(key))
        self._waiting[key] = (self._clock(), sample)
        return None

    def pop_overdue(self, *, every: bool = False) -> Iterator[SampleLine]:
        """Yield the samples that have waited too long for their score, or every one that waits."""
        while self._waiting:
            key, (since, record) = next(iter(self._waiting.items()))
            is_recent = self._clock() - since < SCORE_SECONDS
            if is_recent and len(self._waiting) <= MAX_WAITING and not every:
                return
            del self._waiting[key]
            if (line := self._line(record, None)) is not None:
                yield line

    def _remember(self, key: TrajectoryKey, score: SampleScored) -> None:
        """Keep a score whose sample has not come; without one it belongs to a sample before the
        start.
        """
        self._scores[key] = score
        if len(self._scores) > MAX_WAITING:
            del self._scores[next(iter(self._scores))]

    def _line(
        self, record: DecodedRecord[SampleRolledOut], score: SampleScored | None
    ) -> SampleLine | None:
        view = build_view(record, score, None)
        return view.line(self._newest_version) if self._selection.matches(view) else None


def follow_samples(
    log: RunLog,
    selection: SampleFilter,
    starts: dict[TopicPartition, int],
    *,
    has_ended: Callable[[], bool] = lambda: False,
) -> Iterator[SampleLine]:
    """Yield matching samples as they come, until the run is over and nothing comes any more.

    Args:
        log: The run's log.
        selection: Which samples.
        starts: Start offsets, as `live_starts` gave them before older samples were read.
        has_ended: Whether the run has ended without a command that says so.
    """
    live, phase = LiveSamples(selection, newest_version=log.newest_version), RunPhase()
    commands = log.full_ranges(COMMANDS, range(1))
    for command in log.read(commands, RunCommanded):
        phase.apply_command(command.event)
    ends = {topic_partition: stop for topic_partition, (_, stop) in commands.items()}
    is_over = False
    for record in log.follow(starts | ends):
        if record is not None:
            yield from _take(log, live, phase, record)
        is_done = record is None and (phase.is_over or is_over)
        yield from live.pop_overdue(every=is_done)
        if is_done:
            return
        is_over = record is None and has_ended()


def live_starts(log: RunLog) -> dict[TopicPartition, int]:
    """Return the current end offsets of the followed topics."""
    every, one = range(log.plan.num_sample_partitions), range(1)
    spans = (
        log.full_ranges(ROLLOUT_SAMPLES, every)
        | log.full_ranges(REWARD_SCORES, every)
        | log.full_ranges(POLICY_VERSIONS, one)
    )
    return {topic_partition: stop for topic_partition, (_, stop) in spans.items()}


def _take(log: RunLog, live: LiveSamples, phase: RunPhase, record: Record) -> Iterator[SampleLine]:
    for event in log.decode_samples(record):
        if isinstance(event, RunCommanded):
            phase.apply_command(event)
        if isinstance(event, SampleRolledOut | SampleScored | PolicyVersionPublished):
            line = live.add(DecodedRecord(event, record.location, record.timestamp_ms))
            if line is not None:
                yield line
