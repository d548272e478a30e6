"""Avro single-object encoding: two magic bytes, the writer schema's fingerprint, the body."""

from __future__ import annotations

import io
import json
import typing
from typing import Any

import fastavro

from relax_events.errors import CorruptRecord, SchemaError
from relax_events.events.conversion import Converter, record_reader, record_writer
from relax_events.events.schemas import Schema, name_of, released_schemas, runtime_schema, schema_fingerprint
from relax_events.events.types import Event

MAGIC = b"\xc3\x01"
HEADER_BYTES = 10


class UnknownFingerprint(SchemaError):
    """The record was written with a schema that this process has not learnt yet."""


class EventCodec:
    """Encodes and decodes events; learns foreign writer schemas, and reads them through its own.

    Not safe for encoding by several threads at once with the same buffer, which is why each call has its own.
    """

    def __init__(self) -> None:
        released = released_schemas()
        self._writers: dict[type, tuple[bytes, Schema, Converter]] = {}
        self._readers: dict[str, tuple[Schema, Converter]] = {}
        self._known: dict[bytes, tuple[Schema, Schema | None, Converter]] = {}
        self.schemas: dict[bytes, Schema] = {}
        for cls in typing.get_args(Event):
            schema = next(schema for name, schema in released.items() if name.rsplit(".", 1)[-1] == cls.__name__)
            parsed, fingerprint, reader = runtime_schema(schema), schema_fingerprint(schema), record_reader(cls)
            self._writers[cls] = (MAGIC + fingerprint, parsed, record_writer(cls))
            self._readers[name_of(schema)] = (parsed, reader)
            self._known[fingerprint] = (parsed, None, reader)
            self.schemas[fingerprint] = schema

    def encode(self, event: Event) -> bytes:
        """Return the event's bytes.

        Raises:
            TypeError: A field holds a value that its schema doesn't allow; the text names event and cause.
        """
        header, schema, to_record = self._writers[type(event)]
        buffer = io.BytesIO()
        buffer.write(header)
        try:
            fastavro.schemaless_writer(buffer, schema, to_record(event))
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise TypeError(f"{type(event).__name__} can't be encoded: {error}") from error
        return buffer.getvalue()

    def decode(self, data: bytes | None) -> Event:
        """Return the event in the bytes; its arrays are views on them.

        Raises:
            UnknownFingerprint: The writer schema has not been learnt.
            CorruptRecord: The bytes are no event.
        """
        if data is None or len(data) < HEADER_BYTES or data[:2] != MAGIC:
            raise CorruptRecord(f"record of {len(data or b'')} bytes doesn't begin with Avro's single-object marker")
        known = self._known.get(bytes(data[2:HEADER_BYTES]))
        if known is None:
            raise UnknownFingerprint(f"schema {data[2:HEADER_BYTES].hex()} is unknown; its writer has not published it on control.schemas")
        writer, reader, from_record = known
        buffer = io.BytesIO(data)
        buffer.seek(HEADER_BYTES)
        try:
            event: Event = from_record(fastavro.schemaless_reader(buffer, writer, reader))
        except CorruptRecord:
            raise
        except (EOFError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, fastavro.read.SchemaResolutionError) as error:
            raise CorruptRecord(f"record can't be decoded by schema {data[2:HEADER_BYTES].hex()}: {type(error).__name__} {error}") from error
        if buffer.tell() != len(data):
            raise CorruptRecord(f"record has {len(data) - buffer.tell()} bytes after its event")
        return event

    def learn(self, schema_json: bytes | str) -> bytes:
        """Accept a foreign writer schema and return its fingerprint; a schema for no event of ours is remembered, unused.

        Raises:
            SchemaError: It is not an Avro schema.
        """
        try:
            schema: Schema = json.loads(schema_json)
            fingerprint, parsed, name = schema_fingerprint(schema), runtime_schema(schema), name_of(schema)
        except (ValueError, KeyError, TypeError, fastavro.schema.SchemaParseException) as error:
            raise SchemaError(f"published schema is not an Avro record schema: {error}") from error
        if fingerprint not in self._known and name in self._readers:
            reader, from_record = self._readers[name]
            self._known[fingerprint] = (parsed, reader, from_record)
            self.schemas[fingerprint] = schema
        return fingerprint

    def published_form(self) -> dict[bytes, bytes]:
        """Return what belongs on control.schemas: schema JSON by fingerprint."""
        return {fingerprint: json.dumps(schema, separators=(",", ":")).encode() for fingerprint, schema in self.schemas.items()}


def event_name(data: bytes, codec: EventCodec) -> str:
    """Return the name of the event in a record without decoding it, or `unknown`."""
    schema: Any = codec.schemas.get(bytes(data[2:HEADER_BYTES]))
    return str(schema["name"]) if schema else "unknown"
