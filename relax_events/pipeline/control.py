"""Follows the control topics: which version is out, what the controller asks for, which schemas writers use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import structlog

from relax_events.broker.connection import Connection
from relax_events.broker.consumer import LogReader
from relax_events.broker.records import Record
from relax_events.errors import AccessDenied, BrokerError, CorruptRecord, RelaxError, SchemaError
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Command
from relax_events.events.types import EnginesEnlisted, Event, PolicyVersionPublished, RunCommanded
from relax_events.topics import TopicPlan

log = structlog.get_logger()
ALWAYS = ("control.schemas", "control.policy-versions", "control.commands")
Listener = Callable[[Event], None]


class ControlFollower:
    """Reads control topics from their beginning, then live, in a thread of its own.

    Listeners are called in that thread, in log order, once the follower has caught up; each topic has one partition,
    so all workers see the same order. Versions are monotonic: an older one that appears again is ignored.
    """

    def __init__(self, connection: Connection, plan: TopicPlan, codec: EventCodec, *, also: Sequence[str] = ()) -> None:
        self._codec = codec
        self._schemas_topic = plan.topic("control.schemas")
        self._places = [(plan.topic(entity), 0) for entity in (*ALWAYS, *also)]
        self._connection = connection
        self._listeners: list[Listener] = []
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._learnt: dict[tuple[str, int], int] = {}
        self.latest: PolicyVersionPublished | None = None
        self.enlisted: EnginesEnlisted | None = None
        self._reader = LogReader(connection)
        events = [event for record in self._reader.read_to_end(self._places) if (event := self._take(record)) is not None]
        self.history: list[Event] = still_valid(events)
        self._thread = threading.Thread(target=self._follow, name="control", daemon=True)

    def start(self, *listeners: Listener) -> None:
        """Replay what was read so far to the listeners, then go on live."""
        self._listeners = list(listeners)
        history, self.history = self.history, []
        for event in history:
            self._tell(event)
        self._reader.assign({place: self._learnt.get(place, 0) for place in self._places})
        self._thread.start()

    @property
    def policy_version(self) -> int:
        """The newest published version, -1 before the first."""
        latest = self.latest
        return latest.policy_version if latest else -1

    def wait_for_version(self, version: int, *, timeout_seconds: float) -> bool:
        """Wait until `version` or a newer one is published."""
        with self._changed:
            return self._changed.wait_for(lambda: self.policy_version >= version, timeout_seconds)

    def learn_schemas(self) -> None:
        """Read control.schemas to its end now: someone used a schema that is new to us."""
        reader = LogReader(self._connection)
        try:
            for record in reader.read_to_end([(self._schemas_topic, 0)]):
                self._learn(record)
        finally:
            reader.close()

    def close(self) -> None:
        """Stop following."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(5)
        self._reader.close()

    def _follow(self) -> None:
        while not self._closing.is_set():
            self.turn(timeout_seconds=0.5)

    def turn(self, *, timeout_seconds: float) -> None:
        """Wait for records, and tell the listeners what is in them."""
        try:
            records = self._reader.fetch(timeout_seconds=timeout_seconds)
        except BrokerError as error:
            log.warning("control.disturbed", error=str(error))
            if isinstance(error, AccessDenied):
                self._connection.refusals.deny(error)
            self._closing.wait(timeout_seconds)  # the next try may fail as fast
            return
        for record in records:
            event = self._take(record)
            if event is not None:
                self._tell(event)

    def _take(self, record: Record) -> Event | None:
        self._learnt[record.topic, record.partition] = record.offset + 1
        if record.topic == self._schemas_topic:
            self._learn(record)
            return None
        try:
            event = self._codec.decode(record.value)
        except (CorruptRecord, SchemaError, BrokerError) as error:  # of the broker's: a stranger's schema, and a registry that is away
            log.error("control_record.refused", place=record.place, error=str(error))
            return None
        if isinstance(event, PolicyVersionPublished) and not self._is_newer(event):
            return None
        if isinstance(event, EnginesEnlisted) and (self.enlisted is None or event.list_version > self.enlisted.list_version):
            self.enlisted = event
        return event

    def _learn(self, record: Record) -> None:
        if record.value:
            try:
                self._codec.learn(record.value)
            except SchemaError as error:
                log.error("control_record.refused", place=record.place, error=str(error))

    def _is_newer(self, event: PolicyVersionPublished) -> bool:
        if event.policy_version <= self.policy_version:
            log.warning("policy_version.repeated", policy_version=event.policy_version, latest=self.policy_version)
            return False
        with self._changed:
            self.latest = event
            self._changed.notify_all()
        return True

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except RelaxError as error:
                log.error("control_event.refused", event_type=type(event).__name__, error=str(error))


def still_valid(history: Sequence[Event]) -> list[Event]:
    """Leave out commands of the past that a later resume took back, so that a run that was taken up again stays up.

    What workers there shall be is not among them: a run that is taken up has as many as it had.
    """
    commands = [event for event in history if isinstance(event, RunCommanded)]
    resumed = max((index for index, event in enumerate(commands) if event.command is Command.RESUME and event.role is None), default=0)
    outdated = {id(event) for event in commands[:resumed] if event.command is not Command.SCALE}
    return [event for event in history if id(event) not in outdated]
