"""Records of one partition in a file: an Avro object container, which any language can read, and a digest of what it holds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any

import fastavro
from fastavro.schema import SchemaParseException, UnknownType
from fastavro.write import Writer

from relax_events.errors import CorruptRecord, SchemaError
from relax_events.events.foreign_schemas import require_bounded

CODEC = "deflate"
BLOCK_BYTES = 256 * 1024
NULLABLE = ["null", "bytes"]
SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "LoggedRecord",
    "namespace": "relax.log",
    "doc": "A record of the log, byte for byte.",
    "fields": [
        {"name": "offset", "type": "long", "doc": "Its offset in the partition."},
        {"name": "timestamp_ms", "type": "long", "doc": "When it was written, milliseconds since the epoch."},
        {"name": "key", "type": NULLABLE, "doc": "Its key."},
        {"name": "value", "type": NULLABLE, "doc": "Its value: an event in single-object encoding, or whatever a stranger wrote."},
        {
            "name": "headers",
            "doc": "Its headers, in order.",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Header",
                    "doc": "One header.",
                    "fields": [{"name": "name", "type": "string", "doc": "Its name."}, {"name": "value", "type": NULLABLE, "doc": "Its value."}],
                },
            },
        },
    ],
}
PARSED = fastavro.parse_schema(SCHEMA)
UNREADABLE = (
    *(EOFError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, MemoryError, RecursionError, zlib.error, SchemaError),
    *(SchemaParseException, UnknownType, fastavro.read.SchemaResolutionError),
)
"""What a file that is no container, or one of other records, makes of whoever reads it."""


@dataclass(frozen=True, slots=True)
class LoggedRecord:
    """A record of one partition, byte for byte. The timestamp is in milliseconds since the epoch."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class RecordsDigest:
    """A digest over records: equal if and only if they are, in the same order."""

    def __init__(self, *, with_offsets: bool) -> None:
        self._digest, self._with_offsets = sha256(), with_offsets
        self.num_records = self.num_bytes = 0

    def add(self, record: LoggedRecord) -> None:
        """Take in the next record."""
        offset = record.offset if self._with_offsets else 0
        parts = [record.key, record.value, *(part for name, value in record.headers for part in (name.encode(), value))]
        lengths = [-1 if part is None else len(part) for part in parts]
        self._digest.update(repr((offset, record.timestamp_ms, lengths)).encode())
        for part in parts:
            self._digest.update(part or b"")
        self.num_records += 1
        self.num_bytes += sum(max(length, 0) for length in lengths)

    def hex(self) -> str:
        """Return the digest so far."""
        return self._digest.hexdigest()


class ContainerWriter(AbstractContextManager["ContainerWriter"]):
    """Writes records to a container file, block by block."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._writer = Writer(self._file, PARSED, codec=CODEC, sync_interval=BLOCK_BYTES)

    def write(self, record: LoggedRecord) -> None:
        """Append a record."""
        headers = [{"name": name, "value": value} for name, value in record.headers]
        row = {"offset": record.offset, "timestamp_ms": record.timestamp_ms, "key": record.key, "value": record.value, "headers": headers}
        self._writer.write(row)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._writer.flush()
        self._file.close()


def read_container(path: Path) -> Iterator[LoggedRecord]:
    """Give the records of a container file, one block in memory at a time.

    Raises:
        CorruptRecord: The file is torn or is no container of records.
    """
    try:
        with path.open("rb") as file:
            rows: Any = fastavro.reader(file, PARSED)
            require_bounded(rows.writer_schema)
            for row in rows:
                headers = tuple((header["name"], header["value"]) for header in row["headers"])
                yield LoggedRecord(row["offset"], row["timestamp_ms"], row["key"], row["value"], headers)
    except UNREADABLE as error:
        raise CorruptRecord(f"{path} can't be read as records of a partition: {type(error).__name__} {error}") from error
