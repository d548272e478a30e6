"""The one reader of a run's log: folds control events, and keeps columns of all samples.

It joins no consumer group and commits nothing. New records are followed from the start; older
samples are read in turn with them, the newest versions first. When the broker goes away, it tries
again from where it was.

    live   control topics, and samples and scores from now on  ──▶ RunFold, SampleTable
    older  samples and scores of earlier versions, by blocks   ──▶ SampleTable

While the run may be running it gives way to it: it fetches the records of a second at once, reads a
bounded number of bytes of older samples a second, and reads nothing while no page asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from relax_events.api.errors import RelaxError
from relax_events.api.events import (
    PolicyVersionPublished,
    PromptGroupEnded,
    SampleRolledOut,
    SampleScored,
    now_micros,
)
from relax_events.api.log import (
    COMMANDS,
    METRICS,
    POLICY_VERSIONS,
    REWARD_SCORES,
    ROLLOUT_SAMPLES,
    SCHEMAS,
    LogReader,
    Record,
    RunLog,
    TopicPartition,
    belongs_on,
)
from relax_events.api.runs import RUN_STATE_TOPICS, RunConfig
from relax_events.events.types import Event
from relax_events.history.samples.reader import version_blocks_backwards
from relax_events.packages.dashboard.recent_texts import RecentTexts
from relax_events.packages.dashboard.run_fold import RunFold
from relax_events.packages.dashboard.sample_columns import NewSample, SampleTable
from relax_events.packages.dashboard.score_join import NewScore, ScoreJoin, new_sample

log = structlog.get_logger()
Value = TypeVar("Value")
CONTROL_TOPICS = (
    SCHEMAS,
    POLICY_VERSIONS,
    COMMANDS,
    *RUN_STATE_TOPICS,
)
MAX_OLD_REPORTS = 20_000
"""Metrics reports of a role that are read back at the start."""
RECORDS_A_TURN = 500
RETRY_SECONDS = 1.0
SILENT_SECONDS = 3.0
"""After so long without a record the reader asks whether the broker still answers."""
FETCH_WAIT_MS = 100
IDLE_SECONDS = 0.25
STOP_SECONDS = 5.0

# Giving way to a run
BATCH_WAIT_MS, BATCH_BYTES = 1000, 1 << 20
"""The broker answers once so many bytes are new, or after this time."""
BATCH_IDLE_SECONDS = 1.5
"""Longer than the broker waits: what was on the log before has then come."""
QUICK_SECONDS = 5.0
"""Before it fetches in batches it has read what was there, or read for so long."""
REST_SECONDS = 0.5
"""After less than a full turn of new records."""
OLDER_BYTES_PER_SECOND = 32e6
WATCHED_SECONDS = 20.0
"""It reads for so long after a page has asked for something."""


@dataclass(slots=True)
class ReaderStatus:
    """How far the reader is: `trouble` says why it can't read now, since `trouble_since`."""

    is_caught_up: bool = False
    num_old_versions: int = 0
    num_old_versions_left: int = 0
    trouble: str = ""
    trouble_since: float = 0.0
    num_unreadable: int = 0
    revision: int = 0
    read_until: int = 0
    """Microseconds since the epoch: what the log got before is read, 0 before anything is."""

    def known_now(self, now: int) -> int:
        """Return the time by which a worker is judged silent, in microseconds: a reader that is
        behind does not know of later heartbeats.
        """
        return min(now, self.read_until) if self.read_until else now


class RunReader:
    """Reads a run's log in a thread until it is closed. Read `fold` under `lock`."""

    def __init__(self, config: RunConfig, *, gives_way: bool = False) -> None:
        """Read nothing yet.

        Args:
            config: The run, with the broker's address filled in.
            gives_way: Whether to take little from the run that writes the log, and read only while
                `keep_reading` is called at least every 20 s.
        """
        self.config, self.fold, self.table = config, RunFold(config=config), SampleTable()
        self.texts = RecentTexts()
        self.status, self.lock = ReaderStatus(), threading.Lock()
        self.on_news: Callable[[], None] = _do_nothing
        """Called by the reading thread after each change of `status.revision`."""
        self._gives_way = gives_way
        self._watched, self._watched_until = threading.Event(), 0.0
        self._join = ScoreJoin(self.table, self.fold)
        self._positions: dict[TopicPartition, int] = {}
        self._blocks: list[range] | None = None
        self._closing = threading.Event()
        self._changed = threading.Condition(self.lock)
        self._is_silent = False
        self._older_at = 0.0
        self._kept: dict[str, tuple[int, Any]] = {}
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)

    def start(self) -> RunReader:
        """Start reading."""
        self.keep_reading()
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        self._watched.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def keep_reading(self) -> None:
        """Read for the next 20 s at least."""
        self._watched_until = time.monotonic() + WATCHED_SECONDS
        self._watched.set()

    def remember(self, name: str, compute: Callable[[], Value]) -> Value:
        """Return what a call computes from the state, computed once for each state."""
        revision = self.status.revision
        kept = self._kept.get(name)
        if kept is None or kept[0] != revision:
            kept = self._kept[name] = revision, compute()
        value: Value = kept[1]
        return value

    def wait(self, *, num_steps: int, timeout_seconds: float) -> bool:
        """Wait until all that the log has now is read, or the log can't be read; return whether
        it is.

        Args:
            num_steps: Train steps that the log has at least.
            timeout_seconds: Time limit.
        """

        def is_read() -> bool:
            return (
                self._is_silent
                and self.status.is_caught_up
                and len(self.fold.curves.steps) >= num_steps
            )

        with self._changed:
            self._changed.wait_for(
                lambda: is_read() or bool(self.status.trouble), timeout=timeout_seconds
            )
            return is_read()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with RunLog(self.config, name="dashboard") as run_log:
                    self._follow(run_log)
            except RelaxError as error:
                self._note_trouble(str(error))
                self._closing.wait(RETRY_SECONDS)
                self._wait_until_watched()

    def _note_trouble(self, text: str) -> None:
        if not self.status.trouble:
            self.status.trouble_since = time.time()
            log.warning("dashboard.read_failed", run_id=self.config.run.id, error=text)
        with self._changed:
            self.status.trouble = text
            self._changed.notify_all()
        self._notify()

    def _notify(self) -> None:
        self.status.revision += 1
        self.on_news()

    def _follow(self, run_log: RunLog) -> None:
        self._find_starts(run_log)
        began = answered = time.monotonic()
        in_batches = False
        reader = self._open_reader(run_log, in_batches=in_batches)
        older = self._read_older(run_log)
        try:
            while not self._closing.is_set():
                if not self._is_watched:
                    reader.pause()
                    self._wait_until_watched()
                    reader.resume()
                num_records = self._read_new(run_log, reader, in_batches=in_batches)
                if self._blocks and time.monotonic() >= self._older_at:
                    next(older, None)
                    self._notify()
                if num_records:
                    answered = time.monotonic()
                elif time.monotonic() - answered > SILENT_SECONDS:
                    reader.watermarks(run_log.plan.topic(POLICY_VERSIONS), 0)
                    answered = time.monotonic()
                self._end_trouble()
                self.status.num_unreadable = run_log.unreadable.count
                if in_batches and not self._blocks and num_records < RECORDS_A_TURN:
                    self._closing.wait(REST_SECONDS)
                is_read = not num_records or time.monotonic() - began > QUICK_SECONDS
                if self._gives_way and not in_batches and is_read:
                    in_batches = True
                    quick, reader = reader, self._open_reader(run_log, in_batches=in_batches)
                    quick.close()
        finally:
            reader.close()

    def _open_reader(self, run_log: RunLog, *, in_batches: bool) -> LogReader:
        return LogReader(
            run_log.connection,
            start=self._positions,
            fetch_wait_ms=BATCH_WAIT_MS if in_batches else FETCH_WAIT_MS,
            fetch_min_bytes=BATCH_BYTES if in_batches else 1,
        )

    @property
    def _is_watched(self) -> bool:
        return not self._gives_way or time.monotonic() < self._watched_until

    def _wait_until_watched(self) -> None:
        while not self._is_watched and not self._closing.is_set():
            self._watched.clear()
            if not self._is_watched and not self._closing.is_set():  # nothing came meanwhile
                self._watched.wait()

    def _read_new(self, run_log: RunLog, reader: LogReader, *, in_batches: bool) -> int:
        """Read at most a turn of new records; return how many there were."""
        is_behind, began_at = bool(self._blocks), now_micros()
        idle = BATCH_IDLE_SECONDS if in_batches else IDLE_SECONDS
        if is_behind and (in_batches or not self._gives_way):
            idle = min(max(self._older_at - time.monotonic(), 0.01), idle)
        records = reader.fetch(RECORDS_A_TURN, timeout_seconds=idle)
        self._take(run_log, records)
        if records or not is_behind:  # a short wait finds nothing although there is more
            times = (record.timestamp_ms * 1000 for record in records)
            oldest = min(times, default=began_at)
            self.status.read_until = max(self.status.read_until, oldest)
        with self._changed:
            self._is_silent = not records and not is_behind
            self._changed.notify_all()
        self._positions = dict(reader.positions)
        return len(records)

    def _end_trouble(self) -> None:
        if self.status.trouble:
            self.status.trouble = ""
            self._notify()

    def _find_starts(self, run_log: RunLog) -> None:
        """Find the first offsets to read; a later connection continues where this one ended."""
        if self._positions:
            return
        partitions = range(run_log.plan.num_sample_partitions)
        live = {
            partition: end
            for entity in (ROLLOUT_SAMPLES, REWARD_SCORES)
            if run_log.plan.topic(entity) in run_log.topics or run_log.plan.source_run_id
            for partition, (_, end) in run_log.full_ranges(entity, partitions).items()
        }
        control: dict[TopicPartition, int] = {}
        for entity in CONTROL_TOPICS:
            if run_log.plan.has(entity):
                for partition, (_, end) in run_log.full_ranges(entity, range(1)).items():
                    is_metrics = entity in METRICS.values()
                    control[partition] = max(end - MAX_OLD_REPORTS, 0) if is_metrics else 0
        self._positions = live | control
        versions = range(run_log.newest_version + 1)
        self._blocks = list(version_blocks_backwards(versions))
        self.status.is_caught_up = not self._blocks
        self.status.num_old_versions = self.status.num_old_versions_left = len(versions)

    def _take(self, run_log: RunLog, records: list[Record]) -> None:
        if not records:
            return
        with self.lock:
            for record in records:
                entity = run_log.plan.parse_entity(record.topic)
                if entity == SCHEMAS:
                    run_log.learn_schema(record)
                    continue
                for event in run_log.decode_samples(record):
                    if belongs_on(entity, event):
                        self._apply(event, record)
        self._notify()

    def _apply(self, event: Event, record: Record) -> None:
        if isinstance(event, SampleRolledOut):
            sample = new_sample(event, partition=record.partition, offset=record.offset)
            if (row := self._join.add_sample(sample)) is not None:
                self.texts.add(row, event)
        elif isinstance(event, SampleScored):
            self._join.add_score(NewScore.of(event))
        else:
            self.fold.apply(event)
            if isinstance(event, PromptGroupEnded):
                self.table.end(event)
            elif isinstance(event, PolicyVersionPublished):
                self.table.newest_version = max(self.table.newest_version, event.policy_version)

    def _read_older(self, run_log: RunLog) -> Iterator[None]:
        """Read the samples of the older versions; yield after some records or bytes.

        A block is added once it is read completely, so one that fails half-way is read again.
        """
        while self._blocks:
            block = self._blocks[0]
            scores: list[NewScore] = []
            samples: list[NewSample] = []
            num_records, num_bytes = 0, 0
            for events, record in self._read_block(run_log, block):
                for event in events:
                    if isinstance(event, SampleScored):
                        scores.append(NewScore.of(event))
                    elif isinstance(event, SampleRolledOut):
                        samples.append(
                            new_sample(event, partition=record.partition, offset=record.offset)
                        )
                num_records, num_bytes = num_records + 1, num_bytes + len(record.value or b"")
                if num_records == RECORDS_A_TURN or num_bytes > BATCH_BYTES:
                    self._rest_after(num_bytes)
                    num_records, num_bytes = 0, 0
                    yield
            self._rest_after(num_bytes)
            with self.lock:
                for sample in samples:
                    self._join.add_sample(sample)
                for score in scores:
                    self._join.add_score(score)
            self._blocks.pop(0)
            self.status.num_old_versions_left -= len(block)
            self.status.is_caught_up = not self._blocks
            yield

    def _rest_after(self, num_bytes: int) -> None:
        """Set the time of the next turn of older samples."""
        if self._gives_way:
            self._older_at = time.monotonic() + num_bytes / OLDER_BYTES_PER_SECOND

    def _read_block(
        self, run_log: RunLog, block: range
    ) -> Iterator[tuple[Sequence[Event], Record]]:
        for entity in (ROLLOUT_SAMPLES, REWARD_SCORES):
            if run_log.plan.topic(entity) in run_log.topics:
                for record in run_log.records(run_log.offset_ranges(entity, block)):
                    yield run_log.decode_samples(record), record


def _do_nothing() -> None:
    """Ignore the news."""
