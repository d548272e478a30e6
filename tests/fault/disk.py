"""Reads a broker's log files on disk: finds record batches, and flips one bit of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OVERHEAD_BYTES = 12
HEADER_BYTES = 61
"""Of a record batch, format 2. Source: Kafka documentation, "Record Batch"."""


@dataclass(frozen=True, slots=True)
class BatchOnDisk:
    """A record batch in a segment file."""

    file: Path
    at_byte: int
    num_bytes: int
    first: int
    last: int

    def flip_a_bit(self) -> None:
        """Alter its last byte but one, which belongs to its last record."""
        data = bytearray(self.file.read_bytes())
        data[self.at_byte + self.num_bytes - 2] ^= 1
        self.file.write_bytes(data)


def batches(partition_folder: Path) -> Iterator[BatchOnDisk]:
    """Yield the record batches of a partition in order; the zeros after the last one are not a batch."""
    for file in sorted(partition_folder.glob("*.log")):
        data, at = file.read_bytes(), 0
        while at + HEADER_BYTES <= len(data):
            first, length = struct.unpack_from(">qi", data, at)
            (delta,) = struct.unpack_from(">i", data, at + 23)
            if length == 0:
                break
            yield BatchOnDisk(file, at, OVERHEAD_BYTES + length, first, first + delta)
            at += OVERHEAD_BYTES + length
