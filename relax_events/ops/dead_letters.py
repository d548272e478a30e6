"""Dead letters: records that a role could not process, and their resolutions.

The topics are append-only. A resolution is another record in the same topic: without a value, and
with a header `resolves` that holds the dead letter's partition and offset. A dead letter that no
such record names is open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_events.errors import BrokerError, BrokerUnavailable, ConfigError
from relax_events.history.run_log import RunLog
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.kafka.security.acls import ROLE_PERMISSIONS
from relax_events.topics import TopicPlan
from relax_events.topics.names import DEAD_LETTERS, QUEUE_TOPICS, SAMPLE_TOPICS

ORIGIN_HEADERS = ("origin-topic", "origin-partition", "origin-offset")
OUR_HEADERS = frozenset({*ORIGIN_HEADERS, "error-class", "error-text", "worker-id"})
RESOLVES, RESOLUTION, REASON = "resolves", "resolution", "resolution-reason"
REQUEUED, DROPPED = "requeued", "dropped"
ID_PATTERN = re.compile(r"([a-z0-9-]+)@([0-9]{1,18})")
NUMBER_PATTERN = re.compile("[0-9]{1,18}")
RESOLVES_PATTERN = re.compile(r"0@([0-9]{1,18})")
RECORDS_AT_ONCE, BYTES_AT_ONCE = 256, 32 * 1024**2


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that a role could not process, without its value; `written_at` in milliseconds since
    the epoch.
    """

    role: str
    offset: int
    key: str
    num_bytes: int
    origin_topic: str
    origin_partition: int
    origin_offset: int
    error_class: str
    error_text: str
    worker_id: str
    written_at: int
    resolution: str = ""
    resolution_reason: str = ""

    @property
    def id(self) -> str:
        """Its id on the command line."""
        return f"{self.role}@{self.offset}"

    @property
    def origin(self) -> str:
        """The position of the original record."""
        return f"{self.origin_topic}[{self.origin_partition}]@{self.origin_offset}"


def read_dead_letters(log: RunLog, *, roles: Iterable[str] = ()) -> list[DeadLetter]:
    """Return the dead letters of some or all roles, oldest first, each with its resolution; values
    are not kept.
    """
    dead_letters = [
        dead_letter
        for role in roles or list_dead_letter_roles(log)
        for dead_letter in _read_role(log, role).values()
    ]
    return sorted(dead_letters, key=lambda dead_letter: (dead_letter.written_at, dead_letter.id))


def list_dead_letter_roles(log: RunLog) -> list[str]:
    """Return the roles that have a dead-letter topic."""
    return sorted(
        log.plan.parse_entity(topic).removesuffix(DEAD_LETTERS)
        for topic in log.topics
        if topic.endswith(DEAD_LETTERS)
    )


def _read_role(log: RunLog, role: str) -> dict[int, DeadLetter]:
    dead_letters: dict[int, DeadLetter] = {}
    for record in log.records(_spans(log, role)):
        mark = RESOLVES_PATTERN.fullmatch(record.headers.get(RESOLVES, ""))
        if mark is None:
            dead_letters[record.offset] = parse_dead_letter(role, record)
        elif int(mark[1]) in dead_letters:
            reason = record.headers.get(REASON, "")
            dead_letters[int(mark[1])] = replace(
                dead_letters[int(mark[1])],
                resolution=record.headers.get(RESOLUTION, ""),
                resolution_reason=reason,
            )
    return dead_letters


def _spans(log: RunLog, role: str) -> dict[tuple[str, int], tuple[int, int]]:
    if log.plan.topic(f"{role}{DEAD_LETTERS}") not in log.topics:
        raise ConfigError(
            f"role {role!r} has no dead-letter topic; roles with one: "
            f"{', '.join(list_dead_letter_roles(log))}"
        )
    return log.full_ranges(f"{role}{DEAD_LETTERS}", range(1))


def parse_dead_letter(role: str, record: Record) -> DeadLetter:
    """Read a dead letter's headers. Headers that an untrusted producer left out stay empty."""
    text = record.headers.get
    partition, offset = (text(name, "") for name in ("origin-partition", "origin-offset"))
    return DeadLetter(
        role,
        record.offset,
        record.key,
        len(record.value),
        text("origin-topic", ""),
        int(partition) if NUMBER_PATTERN.fullmatch(partition) else -1,
        int(offset) if NUMBER_PATTERN.fullmatch(offset) else -1,
        text("error-class", ""),
        text("error-text", ""),
        text("worker-id", ""),
        record.timestamp_ms,
    )


def read_dead_letter(log: RunLog, name: str) -> tuple[DeadLetter, Record]:
    """Return one dead letter with its record.

    Raises:
        ConfigError: The id is malformed, or there is no such dead letter.
    """
    role, offset = parse_id(name)
    dead_letter = _read_role(log, role).get(offset)
    if dead_letter is None:
        raise ConfigError(f"there is no dead letter {name}; relax deadletter shows all")
    topic = log.plan.topic(f"{role}{DEAD_LETTERS}")
    return dead_letter, next(log.records({(topic, 0): (offset, offset + 1)}))


def parse_id(name: str) -> tuple[str, int]:
    """Split a dead letter's id into role and offset.

    Raises:
        ConfigError: The id is malformed.
    """
    match = ID_PATTERN.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is no id of a dead letter; ids look like reward@12")
    return match[1], int(match[2])


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects dead letters: by id, or all of a role or with a reason."""

    ids: Sequence[str] = ()
    role: str = ""
    reason: str = ""
    all_roles: bool = False
    include_resolved: bool = False

    def choose(self, dead_letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        """Return the selected dead letters. Resolved ones are skipped unless named or
        `include_resolved`.

        Raises:
            ConfigError: Nothing is selected, an id is unknown, or a named dead letter is resolved
                and `include_resolved` is not set.
        """
        if not (self.ids or self.role or self.reason or self.all_roles):
            raise ConfigError(
                "say which dead letters: --id ID, --role ROLE, --reason CLASS or --all"
            )
        by_id = {dead_letter.id: dead_letter for dead_letter in dead_letters}
        for name in self.ids:
            parse_id(name)
            if name not in by_id:
                raise ConfigError(
                    f"there is no dead letter {name}; relax deadletter shows all dead letters"
                )
            if by_id[name].resolution and not self.include_resolved:
                raise ConfigError(
                    f"dead letter {name} is {by_id[name].resolution} already; give --resolved "
                    "to do it once more"
                )
        named = [by_id[name] for name in dict.fromkeys(self.ids)] or [
            dead_letter
            for dead_letter in dead_letters
            if self.include_resolved or not dead_letter.resolution
        ]
        return [
            dead_letter
            for dead_letter in named
            if self.role in ("", dead_letter.role) and self.reason in ("", dead_letter.error_class)
        ]


def requeue(log: RunLog, dead_letters: Sequence[DeadLetter], producer: RecordProducer) -> int:
    """Write records back, unchanged, to their original topics, and mark their dead letters as
    resolved; return their number.

    Every reader of the topic receives them again. Ids make that harmless, also when their prompt
    group has ended meanwhile. A crash in between leaves dead letters open whose records were
    written: requeueing them is harmless too.

    Raises:
        ConfigError: A dead letter names an origin that its role does not read, or that holds other
            bytes or none. Nothing was written.
    """
    for dead_letter in dead_letters:
        require_origin(dead_letter, log.plan)
    chosen = {
        (log.plan.topic(f"{dead_letter.role}{DEAD_LETTERS}"), dead_letter.offset): dead_letter
        for dead_letter in dead_letters
    }
    for records in split_batches(_values(log, chosen)):
        _require_same(log, records)
    for records in split_batches(_values(log, chosen)):
        producer.write(raw_copy(record) for record, _ in records)
        producer.write(
            resolution_record(log.plan, dead_letter, REQUEUED) for _, dead_letter in records
        )
    return len(dead_letters)


def drop(
    log: RunLog, dead_letters: Sequence[DeadLetter], producer: RecordProducer, *, reason: str
) -> int:
    """Mark dead letters as dropped, with a reason; return their number. They stay on the log."""
    producer.write(
        resolution_record(log.plan, dead_letter, DROPPED, reason) for dead_letter in dead_letters
    )
    return len(dead_letters)


def require_origin(dead_letter: DeadLetter, plan: TopicPlan) -> None:
    """Refuse a dead letter whose record must not be written back: its role may forge headers, and
    this process may write more topics than the role.

    Raises:
        ConfigError: The role does not read the original topic, or the topic has no such partition.
    """
    reads = ROLE_PERMISSIONS[dead_letter.role].reads if dead_letter.role in ROLE_PERMISSIONS else ()
    counts = dict.fromkeys(SAMPLE_TOPICS, plan.num_sample_partitions) | dict.fromkeys(
        QUEUE_TOPICS, plan.queue_partitions
    )
    sizes = {plan.topic(entity): counts[entity] for entity in reads if entity in counts}
    if not 0 <= dead_letter.origin_partition < sizes.get(dead_letter.origin_topic, 0):
        topics = ", ".join(plan.parse_entity(topic) for topic in sizes)
        raise ConfigError(
            f"dead letter {dead_letter.id} names its origin as {dead_letter.origin or 'nowhere'}: "
            f"records of {dead_letter.role} go back to {topics}; drop it"
        )


def _require_same(log: RunLog, records: Sequence[tuple[Record, DeadLetter]]) -> None:
    """Refuse dead letters that are no copies of the records that they name; raises ConfigError."""
    by_topic: dict[str, list[tuple[Record, DeadLetter]]] = {}
    for record, dead_letter in records:
        by_topic.setdefault(dead_letter.origin_topic, []).append((record, dead_letter))
    for topic, copies in by_topic.items():
        try:
            there = log.read_records_at(
                topic,
                [
                    (dead_letter.origin_partition, dead_letter.origin_offset)
                    for _, dead_letter in copies
                ],
            )
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            raise ConfigError(
                f"the original records of dead letters of {topic} can't be read, so "
                f"they can't be verified: {error}; drop them"
            ) from error
        for record, dead_letter in copies:
            original = there[dead_letter.origin_partition, dead_letter.origin_offset]
            if (original.key, original.value) != (record.key, record.value):
                raise ConfigError(
                    f"dead letter {dead_letter.id} holds other bytes than {dead_letter.origin}, "
                    "its named origin; drop it"
                )


def _values(
    log: RunLog, chosen: Mapping[tuple[str, int], DeadLetter]
) -> Iterator[tuple[Record, DeadLetter]]:
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    for topic, offset in chosen:
        first, stop = spans.get((topic, 0), (offset, offset + 1))
        spans[topic, 0] = min(first, offset), max(stop, offset + 1)
    for record in log.records(spans):
        if (record.topic, record.offset) in chosen:
            yield record, chosen[record.topic, record.offset]


def split_batches(
    records: Iterable[tuple[Record, DeadLetter]],
) -> Iterator[list[tuple[Record, DeadLetter]]]:
    """Split records into lists of bounded length and size."""
    batch: list[tuple[Record, DeadLetter]] = []
    num_bytes = 0
    for item in records:
        batch.append(item)
        num_bytes += len(item[0].value)
        if len(batch) == RECORDS_AT_ONCE or num_bytes >= BYTES_AT_ONCE:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def raw_copy(record: Record) -> ProducerRecord:
    """Return a dead letter's record with its original bytes, for its original topic."""
    headers = {name: text for name, text in record.headers.items() if name not in OUR_HEADERS}
    return ProducerRecord(
        record.headers["origin-topic"],
        record.value,
        key=record.key,
        partition=int(record.headers["origin-partition"]),
        headers=headers,
    )


def resolution_record(
    plan: TopicPlan, dead_letter: DeadLetter, resolution: str, reason: str = ""
) -> ProducerRecord:
    """Return the record that resolves a dead letter."""
    headers = {RESOLVES: f"0@{dead_letter.offset}", RESOLUTION: resolution, REASON: reason}
    return ProducerRecord(
        plan.topic(f"{dead_letter.role}{DEAD_LETTERS}"),
        None,
        key=dead_letter.key,
        partition=0,
        headers=headers,
    )
