"""Bytes that a decoder may read in a limited number of parts.

Decoded values cost memory by their number, not by their bytes: two zeros are a header of 250 bytes.
"""

from __future__ import annotations

import io


class BoundedReads(io.BytesIO):
    """A buffer that refuses more reads than records of its size need."""

    def __init__(self, data: bytes, *, max_reads: int, of: str) -> None:
        """Buffer the bytes.

        Args:
            data: What is decoded.
            max_reads: Parts of numbers, and texts, that may be read.
            of: Names the records that need fewer reads, for the error.
        """
        super().__init__(data)
        self._max_reads = self._num_left = max_reads
        self._of = of

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next bytes.

        Raises:
            ValueError: It is one read too many.
        """
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"it has more than {self._max_reads} values, which no {self._of} have")
        return super().read(size)
