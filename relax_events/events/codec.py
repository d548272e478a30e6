"""Events as bytes: Avro's single-object encoding, or Confluent's framing where a schema registry is
used.

    single object   C3 01, the writer schema's fingerprint in eight bytes, the body
    Confluent       00, the schema's id at the registry in four bytes (big-endian), the body

Writing takes one of the two; reading takes both, always. The ids are on control.schemas together
with their schemas, so a log can be read without the registry that its writers used. Ids on the log
win over the registry's: another registry may give the same ids to other schemas.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import fastavro
from fastavro.schema import SchemaParseException, UnknownType

from relax_events.errors import CorruptRecord, SchemaError
from relax_events.events.bounded_reads import BoundedReads
from relax_events.events.conversion import Converter, record_reader, record_writer
from relax_events.events.foreign_schemas import read_published, require_bounded
from relax_events.events.sample_columns import RECORD_KINDS, join_one
from relax_events.events.schemas import (
    Schema,
    current_schemas,
    get_full_name,
    runtime_schema,
    schema_fingerprint,
)
from relax_events.events.types import Event, Sample

MAGIC = b"\xc3\x01"
HEADER_BYTES = 10
CONFLUENT_MAGIC = b"\x00"
CONFLUENT_HEADER_BYTES = 5
FREE_READS = 64 * 1024
"""Parts of numbers, and texts, that a record of any size may have: a train step of 30,000 samples
has so many."""
BYTES_PER_READ = 32
"""Of a larger record, for each further part; records of samples have some 600. A version segment,
read in three parts, takes 190 bytes in memory."""
REGISTRY_IDS = "registry_schema_ids"
"""Attribute of a published schema: its ids at the registry, several where its texts differed in
what doesn't count.

Avro lets schemas carry attributes that it doesn't know.
"""


NOT_AVRO = (
    AttributeError,
    ValueError,
    KeyError,
    TypeError,
    OverflowError,
    RecursionError,
    SchemaParseException,
    UnknownType,
)
"""Errors of parsing a text that is no schema."""


UNREADABLE = (
    *(EOFError, ValueError, IndexError, KeyError, TypeError),
    *(OverflowError, MemoryError, RecursionError, fastavro.read.SchemaResolutionError),
)
"""Errors of decoding bytes that are no record of the schema."""


def schema_marker(data: bytes) -> bytes:
    """Return the first bytes of a record, which name its schema."""
    return bytes(data[: HEADER_BYTES if data[:2] == MAGIC else CONFLUENT_HEADER_BYTES])


def names_schema(data: bytes | None) -> bool:
    """Return whether a record begins as one of an event does; other bytes are not of a writer that
    uses this framing.
    """
    if not data or len(data) < CONFLUENT_HEADER_BYTES:
        return False
    if data[:2] == MAGIC:
        return len(data) >= HEADER_BYTES
    return data[:1] == CONFLUENT_MAGIC and any(data[1:CONFLUENT_HEADER_BYTES])


class UnknownFingerprint(SchemaError):
    """The record was written with a schema that this process does not know yet."""


class RegistryConflict(SchemaError):
    """Processes of two schema registries write on one log: an id stands for two schemas."""


class SchemaRegistry(Protocol):
    """Where schemas have numbers."""

    def register(self, name: str, schema_json: str) -> int:
        """Return the id of a schema under its record's name, registering it when it is new."""

    def schema(self, schema_id: int) -> str | None:
        """Return the schema of an id as JSON, or None when there is none."""

    def close(self) -> None:
        """Close the connection; the next request opens another."""


class EventCodec:
    """Encodes and decodes events; learns foreign writer schemas, and reads them through its own.

    Not safe for encoding by several threads at once with the same buffer, which is why each call
    has its own.
    """

    def __init__(self, registry: SchemaRegistry | None = None) -> None:
        """Make a codec; the registry is asked for schemas that the log lacks, and until `frame` no
        record is written with its ids.
        """
        self._registry = registry
        current = current_schemas()
        self._headers: dict[type, bytes] = {}
        self._writers: dict[type, tuple[bytes, Schema, Converter]] = {}
        self._readers: dict[str, tuple[Schema, Converter]] = {}
        self._known: dict[bytes, tuple[Schema, Schema | None, Converter]] = {}
        self._fingerprints: dict[int, bytes] = {}
        self._off_log: set[int] = set()
        """Schema ids that the registry alone has named so far."""
        self.schemas: dict[bytes, Schema] = {}
        for cls in RECORD_KINDS:
            schema = next(
                schema
                for name, schema in current.items()
                if name.rsplit(".", 1)[-1] == cls.__name__
            )
            parsed, fingerprint, reader = (
                runtime_schema(schema),
                schema_fingerprint(schema),
                record_reader(cls),
            )
            self._headers[cls] = MAGIC + fingerprint
            self._writers[cls] = (fingerprint, parsed, record_writer(cls))
            self._readers[get_full_name(schema)] = (parsed, reader)
            self._known[fingerprint] = (parsed, None, reader)
            self.schemas[fingerprint] = schema

    def frame(self) -> None:
        """Write with schema ids from now on, where there is a registry. Each schema of ours takes
        its lowest id on the log, or else is registered: learn control.schemas before.

        Raises:
            BrokerUnavailable: The log lacks the id of a schema, and the registry does not respond.
            BrokerRefused: Likewise, and the registry requires a login, or another one.
            SchemaError: The registry has an incompatible schema of a name, or gives a schema an id
                that another one has on the log.
        """
        if self._registry is None:
            return
        ids: dict[bytes, int] = {}
        for schema_id in sorted(self._fingerprints.keys() - self._off_log, reverse=True):
            ids[self._fingerprints[schema_id]] = schema_id
        try:
            for cls, (fingerprint, _, _) in self._writers.items():
                if fingerprint not in ids:
                    ids[fingerprint] = self._register(self._registry, fingerprint)
                self._headers[cls] = CONFLUENT_MAGIC + ids[fingerprint].to_bytes(4, "big")
        finally:
            self._registry.close()

    def _register(self, registry: SchemaRegistry, fingerprint: bytes) -> int:
        """Register a schema of ours that has no id on the log, and return its id."""
        schema = self.schemas[fingerprint]
        text = json.dumps(schema, separators=(",", ":"))
        schema_id = registry.register(get_full_name(schema), text)
        self._claim(schema_id, fingerprint, is_on_log=False)
        return schema_id

    def encode(self, event: Event) -> bytes:
        """Return the bytes of a record; a sample's event becomes one of a single sample.

        Raises:
            TypeError: A field holds a value that its schema doesn't allow; the text names event and
                cause.
        """
        if isinstance(event, Sample):
            event = join_one(event)
        _, schema, to_record = self._writers[type(event)]
        buffer = io.BytesIO()
        buffer.write(self._headers[type(event)])
        try:
            fastavro.schemaless_writer(buffer, schema, to_record(event))
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise TypeError(f"{type(event).__name__} can't be encoded: {error}") from error
        return buffer.getvalue()

    def decode(self, data: bytes | None) -> Event:
        """Return what the bytes hold, samples in columns (`split_samples`); arrays are views on
        them.

        Raises:
            UnknownFingerprint: The writer schema is unknown.
            CorruptRecord: The bytes are no event, or have so many values that the event would take
                many times their memory.
        """
        fingerprint, header_bytes = self._read_fingerprint(data or b"")
        decoder = self._known.get(fingerprint)
        if data is None or decoder is None:
            raise UnknownFingerprint(
                f"schema {fingerprint.hex()} is unknown; its writer has not published it on "
                "control.schemas"
            )
        writer, reader, from_record = decoder
        buffer = _buffered(data)
        buffer.seek(header_bytes)
        try:
            event: Event = from_record(fastavro.schemaless_reader(buffer, writer, reader))
        except CorruptRecord:
            raise
        except UNREADABLE as error:
            raise CorruptRecord(
                f"record can't be decoded by schema {fingerprint.hex()}: "
                f"{type(error).__name__} {error}"
            ) from error
        if buffer.tell() != len(data):
            raise CorruptRecord(f"record has {len(data) - buffer.tell()} bytes after its event")
        return event

    def _read_fingerprint(self, data: bytes) -> tuple[bytes, int]:
        """Return the fingerprint of a record's writer schema, and where its body begins."""
        if len(data) >= HEADER_BYTES and data[:2] == MAGIC:
            return bytes(data[2:HEADER_BYTES]), HEADER_BYTES
        schema_id = int.from_bytes(data[1:CONFLUENT_HEADER_BYTES], "big")
        if len(data) < CONFLUENT_HEADER_BYTES or data[:1] != CONFLUENT_MAGIC or not schema_id:
            raise CorruptRecord(
                f"record of {len(data)} bytes doesn't begin with Avro's single-object marker "
                "or with a registry's schema id"
            )
        if schema_id not in self._fingerprints:
            self._look_up(
                schema_id,
                f"record of {len(data)} bytes names schema id {schema_id} of a schema registry",
            )
        return self._fingerprints[schema_id], CONFLUENT_HEADER_BYTES

    def _look_up(self, schema_id: int, what: str) -> None:
        """Request from the registry a schema that is not published on control.schemas."""
        if self._registry is None:
            raise UnknownFingerprint(
                f"{what}, which is not published on control.schemas; set "
                "broker.schema_registry to look there"
            )
        schema_json = self._registry.schema(schema_id)
        if schema_json is None:
            raise UnknownFingerprint(
                f"{what}, which is neither on control.schemas nor at broker.schema_registry"
            )
        self._fingerprints[schema_id] = self._accept(_published(schema_json))
        self._off_log.add(schema_id)

    def learn(self, schema_json: bytes | str, *, key: str | None = None) -> bytes:
        """Accept a foreign writer schema and return its fingerprint; a schema for no event of ours
        is remembered, unused.

        Args:
            schema_json: As published.
            key: Of its record on control.schemas, which must name its fingerprint.
        Raises:
            SchemaError: It is not an Avro schema, records of it could cost more than their bytes,
                it stands under another one's key, or it claims the registry id of another schema:
                the first that claims an id on the log keeps it.
            RegistryConflict: It claims an id that this codec writes with for another schema, and
                that no record of the log had claimed.
        """
        published = _published(schema_json)
        fingerprint = published.fingerprint
        if key is not None and key != fingerprint.hex():
            raise SchemaError(
                f"published schema has fingerprint {fingerprint.hex()}, and stands under the "
                f"key {key[:80]!r}"
            )
        self._accept(published)
        for schema_id in published.registry_ids:
            self._claim(schema_id, fingerprint, is_on_log=True)
        return fingerprint

    def _accept(self, published: _Published) -> bytes:
        """Read records of a writer schema from now on, and return its fingerprint."""
        if published.fingerprint not in self._known and published.name in self._readers:
            reader, from_record = self._readers[published.name]
            self._known[published.fingerprint] = (published.parsed, reader, from_record)
            self.schemas[published.fingerprint] = published.schema
        return published.fingerprint

    def _claim(self, schema_id: int, fingerprint: bytes, *, is_on_log: bool) -> None:
        """Record the schema of an id, as the log or the registry gives it."""
        other = self._fingerprints.get(schema_id, fingerprint)
        is_taken = other != fingerprint and schema_id not in self._off_log
        if is_taken or (other != fingerprint and self._is_written_with(schema_id)):
            error = SchemaError if is_taken and is_on_log else RegistryConflict
            raise error(
                f"schema id {schema_id} stands for {self._describe(other)} and for "
                f"{self._describe(fingerprint)}; a run keeps to one schema registry: point "
                "broker.schema_registry to it in all processes, or leave it out"
            )
        self._fingerprints[schema_id] = fingerprint
        (self._off_log.discard if is_on_log else self._off_log.add)(schema_id)

    def _describe(self, fingerprint: bytes) -> str:
        schema = self.schemas.get(fingerprint, {"name": "a schema"})
        return f"{schema['name']} ({fingerprint.hex()})"

    def _is_written_with(self, schema_id: int) -> bool:
        return CONFLUENT_MAGIC + schema_id.to_bytes(4, "big") in self._headers.values()

    def published_form(self) -> dict[bytes, bytes]:
        """Return what belongs on control.schemas: schema JSON by fingerprint, with its ids at the
        registry where it has some.
        """
        ids: dict[bytes, list[int]] = {}
        for schema_id, fingerprint in self._fingerprints.items():
            ids.setdefault(fingerprint, []).append(schema_id)
        extra = {fingerprint: {REGISTRY_IDS: schema_ids} for fingerprint, schema_ids in ids.items()}
        return {
            fingerprint: json.dumps(
                schema | extra.get(fingerprint, {}), separators=(",", ":")
            ).encode()
            for fingerprint, schema in self.schemas.items()
        }

    def event_name(self, data: bytes) -> str:
        """Return the name of the event in a record without decoding it, or `unknown`."""
        try:
            return str(self.schemas[self._read_fingerprint(data)[0]]["name"])
        except (CorruptRecord, UnknownFingerprint, KeyError):
            return "unknown"


def _buffered(data: bytes) -> io.BytesIO:
    """Return a buffer of a record, which is read in no more parts than events have."""
    if len(data) <= FREE_READS:
        return io.BytesIO(data)  # several times faster, and most records are small
    max_reads = FREE_READS + len(data) // BYTES_PER_READ
    return BoundedReads(data, max_reads=max_reads, of="events")


@dataclass(frozen=True, slots=True)
class _Published:
    """A published schema, taken apart."""

    schema: Schema
    parsed: Schema
    registry_ids: tuple[int, ...]
    fingerprint: bytes
    name: str


def read_registry_ids(schema_json: bytes | str) -> tuple[int, ...]:
    """Return the ids at the registry in a published schema.

    Raises:
        SchemaError: It is not an Avro schema.
    """
    return _published(schema_json).registry_ids


@lru_cache(maxsize=1024)
def _published(schema_json: bytes | str) -> _Published:
    """Take a published schema apart, once for each text: every worker that ever started has
    published the same ones.
    """
    schema = read_published(schema_json)
    try:
        ids = tuple(int(schema_id) for schema_id in schema.pop(REGISTRY_IDS, ()))
        parsed = runtime_schema(schema)
        require_bounded(schema)
        return _Published(schema, parsed, ids, schema_fingerprint(schema), get_full_name(schema))
    except NOT_AVRO as error:
        raise SchemaError(f"published schema is not an Avro record schema: {error}") from error
