"""The one reader of a run's log: folds control events, and keeps columns of all samples.

It joins no consumer group and commits nothing, so the run does not notice it. New records are
followed from the start; older samples are read meanwhile, the newest versions first. When the
broker goes away, it tries again from where it was.

    live   control topics, and samples and scores from now on  ──▶ RunFold, SampleTable
    older  samples and scores of earlier versions, by blocks   ──▶ SampleTable
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import structlog

from relax_events.config import RunConfig
from relax_events.dashboard.run_fold import RunFold
from relax_events.dashboard.sample_columns import NewSample, SampleTable, encode_group
from relax_events.errors import RelaxError, SchemaError
from relax_events.events.generations import trajectory_of
from relax_events.events.parts import now_micros
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    PromptGroupEnded,
    SampleRolledOut,
    SampleScored,
)
from relax_events.history.run_log import RunLog, TopicPartition
from relax_events.history.samples.reader import version_blocks_backwards
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.projections.run_state import RUN_STATE_TOPICS
from relax_events.topics.plan import METRICS, belongs_on

log = structlog.get_logger()
SCHEMAS = "control.schemas"
CONTROL_TOPICS = (
    SCHEMAS,
    "control.policy-versions",
    "control.commands",
    *RUN_STATE_TOPICS,
)
MAX_OLD_REPORTS = 20_000
"""Metrics reports of a role that are read back at the start."""
MAX_JOINING = 50_000
RECORDS_A_TURN = 500
RETRY_SECONDS = 1.0
SILENT_SECONDS = 3.0
"""After so long without a record the reader asks whether the broker still answers."""
IDLE_SECONDS = 0.25
STOP_SECONDS = 5.0


class ScoreJoin:
    """Joins samples with scores that come before or after them; memory is bounded."""

    def __init__(self, table: SampleTable, fold: RunFold) -> None:
        self._table, self._fold = table, fold
        self._rows: dict[int, int] = {}
        self._scores: dict[int, float | None] = {}

    def add_sample(self, sample: NewSample) -> None:
        """Add a sample, unless it is a copy of one that was added a short time before."""
        if sample.key in self._rows:
            return
        row = self._table.add(sample)
        _keep(self._rows, sample.key, row)
        if sample.key in self._scores:
            self._table.set_reward(row, self._scores.pop(sample.key))

    def add_score(self, score: NewScore) -> None:
        """Add a score; of several the first counts."""
        row = self._rows.get(score.key)
        if row is None:
            if score.key not in self._scores:
                self._fold.add_score(score.version, score.values)
                _keep(self._scores, score.key, score.reward)
        elif np.isnan(self._table.columns["reward"][row]):
            self._fold.add_score(score.version, score.values)
            self._table.set_reward(row, score.reward)


@dataclass(frozen=True, slots=True)
class NewScore:
    """What is kept of a score: `values` are the reward and its components, if any."""

    key: int
    version: int
    reward: float | None
    values: dict[str, float]

    @classmethod
    def of(cls, score: SampleScored) -> NewScore:
        """Return what is kept of a score's record."""
        values = {} if score.reward is None else {"reward": score.reward, **score.components}
        return cls(hash(trajectory_of(score)), score.policy_version, score.reward, values)


def new_sample(sample: SampleRolledOut, *, partition: int, offset: int) -> NewSample:
    """Return what is kept of a sample's record."""
    key = sample.key
    return NewSample(
        hash(trajectory_of(sample)),
        encode_group(key.prompt_group_id),
        key.sample_index,
        key.policy_version,
        key.min_policy_version,
        len(sample.tokens) - sample.num_prompt_tokens,
        sample.finish_reason.value,
        sample.worker_id,
        read_source(sample.metadata),
        sample.rolled_out_at,
        partition,
        offset,
    )


def _keep(kept: dict[int, Any], key: int, value: Any) -> None:
    kept.setdefault(key, value)
    if len(kept) > MAX_JOINING:
        del kept[next(iter(kept))]


def read_source(metadata: str) -> str:
    """Return what a sample's metadata names as its source or task; empty for neither."""
    if len(metadata) <= 2:
        return ""
    try:
        fields = orjson.loads(metadata)
    except orjson.JSONDecodeError:
        return ""
    if not isinstance(fields, dict):
        return ""
    for name in ("source", "data_source", "dataset", "task"):
        if isinstance(fields.get(name), str):
            return str(fields[name])[:64]
    return ""


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

    def __init__(self, config: RunConfig) -> None:
        """Read nothing yet.

        Args:
            config: The run, with the broker's address filled in.
        """
        self.config, self.fold, self.table = config, RunFold(config), SampleTable()
        self.status, self.lock = ReaderStatus(), threading.Lock()
        self._join = ScoreJoin(self.table, self.fold)
        self._positions: dict[TopicPartition, int] = {}
        self._sample_ends: dict[TopicPartition, int] = {}
        self._blocks: list[range] | None = None
        self._closing = threading.Event()
        self._changed = threading.Condition(self.lock)
        self._is_silent = False
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)

    def start(self) -> RunReader:
        """Start reading."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

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

    def _note_trouble(self, text: str) -> None:
        if not self.status.trouble:
            self.status.trouble_since = time.time()
            log.warning("dashboard.read_failed", run_id=self.config.run.id, error=text)
        with self._changed:
            self.status.trouble = text
            self.status.revision += 1
            self._changed.notify_all()

    def _follow(self, run_log: RunLog) -> None:
        self._find_starts(run_log)
        reader = LogReader(run_log.connection, start=self._positions)
        older, answered = self._read_older(run_log), time.monotonic()
        try:
            while not self._closing.is_set():
                is_behind = self._blocks is not None and bool(self._blocks)
                began_at = now_micros()
                records = reader.fetch(
                    RECORDS_A_TURN, timeout_seconds=0.01 if is_behind else IDLE_SECONDS
                )
                self._take(run_log, records)
                if records or not is_behind:  # a short wait finds nothing although there is more
                    times = (record.timestamp_ms * 1000 for record in records)
                    oldest = min(times, default=began_at)
                    self.status.read_until = max(self.status.read_until, oldest)
                with self._changed:
                    self._is_silent = not records and not is_behind
                    self._changed.notify_all()
                self._positions = dict(reader.positions)
                if not records and is_behind:
                    next(older, None)
                    self.status.revision += 1
                if records:
                    answered = time.monotonic()
                elif time.monotonic() - answered > SILENT_SECONDS:
                    reader.watermarks(run_log.plan.topic("control.policy-versions"), 0)
                    answered = time.monotonic()
                self._end_trouble()
                self.status.num_unreadable = run_log.unreadable.count
        finally:
            reader.close()

    def _end_trouble(self) -> None:
        if self.status.trouble:
            self.status.trouble = ""
            self.status.revision += 1

    def _find_starts(self, run_log: RunLog) -> None:
        """Find the first offsets to read; a later connection continues where this one ended."""
        if self._positions:
            return
        partitions = range(run_log.plan.num_sample_partitions)
        live = {
            partition: end
            for entity in ("rollout.samples", "reward.scores")
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
                    _learn(run_log, record)
                    continue
                event = None if record.is_damaged else run_log.decode(record)
                if event is not None and belongs_on(entity, event):
                    self._apply(event, record)
        self.status.revision += 1

    def _apply(self, event: Event, record: Record) -> None:
        if isinstance(event, SampleRolledOut):
            self._join.add_sample(
                new_sample(event, partition=record.partition, offset=record.offset)
            )
        elif isinstance(event, SampleScored):
            self._join.add_score(NewScore.of(event))
        else:
            self.fold.apply(event)
            if isinstance(event, PromptGroupEnded):
                self.table.end(event)
            elif isinstance(event, PolicyVersionPublished):
                self.table.newest_version = max(self.table.newest_version, event.policy_version)

    def _read_older(self, run_log: RunLog) -> Iterator[None]:
        """Read the samples of the older versions; yield after some records.

        A block is added once it is read completely, so one that fails half-way is read again.
        """
        while self._blocks:
            block = self._blocks[0]
            scores: list[NewScore] = []
            samples: list[NewSample] = []
            for event, record in self._read_block(run_log, block):
                if isinstance(event, SampleScored):
                    scores.append(NewScore.of(event))
                elif isinstance(event, SampleRolledOut):
                    samples.append(
                        new_sample(event, partition=record.partition, offset=record.offset)
                    )
                if (len(scores) + len(samples)) % RECORDS_A_TURN == 0:
                    yield
            with self.lock:
                for sample in samples:
                    self._join.add_sample(sample)
                for score in scores:
                    self._join.add_score(score)
            self._blocks.pop(0)
            self.status.num_old_versions_left -= len(block)
            self.status.is_caught_up = not self._blocks
            yield

    def _read_block(self, run_log: RunLog, block: range) -> Iterator[tuple[Event | None, Record]]:
        for entity in ("rollout.samples", "reward.scores"):
            if run_log.plan.topic(entity) in run_log.topics:
                for record in run_log.records(run_log.offset_ranges(entity, block)):
                    yield (None if record.is_damaged else run_log.decode(record)), record


def _learn(run_log: RunLog, record: Record) -> None:
    if record.value:
        try:
            run_log.codec.learn(record.value, key=record.key)
        except SchemaError as error:
            run_log.unreadable.add(record.location, error)
