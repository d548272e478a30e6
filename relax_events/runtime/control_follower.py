"""Follows the control log: versions, commands and the schemas of other writers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import structlog

from relax_events.errors import (
    AccessDenied,
    BrokerError,
    ClientFailed,
    CorruptRecord,
    ForeignRecord,
    RelaxError,
    SchemaError,
)
from relax_events.events.codec import (
    EventCodec,
    RegistryConflict,
    names_schema,
    read_registry_ids,
)
from relax_events.events.parts import Command
from relax_events.events.types import (
    BroadcastMembership,
    Event,
    PolicyVersionPublished,
    RunCommanded,
)
from relax_events.kafka.auth_errors import AuthFailureTracker
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.runtime.publications import (
    PublishedVersions,
    find_start_offsets,
    read_newest_publications,
)
from relax_events.topics import TopicPlan
from relax_events.topics.names import BROADCAST, COMMANDS, METRICS_TOPICS, POLICY_VERSIONS, SCHEMAS
from relax_events.topics.partitions import TopicPartition
from relax_events.topics.plan import belongs_on

log = structlog.get_logger()
RECENT_VERSIONS = 48
"""Policy versions that a follower reads back at its start: enough for the displayed steps and
several staleness windows."""
READ_WHOLE = (SCHEMAS, COMMANDS)
"""Read from their beginning: a run has few schemas and commands."""
RECENT_REPORTS = 500
"""Metrics reports per role that a follower reads back at its start: enough to hold the newest of
each worker."""
STOP_SECONDS = 5.0
LOGGED_EVERY = 100
SILENT_SECONDS = 60.0
"""Seconds without a record after which the thread checks whether its client finds a broker."""


class FetchWait(NamedTuple):
    """How long the broker holds a follower's fetch."""

    ms: int
    """At most this long, while it has fewer than `min_bytes`."""
    min_bytes: int = 1
    """One byte: the first record ends the wait."""


FOLLOW = FetchWait(500)
"""Of workers, which need each record at once."""
GATHER = FetchWait(300, min_bytes=64 * 1024)
"""Of observers, which need no record at once: the heartbeats of many workers cost few requests."""
NO_START_OFFSETS: Mapping[str, int] = MappingProxyType({})
Listener = Callable[[Event], None]


class ControlFollower:
    """Reads the recent past of the control topics, then follows them live in its own thread.

    At its start it reads the newest publications of versions, and the steps and outcomes committed
    since the oldest of these; `PolicyVersionPublished` summarizes the earlier ones. So the start
    does not grow with the run. Listeners are called in each topic's log order: first in the
    starting thread, then in the follower's thread. Each topic has one partition, so all workers see
    the same order. Versions are monotonic: an older version that appears again is ignored.
    """

    def __init__(
        self,
        connection: Connection,
        plan: TopicPlan,
        codec: EventCodec,
        *,
        also: Sequence[str] = (),
        reads_broadcast: bool = False,
        num_versions: int = RECENT_VERSIONS,
        wait: FetchWait = FOLLOW,
    ) -> None:
        """Read the existing versions and commands.

        Args:
            connection: How to reach the broker.
            plan: The run's topics.
            codec: Receives the schemas of other writers.
            also: Control topics to follow, besides the topics of every worker; topics of
                roles that the run lacks are left out.
            reads_broadcast: Whether to follow the list of engines too, from its beginning: it is
                compacted, and only roles with engines may read it.
            num_versions: Minimum number of newest versions to read; at least the window's.
            wait: How long the broker holds a fetch. A follower's first records may come so much
                later, since a topic found late waits for the first fetch.
        Raises:
            SchemaError: The log holds versions, and none of them can be read.
        """
        self._codec, self._plan = codec, plan
        self._wait = wait
        self._whole = (*READ_WHOLE, BROADCAST) if reads_broadcast else READ_WHOLE
        self._also = tuple(filter(plan.has, also))
        self._schemas_topic = plan.topic(SCHEMAS)
        self._connection = connection
        self._listeners: list[Listener] = []
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._positions: dict[tuple[str, int], int] = {}
        self._starts: dict[tuple[str, int], int] = {}
        self._published: dict[str, set[int]] = {}
        self._rejected: dict[str, tuple[str, RelaxError]] = {}
        self._num_rejected = Counter[str]()
        """The first rejected event of each topic, and where it is."""
        self.latest: PolicyVersionPublished | None = None
        self.broadcast_membership: BroadcastMembership | None = None
        self._received_at = time.monotonic()
        self._published_versions = PublishedVersions(connection, plan, codec)
        # if it loses the brokers this client is replaced; its errors end no process
        self._own = replace(connection, auth_failures=AuthFailureTracker())
        self._reader = LogReader(self._own)
        commands = [
            event
            for record in self._reader.read_to_end(self._partitions(self._whole))
            if (event := self._take(record)) is not None
        ]
        published = self._read_versions(max(num_versions, plan.num_slots + 1))
        self._require_history()
        self._start_offsets = find_start_offsets(published, plan)
        self.cluster_id = self._reader.cluster_id(self._schemas_topic)
        self.history: list[Event] = [*published, *drop_superseded(commands)]
        self._thread = threading.Thread(target=self._follow, name="control", daemon=True)

    def _partitions(self, entities: Iterable[str]) -> list[tuple[str, int]]:
        return [(self._plan.topic(entity), 0) for entity in entities]

    def _read_versions(self, num_versions: int) -> list[PolicyVersionPublished]:
        publications = read_newest_publications(
            self._reader,
            self._plan,
            self._decode,
            is_enough=lambda publications: len(publications) >= num_versions,
        )
        return [event for event in publications if self._is_newer(event)]

    def start(
        self, *listeners: Listener, start_offsets: Mapping[str, int] = NO_START_OFFSETS
    ) -> None:
        """Send the listeners the events read so far and the past of the other topics, then follow
        live.

        Args:
            listeners: Called with each event.
            start_offsets: Offsets to begin at, by entity, for topics whose earlier records the
                caller knows.
        """
        self._listeners = list(listeners)
        history, self.history = self.history, []
        for event in history:
            self._notify(event)
        spans = {
            (self._plan.topic(entity), 0): self._span(entity, start_offsets)
            for entity in self._also
        }
        for record in self._reader.stream(spans):
            self._receive(record)
        starts = {
            topic_partition: start for topic_partition, (start, _) in spans.items()
        } | dict.fromkeys(self._partitions((*self._whole, POLICY_VERSIONS)), 0)
        self._starts = {
            topic_partition: self._positions.get(topic_partition, start)
            for topic_partition, start in starts.items()
        }
        reader, self._reader = self._reader, self._open_follower(self._starts)
        reader.close()
        self._thread.start()

    def _open_follower(self, start: Mapping[TopicPartition, int] | None = None) -> LogReader:
        return LogReader(
            self._own,
            start=start,
            fetch_wait_ms=self._wait.ms,
            fetch_min_bytes=self._wait.min_bytes,
        )

    def _span(self, entity: str, start_offsets: Mapping[str, int]) -> tuple[int, int]:
        low, high = self._reader.watermarks(self._plan.topic(entity), 0)
        start = (
            max(high - RECENT_REPORTS, 0)
            if entity in METRICS_TOPICS
            else self._start_offsets.get(entity, 0)
        )
        return max(start_offsets.get(entity, start), low), high

    @property
    def policy_version(self) -> int:
        """The newest published version, -1 before the first."""
        latest = self.latest
        return latest.policy_version if latest else -1

    def position(self, entity: str) -> int:
        """Return the offset after the last record read from a topic; inside a listener, the offset
        after its event.
        """
        return self._positions.get((self._plan.topic(entity), 0), 0)

    def wait_for_version(self, version: int, *, timeout_seconds: float) -> bool:
        """Wait until `version` or a newer one is published."""
        with self._changed:
            return self._changed.wait_for(lambda: self.policy_version >= version, timeout_seconds)

    def is_published(self, version: int) -> bool:
        """Return whether a version, or a newer one, is on the log: reads to its end, even if the
        thread is behind. Call it from one thread only.

        Raises:
            BrokerError: The log can't be read.
        """
        if self.policy_version >= version:
            return True
        # the thread may not have processed its newest one yet
        newest = self._published_versions.read_newest(self.position(POLICY_VERSIONS) - 1)
        return max(newest, self.policy_version) >= version

    def learn_schemas(self) -> None:
        """Read control.schemas to its end, because a writer uses an unknown schema."""
        reader = LogReader(self._connection)
        try:
            for record in reader.read_to_end([(self._schemas_topic, 0)]):
                self._learn(record)
        finally:
            reader.close()

    def stop(self) -> None:
        """Stop following; the thread no longer calls the listeners."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def read_remaining(self) -> None:
        """Send the listeners, in this thread, the records of the followed topics that were not read
        before `stop`.

        Topics have no order among each other: a command may be read before the train steps that
        were committed before it.

        Raises:
            BrokerError, BrokerUnavailable: The log could not be read.
        """
        self.stop()
        if self._thread.is_alive():
            return  # a listener hangs, so its thread still uses the reader
        spans = {
            topic_partition: (
                self._positions.get(topic_partition, start),
                self._reader.watermarks(*topic_partition)[1],
            )
            for topic_partition, start in self._starts.items()
        }
        # the reader that followed would first wait for the broker to answer its last fetch
        follower, self._reader = self._reader, LogReader(self._own)
        follower.close()
        for record in self._reader.stream(spans):
            self._receive(record)

    def close(self) -> None:
        """Stop following, and close the connections."""
        self.stop()
        self._reader.close()
        self._published_versions.close()

    def check(self) -> None:
        """Raise the error that ended the thread; the work loop calls this, because it would receive
        no further versions and commands.

        Raises:
            AccessDenied: The role may not read the control topics.
            ClientFailed: The client, or a listener, failed permanently.
            RegistryConflict: Processes of two schema registries write on this log.
        """
        self._connection.auth_failures.raise_fatal()

    def _follow(self) -> None:
        try:
            while not self._closing.is_set():
                self.poll_once(timeout_seconds=0.5)
        except Exception as error:  # boundary of the thread: any error ends the process
            log.exception("control.failed")
            what = (
                f"the thread that follows the control log ended with {type(error).__name__}: "
                f"{error}"
            )
            self._connection.auth_failures.report_fatal(
                ClientFailed(
                    f"{what}; this process must be restarted to receive versions and commands"
                )
            )

    def poll_once(self, *, timeout_seconds: float) -> None:
        """Wait for records, and send their events to the listeners."""
        try:
            records = self._reader.fetch(timeout_seconds=timeout_seconds)
        except BrokerError as error:
            log.warning("control.read_failed", error=str(error))
            if isinstance(error, AccessDenied | ClientFailed):
                self._connection.auth_failures.report_fatal(error)
            self._closing.wait(timeout_seconds)  # the next attempt may fail at once, too
            return
        for record in records:
            self._receive(record)
        if records:
            self._received_at = time.monotonic()
        elif time.monotonic() - self._received_at > SILENT_SECONDS:
            self._renew_reader()
            self._received_at = time.monotonic()

    def _renew_reader(self) -> None:
        """Replace the client if it finds no broker and a new client does.

        A client that received an empty broker list may never find the brokers again (librdkafka
        issue 5301). A controller sends such a list if it considers the only broker dead.
        """
        if self._reader.cluster_id(self._schemas_topic):
            return
        reader = self._open_follower()
        if not reader.cluster_id(self._schemas_topic):
            reader.close()  # the brokers are unreachable
            return
        log.warning("control.client_recreated")
        self._reader, cut_off = reader, self._reader
        self._reader.assign(
            {
                topic_partition: self._positions.get(topic_partition, start)
                for topic_partition, start in self._starts.items()
            }
        )
        cut_off.close()

    def _receive(self, record: Record) -> None:
        event = self._take(record)
        if event is not None:
            self._notify(event)

    def _take(self, record: Record) -> Event | None:
        if record.topic == self._schemas_topic:
            self._positions[record.topic, record.partition] = record.offset + 1
            self._learn(record)
            return None
        event = self._decode(record)
        if isinstance(event, PolicyVersionPublished) and not self._is_newer(event):
            return None
        if isinstance(event, BroadcastMembership) and (
            self.broadcast_membership is None
            or event.membership_version > self.broadcast_membership.membership_version
        ):
            self.broadcast_membership = event
        return event

    def _decode(self, record: Record) -> Event | None:
        topic_partition = (record.topic, record.partition)
        self._positions[topic_partition] = max(
            record.offset + 1, self._positions.get(topic_partition, 0)
        )
        try:
            event = self._codec.decode(record.value)
        # an unknown schema, or an unreachable schema registry
        except (CorruptRecord, SchemaError, BrokerError) as error:
            self._reject(record, error)
            return None
        if belongs_on(entity := self._plan.parse_entity(record.topic), event):
            return event
        self._reject(record, ForeignRecord(f"a {type(event).__name__} is not allowed on {entity}"))
        return None

    def _reject(self, record: Record, error: RelaxError) -> None:
        """Log the first such record of each topic, and one of each hundred after it."""
        self._num_rejected[record.topic] += 1
        if (num_rejected := self._num_rejected[record.topic]) % LOGGED_EVERY == 1:
            log.error(
                "control_record.rejected",
                location=record.location,
                num_rejected=num_rejected,
                error=str(error),
            )
        if names_schema(record.value):
            self._rejected.setdefault(record.topic, (record.location, error))

    def _require_history(self) -> None:
        """Require that no version is on the log, where none could be read.

        Raises:
            BrokerError: A version's schema is not on the log, and the schema registry does not
                respond.
            SchemaError: The topic of the versions holds events that this process can't read.
        """
        rejected = self._rejected.get(self._plan.topic(POLICY_VERSIONS))
        if self.latest is not None or rejected is None:
            return
        location, error = rejected
        if isinstance(error, BrokerError):
            raise error
        raise SchemaError(
            f"{location} can't be read ({error}): the run has a history, and no policy version of "
            "it is readable here; use the release that wrote it, and the control.schemas of this "
            "run, or give the run another run.id"
        ) from error

    def has_schema(self, fingerprint: bytes, schema: bytes) -> bool:
        """Return whether a schema is on control.schemas, with its ids at the registry."""
        ids = self._published.get(fingerprint.hex())
        return ids is not None and ids.issuperset(read_registry_ids(schema))

    def _learn(self, record: Record) -> None:
        if record.value:
            try:
                self._codec.learn(record.value, key=record.key)
            except SchemaError as error:
                log.error("control_record.rejected", location=record.location, error=str(error))
                if isinstance(error, RegistryConflict):
                    self._connection.auth_failures.report_fatal(error)
            else:
                ids = self._published.setdefault(record.key, set())
                ids.update(read_registry_ids(record.value))

    def _is_newer(self, event: PolicyVersionPublished) -> bool:
        if event.policy_version <= self.policy_version:
            log.warning(
                "policy_version.repeated",
                policy_version=event.policy_version,
                latest=self.policy_version,
            )
            return False
        with self._changed:
            self.latest = event
            self._changed.notify_all()
        return True

    def _notify(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except RelaxError as error:
                log.error(
                    "control_event.rejected", event_type=type(event).__name__, error=str(error)
                )


def drop_superseded(history: Sequence[Event]) -> list[Event]:
    """Drop past commands that a later resume superseded, so that a resumed run does not stop again.

    Scale commands stay: a resumed run has as many workers as before.
    """
    commands = [event for event in history if isinstance(event, RunCommanded)]
    resumed = max(
        (
            index
            for index, event in enumerate(commands)
            if event.command is Command.RESUME and event.role is None
        ),
        default=0,
    )
    outdated = {id(event) for event in commands[:resumed] if event.command is not Command.SCALE}
    return [event for event in history if id(event) not in outdated]
