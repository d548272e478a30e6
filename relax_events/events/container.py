"""Records of one partition in a file: an Avro object container, which any language can read, and a
digest of what it holds.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import fastavro
from fastavro.schema import SchemaParseException, UnknownType
from fastavro.write import Writer

from relax_events.errors import CorruptRecord, SchemaError
from relax_events.events.bounded_reads import BoundedReads
from relax_events.events.foreign_schemas import MAX_SCHEMA_BYTES, read_published, require_bounded
from relax_events.events.schemas import Schema

CODEC = "deflate"
BLOCK_BYTES = 256 * 1024
"""At which a block is written. It ends with the record that reaches this."""
MAX_RECORD_BYTES = 64 * 1024**2
"""Of a record that can be written again: the producer of an import takes no larger one."""
MAX_BLOCK_BYTES = BLOCK_BYTES + MAX_RECORD_BYTES
MAX_READS = 2 * BLOCK_BYTES
"""Parts of numbers, and texts, in a block. It is far more than records have; two zeros are a
header, which takes some 250 bytes in memory."""
MAX_HEAD_BYTES = 2 * MAX_SCHEMA_BYTES
CONTAINER_MAGIC, SYNC_BYTES, RAW_DEFLATE = b"Obj\x01", 16, -15
NULLABLE = ["null", "bytes"]
SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "LoggedRecord",
    "namespace": "relax.log",
    "doc": "A record of the log, byte for byte.",
    "fields": [
        {"name": "offset", "type": "long", "doc": "Its offset in the partition."},
        {
            "name": "timestamp_ms",
            "type": "long",
            "doc": "When it was written, milliseconds since the epoch.",
        },
        {"name": "key", "type": NULLABLE, "doc": "Its key."},
        {
            "name": "value",
            "type": NULLABLE,
            "doc": (
                "Its value: an event in single-object encoding, or the bytes of an unknown "
                "producer."
            ),
        },
        {
            "name": "headers",
            "doc": "Its headers, in order.",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Header",
                    "doc": "One header.",
                    "fields": [
                        {"name": "name", "type": "string", "doc": "Its name."},
                        {"name": "value", "type": NULLABLE, "doc": "Its value."},
                    ],
                },
            },
        },
    ],
}
PARSED = fastavro.parse_schema(SCHEMA)
HEAD = fastavro.parse_schema(
    {
        "type": "record",
        "name": "Head",
        "fields": [
            {
                "name": "magic",
                "type": {"type": "fixed", "name": "Magic", "size": len(CONTAINER_MAGIC)},
            },
            {"name": "meta", "type": {"type": "map", "values": "bytes"}},
            {"name": "sync", "type": {"type": "fixed", "name": "Sync", "size": SYNC_BYTES}},
        ],
    }
)
BLOCK_HEAD = fastavro.parse_schema(
    {
        "type": "record",
        "name": "BlockHead",
        "fields": [{"name": "num_records", "type": "long"}, {"name": "num_bytes", "type": "long"}],
    }
)
UNREADABLE = (
    *(
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
        zlib.error,
        SchemaError,
    ),
    *(SchemaParseException, UnknownType, fastavro.read.SchemaResolutionError),
)
"""Errors of reading a file that is no container, or one of other records."""


@dataclass(frozen=True, slots=True)
class LoggedRecord:
    """A record of one partition, byte for byte. The timestamp is in milliseconds since the
    epoch.
    """

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
        parts = [
            record.key,
            record.value,
            *(part for name, value in record.headers for part in (name.encode(), value)),
        ]
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
        row = {
            "offset": record.offset,
            "timestamp_ms": record.timestamp_ms,
            "key": record.key,
            "value": record.value,
            "headers": headers,
        }
        self._writer.write(row)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._writer.flush()
        self._file.close()


def read_container(path: Path) -> Iterator[LoggedRecord]:
    """Give the records of a container file; see `read_records`."""
    with path.open("rb") as file:
        yield from read_records(file, path)


def read_records(file: IO[bytes], path: Path) -> Iterator[LoggedRecord]:
    """Give the records of an open container file, one block in memory at a time.

    A block is unpacked up to `MAX_BLOCK_BYTES`, and decoded up to `MAX_READS`: a file of a few
    bytes can't fill the memory.

    Args:
        file: At its first byte.
        path: For errors.
    Raises:
        CorruptRecord: The file is torn, is no container of records, or has a block beyond these
            bounds; the text names file and block.
    """
    section = "its head"
    try:
        head, writer = _read_head(file)
        num_bytes, number = os.fstat(file.fileno()).st_size, 0
        reader = None if writer == PARSED else PARSED
        while file.tell() < num_bytes:
            section = f"block {number} (byte {file.tell()})"
            num_records, data = _read_block(
                file, num_bytes, codec=head["meta"].get("avro.codec", b"null")
            )
            if file.read(SYNC_BYTES) != head["sync"]:
                raise ValueError("it does not end with the file's marker")
            block = BoundedReads(data, max_reads=MAX_READS, of="records of partitions")
            for _ in range(num_records):
                row: Any = fastavro.schemaless_reader(block, writer, reader)
                headers = tuple((header["name"], header["value"]) for header in row["headers"])
                yield LoggedRecord(
                    row["offset"], row["timestamp_ms"], row["key"], row["value"], headers
                )
            if left := len(data) - block.tell():
                raise ValueError(f"it has {left} bytes after its {num_records} records")
            number += 1
    except UNREADABLE as error:
        raise CorruptRecord(
            f"{path} can't be read as records of a partition: {section}: "
            f"{type(error).__name__} {error}"
        ) from error


def _read_head(file: IO[bytes]) -> tuple[dict[str, Any], Schema]:
    """Return a container's head and the schema of its records, and go to its first block."""
    buffer = io.BytesIO(file.read(MAX_HEAD_BYTES))
    head: Any = fastavro.schemaless_reader(buffer, HEAD, None)
    if head["magic"] != CONTAINER_MAGIC or len(head["sync"]) != SYNC_BYTES:
        raise ValueError("it is no Avro object container")
    schema = read_published(head["meta"]["avro.schema"])
    require_bounded(schema)
    file.seek(buffer.tell())
    parsed: Any = fastavro.parse_schema(schema)
    return head, parsed


def _read_block(file: IO[bytes], num_bytes: int, *, codec: bytes) -> tuple[int, bytes]:
    """Return the record count of the next block, and its bytes, unpacked.

    Args:
        file: At the block.
        num_bytes: Of the file.
        codec: By which its blocks are packed.
    """
    head: Any = fastavro.schemaless_reader(file, BLOCK_HEAD, None)
    num_records, num_packed = head["num_records"], head["num_bytes"]
    if num_records < 0 or not 0 <= num_packed <= num_bytes - file.tell():
        raise ValueError(
            f"it says that it has {num_records} records in {num_packed} bytes, and "
            f"{num_bytes - file.tell()} bytes are left"
        )
    if num_packed > MAX_BLOCK_BYTES:
        raise ValueError(
            f"it has {num_packed} bytes, and at most {MAX_BLOCK_BYTES} may be: one record of "
            f"{MAX_RECORD_BYTES}, and the records before it"
        )
    data = file.read(num_packed)
    if codec == b"null":
        return num_records, data
    if codec != CODEC.encode():
        raise ValueError(f"it is packed by {codec[:20]!r}; relax topics export packs by {CODEC}")
    unpacking = zlib.decompressobj(RAW_DEFLATE)
    unpacked = unpacking.decompress(data, MAX_BLOCK_BYTES + 1)
    if len(unpacked) > MAX_BLOCK_BYTES:
        raise ValueError(
            f"its {num_packed} bytes unpack to more than {MAX_BLOCK_BYTES} bytes: one record of "
            f"{MAX_RECORD_BYTES}, and the records before it"
        )
    if not unpacking.eof:
        raise ValueError(f"its {num_packed} bytes end before what is packed in them does")
    return num_records, unpacked
