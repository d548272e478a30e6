"""Lists the runs of a cluster, each read from its own log: its description, its progress, its live
workers.
"""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import structlog

from relax_events.config import RunConfig, WorkersConfig
from relax_events.errors import (
    BrokerError,
    BrokerRefused,
    ConfigError,
    CorruptRecord,
    RelaxError,
    SchemaError,
)
from relax_events.events.codec import EventCodec, UnknownFingerprint
from relax_events.events.parts import now_micros
from relax_events.events.types import Event, RunDescribed
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.inventory import Inventory
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.projections.run_state import RunState
from relax_events.projections.run_status import (
    RunStatus,
    decide_status,
    find_live_workers,
    find_possible_writers,
)
from relax_events.runtime.run_description import read_codec, read_described_config
from relax_events.topics import TopicPlan
from relax_events.topics.names import HEARTBEATS
from relax_events.topics.plan import belongs_on

log = structlog.get_logger()
PREFIX = "relax."
COMMANDS = ".control.commands"
ATTEMPTS = 4
TAIL_OFFSETS = 64
"""A commit takes two offsets, its record and the transaction marker; so this many hold the newest
step, unless many attempts failed in a row."""
DEFAULT_HUNG_SECONDS = WorkersConfig().heartbeat_timeout_seconds
AFRESH_SECONDS = 300.0
PartitionKey = tuple[str, int]


@dataclass
class RunSummary:
    """A run as its log shows it. `state` is folded from the commands, the newest train step and
    recent heartbeats only.
    """

    run_id: str
    topics: Mapping[str, int]
    num_records: int = 0
    started_at: int = 0
    state: RunState = field(default_factory=RunState)
    asked_at: int = field(default_factory=now_micros)

    @property
    def description(self) -> RunDescribed | None:
        """The run's description; None for a partly deleted run."""
        return self.state.description

    @cached_property
    def config(self) -> RunConfig | None:
        """The run file, where the log has it and this release can read it."""
        try:
            return (
                read_described_config(self.description, run_id=self.run_id)
                if self.description
                else None
            )
        except ConfigError as error:
            log.warning("run_description.decode_failed", run_id=self.run_id, error=str(error))
            return None

    @property
    def source(self) -> str:
        """The parent and the version that the run started from, as `quickstart@12`; empty without a
        parent.
        """
        described = self.description
        return (
            f"{described.parent_run}@{described.parent_version}"
            if described and described.parent_run
            else ""
        )

    @property
    def workers(self) -> WorkersConfig:
        """The settings of its workers; the defaults where its run file is unknown."""
        return config.workers if (config := self.config) else WorkersConfig()

    @property
    def live_workers(self) -> list[str]:
        """The workers that were alive when the run was read."""
        return sorted(find_live_workers(self.state, self.workers, now=self.asked_at))

    @property
    def possible_writers(self) -> list[str]:
        """The workers that may still write to the run: more than are alive."""
        return sorted(find_possible_writers(self.state, self.workers, now=self.asked_at))

    @property
    def status(self) -> RunStatus:
        """The run's status when it was read."""
        return decide_status(self.state, self.workers, now=self.asked_at)

    @property
    def policy_version(self) -> int:
        """The newest version that a step made; the first one before any, -1 where that is
        unknown.
        """
        if self.state.steps:
            return self.state.steps[-1].policy_version
        config = self.config
        return config.first_version if config else -1

    @property
    def num_steps(self) -> int:
        """Committed train steps."""
        config = self.config
        return max(self.policy_version - (config.first_version if config else 0), 0)

    def as_row(self) -> dict[str, Any]:
        """Return what lists of runs show; `started_at` in microseconds since the epoch, 0 where it
        is unknown.
        """
        return {
            "run_id": self.run_id,
            "status": self.status,
            "step": self.num_steps,
            "policy_version": self.policy_version,
            "reward": self.state.reward,
            "started_at": self.started_at,
            "num_records": self.num_records,
            "source": self.source,
        }


def parse_run_id(name: str) -> str:
    """Return the run of a topic or group: ids hold no dot, so `a` is never taken for `a-b`."""
    return name.split(".")[1]


def read_runs(
    connection: Connection, only: Collection[str] = (), *, with_progress: bool = True
) -> dict[str, RunSummary]:
    """Read the cluster's runs by id, or only those of these ids that exist.

    Of each run's log the commands are read completely, of steps and heartbeats the end: the time
    does not grow with the length of runs. Where a run is deleted meanwhile, the runs are read
    again.

    Args:
        connection: To the cluster.
        only: Ids; none stands for all.
        with_progress: Read steps, heartbeats and sizes too, besides the descriptions.
    Raises:
        BrokerUnavailable: The log could not be read.
    """
    for attempt in range(ATTEMPTS):
        runs = _list_runs(connection, only)
        try:
            _read_logs(connection, runs, with_progress=with_progress)
        except BrokerRefused:
            if attempt + 1 == ATTEMPTS:
                raise
        else:
            return runs
    return {}


class RunLister:
    """Lists the runs of a cluster again and again; each time it reads only what was added to their
    logs. It starts afresh every few minutes: a run may be deleted and its id used again.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._runs: dict[str, RunSummary] = {}
        self._positions: dict[PartitionKey, int] = {}
        self._started_at = 0.0

    def read(self) -> dict[str, RunSummary]:
        """Return the runs by id, as `read_runs` does.

        Raises:
            BrokerUnavailable: The log could not be read.
        """
        if time.monotonic() - self._started_at > AFRESH_SECONDS:
            self._forget()
        for attempt in range(ATTEMPTS):
            try:
                return self._read_more()
            except BrokerRefused:  # a run is deleted meanwhile
                self._forget()
                if attempt + 1 == ATTEMPTS:
                    raise
            except BrokerError:
                self._forget()  # some events are applied, and others are not
                raise
        return {}

    def _forget(self) -> None:
        self._runs, self._positions = {}, {}
        self._started_at = time.monotonic()

    def _read_more(self) -> dict[str, RunSummary]:
        there, kept = _list_runs(self._connection, ()), set[str]()
        for run_id, run in there.items():
            earlier = self._runs.get(run_id)
            if earlier is not None and earlier.topics.keys() <= run.topics.keys():
                run.state, run.started_at = earlier.state, earlier.started_at
                kept |= earlier.topics.keys()
        positions = {key: at for key, at in self._positions.items() if key[0] in kept}
        ends = _read_logs(self._connection, there, with_progress=True, positions=positions)
        if any(ends[key] < at for key, at in positions.items()):
            self._forget()  # a topic was made again under its name
            return self._read_more()
        self._runs, self._positions = there, ends
        return there


def _list_runs(connection: Connection, only: Collection[str]) -> dict[str, RunSummary]:
    topics: dict[str, dict[str, int]] = {}
    for name, num_partitions in Inventory(connection).topics(PREFIX).items():
        if name.count(".") >= 2 and (not only or parse_run_id(name) in only):
            topics.setdefault(parse_run_id(name), {})[name] = num_partitions
    return {run_id: RunSummary(run_id, names) for run_id, names in topics.items()}


def read_run(connection: Connection, run_id: str) -> RunSummary:
    """Read one run.

    Raises:
        ConfigError: The cluster has no topic of it; the text suggests a similar id.
    """
    if (run := read_runs(connection, [run_id]).get(run_id)) is not None:
        return run
    there = {
        parse_run_id(name) for name in Inventory(connection).topics(PREFIX) if name.count(".") >= 2
    }
    close = difflib.get_close_matches(run_id, sorted(there), n=1)
    hint = (
        f"did you mean {close[0]}?"
        if close
        else f"relax runs show lists the {len(there)} existing runs"
    )
    raise ConfigError(f"there is no run {run_id!r} on {connection.bootstrap_servers}; {hint}")


def _read_logs(
    connection: Connection,
    runs: Mapping[str, RunSummary],
    *,
    with_progress: bool,
    positions: Mapping[PartitionKey, int] | None = None,
) -> dict[PartitionKey, int]:
    """Read the logs of runs from these positions on, and return the positions that follow."""
    admin, reader = Admin(connection), LogReader(connection)
    try:
        topic_partitions = [
            (name, partition)
            for run in runs.values()
            for name, count in run.topics.items()
            for partition in range(count)
        ]
        if not with_progress:
            topic_partitions = [
                topic_partition
                for topic_partition in topic_partitions
                if topic_partition[0].endswith(COMMANDS)
            ]
        begins = admin.beginning_offsets(topic_partitions)
        ends = admin.end_offsets(topic_partitions)
        spans = {
            topic_partition: (begins[topic_partition], ends[topic_partition])
            for topic_partition in topic_partitions
            if topic_partition[0].endswith(COMMANDS)
        }
        if with_progress:
            spans |= _step_ranges(topic_partitions, begins, ends) | _heartbeat_ranges(
                admin, runs, topic_partitions, ends
            )
        for topic_partition in topic_partitions:
            runs[parse_run_id(topic_partition[0])].num_records += (
                ends[topic_partition] - begins[topic_partition]
            )
        _apply_records(reader, runs, _start_later(spans, positions or {}))
        return ends
    finally:
        reader.close()
        admin.close()


def _start_later(
    spans: Mapping[PartitionKey, tuple[int, int]], positions: Mapping[PartitionKey, int]
) -> dict[PartitionKey, tuple[int, int]]:
    """Return offset ranges without what lies before these positions."""
    return {
        key: (start, end)
        for key, (begin, end) in spans.items()
        if (start := max(begin, positions.get(key, 0))) < end
    }


def _apply_records(
    reader: LogReader,
    runs: Mapping[str, RunSummary],
    spans: Mapping[PartitionKey, tuple[int, int]],
) -> None:
    """Apply the events of these offset ranges to their runs."""
    for record, event in decode_records(reader, spans):
        if not belongs_on(TopicPlan.parse_entity(record.topic), event):
            log.warning(
                "record.misplaced", location=record.location, event_type=type(event).__name__
            )
            continue
        run = runs[parse_run_id(record.topic)]
        run.state.apply(event)
        if record.topic.endswith(COMMANDS):
            written_at = record.timestamp_ms * 1000
            run.started_at = min(run.started_at or written_at, written_at)


def _step_ranges(
    topic_partitions: Iterable[PartitionKey],
    begins: Mapping[PartitionKey, int],
    ends: Mapping[PartitionKey, int],
) -> dict[PartitionKey, tuple[int, int]]:
    return {
        topic_partition: (
            max(begins[topic_partition], ends[topic_partition] - TAIL_OFFSETS),
            ends[topic_partition],
        )
        for topic_partition in topic_partitions
        if topic_partition[0].endswith(".control.train-steps")
    }


def _heartbeat_ranges(
    admin: Admin,
    runs: Mapping[str, RunSummary],
    topic_partitions: Iterable[PartitionKey],
    ends: Mapping[PartitionKey, int],
) -> dict[PartitionKey, tuple[int, int]]:
    """Find the heartbeats of the last minutes, by the broker's clock."""
    heartbeats = [
        topic_partition
        for topic_partition in topic_partitions
        if TopicPlan.parse_entity(topic_partition[0]) in HEARTBEATS.values()
    ]
    since_ms = min((run.asked_at for run in runs.values()), default=0) // 1000 - int(
        2 * DEFAULT_HUNG_SECONDS * 1000
    )
    return {
        topic_partition: (start, ends[topic_partition])
        for topic_partition, start in admin.offsets_at(heartbeats, timestamp_ms=since_ms).items()
    }


def decode_records(
    reader: LogReader, spans: Mapping[PartitionKey, tuple[int, int]]
) -> Iterator[tuple[Record, Event]]:
    """Yield the events of control topics of any runs, in log order by topic; unreadable records are
    logged, with one line for each topic.

    A run whose writers used other schemas gets a codec of its own with them: ids of schema
    registries are only valid within one run.
    """
    codec, unknown = EventCodec(), dict[str, list[Record]]()
    unreadable = UnreadableRecords()
    for record in reader.stream(spans):
        try:
            yield record, codec.decode(record.value)
        except UnknownFingerprint:
            unknown.setdefault(parse_run_id(record.topic), []).append(record)
        except (CorruptRecord, SchemaError) as error:
            unreadable.add(record, error)
    for run_id, records in sorted(unknown.items()):
        run_codec = read_codec(reader, run_id)
        for record in records:
            try:
                yield record, run_codec.decode(record.value)
            except (CorruptRecord, SchemaError) as error:
                unreadable.add(record, error)
    unreadable.report()


class UnreadableRecords:
    """Counts the records of each topic that could not be decoded."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._first: dict[str, tuple[str, str]] = {}

    def add(self, record: Record, error: RelaxError) -> None:
        """Count a record."""
        self._counts[record.topic] += 1
        self._first.setdefault(record.topic, (record.location, str(error)))

    def report(self) -> None:
        """Log the number of each topic, with the location and the error of the first."""
        for topic, (location, error) in self._first.items():
            log.warning(
                "records.decode_failed",
                num_records=self._counts[topic],
                first_location=location,
                error=error,
            )
