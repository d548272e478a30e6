"""Reads the publications of policy versions: the newest ones, and where to read on from them.

Each publication of a policy version summarizes the log before it and gives the start offsets:

    control.policy-versions         ... v-2  v-1  v   read backwards from the end,
                                          │           until enough publications are found
    control.train-steps             ......├── read from this offset on
    control.prompt-group-outcomes   ......└── read from this offset on

`control_offsets` of the publication holds these offsets; `num_steps_before` and
`outcome_counts_before` count the earlier records. So the cost of a start does not grow with the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from relax_events.errors import BrokerUnavailable, CorruptRecord, SchemaError
from relax_events.events.codec import EventCodec
from relax_events.events.types import Event, PolicyVersionPublished
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.topics import TopicPlan
from relax_events.topics.names import GROUP_OUTCOMES, POLICY_VERSIONS, TRAIN_STEPS

log = structlog.get_logger()
SUMMED_ENTITIES = (
    TRAIN_STEPS,
    GROUP_OUTCOMES,
    POLICY_VERSIONS,
)
"""Topics that the trainer writes in the transactions that publish versions."""
Decode = Callable[[Record], Event | None]


def read_newest_publications(
    reader: LogReader,
    plan: TopicPlan,
    decode: Decode,
    *,
    is_enough: Callable[[Sequence[PolicyVersionPublished]], bool],
) -> list[PolicyVersionPublished]:
    """Read publications backwards until `is_enough` holds; return them oldest first.

    Args:
        reader: Its assignment is replaced.
        plan: The run's topics.
        decode: Turns a record into its event; None for an unusable record.
        is_enough: Receives the publications found so far, oldest first.
    """
    publications: list[PolicyVersionPublished] = []
    for records in reader.read_backwards((plan.topic(POLICY_VERSIONS), 0)):
        events = [decode(record) for record in records]
        publications = [
            *(event for event in events if isinstance(event, PolicyVersionPublished)),
            *publications,
        ]
        if is_enough(publications):
            break
    return publications


def find_start_offsets(
    published: Sequence[PolicyVersionPublished], plan: TopicPlan
) -> Mapping[str, int]:
    """Return the start offsets, by entity, from which a reader misses nothing since the first of
    these publications; 0 is the oldest record left.
    """
    named = (
        {plan.parse_entity(at.topic): at.offset for at in published[0].control_offsets}
        if published
        else {}
    )
    return {entity: named.get(entity, 0) for entity in SUMMED_ENTITIES}


class PublishedVersions:
    """Reads publications to the end of the log on request, with a client of its own. Used by one
    thread.
    """

    def __init__(self, connection: Connection, plan: TopicPlan, codec: EventCodec) -> None:
        self._connection, self._codec = connection, codec
        self._topic_partition = (plan.topic(POLICY_VERSIONS), 0)
        self._reader: LogReader | None = None
        self._position, self._newest = 0, -1

    def read_newest(self, start: int) -> int:
        """Read the publications that are not read yet; return the newest version of all that were
        read, -1 without any.

        Args:
            start: The caller knows the publications before this offset.
        Raises:
            BrokerError: The log can't be read.
        """
        self._position = max(self._position, start)
        try:
            self._read_to_end()
        # a disconnected client may never find the brokers again, but a new one does
        except BrokerUnavailable as error:
            log.warning("control.read_retried", error=str(error))
            self.close()
            self._read_to_end()
        return self._newest

    def close(self) -> None:
        """Close the connection; the next read opens another one."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _read_to_end(self) -> None:
        if self._reader is None:
            self._reader = LogReader(self._connection, fetch_wait_ms=1)
        end = self._reader.watermarks(*self._topic_partition)[1]
        spans = {self._topic_partition: (self._position, end)}
        for record in self._reader.stream(spans):
            with suppress(CorruptRecord, SchemaError):
                event = self._codec.decode(record.value)
                if isinstance(event, PolicyVersionPublished):
                    self._newest = max(self._newest, event.policy_version)
        self._position = max(self._position, end)
