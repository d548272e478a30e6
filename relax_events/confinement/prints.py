"""Limits what a child process prints."""

from __future__ import annotations

MAX_LINE_BYTES = 4_000
BURST_BYTES = 262_144
BYTES_PER_SECOND = 1_024.0
"""Sustained rate of printed text: 84 MiB a day."""


class PrintBudget:
    """Limits a stream of printed bytes: long lines are cut, and bytes beyond the budget are dropped
    and counted.
    """

    def __init__(self, *, now: float) -> None:
        """Begin with a full budget.

        Args:
            now: Seconds of a monotonic clock.
        """
        self._budget, self._at = float(BURST_BYTES), now
        self._line_bytes = 0
        self._num_dropped_bytes = 0

    def limit(self, data: bytes, *, now: float) -> bytes:
        """Return the part of the next bytes that may be written; a line that is cut ends in
        dots.
        """
        self._budget = min(BURST_BYTES, self._budget + (now - self._at) * BYTES_PER_SECOND)
        self._at = now
        shown = bytearray()
        for part in data.splitlines(keepends=True):
            shown += self._allowed(self._cut(part))
        return bytes(shown)

    def _cut(self, part: bytes) -> bytes:
        before, is_whole = self._line_bytes, part.endswith(b"\n")
        self._line_bytes = 0 if is_whole else before + len(part)
        room = MAX_LINE_BYTES - before
        if len(part) <= room:
            return part
        return (part[:room] + b"..." if room >= 0 and before <= MAX_LINE_BYTES else b"") + (
            b"\n" if is_whole else b""
        )

    def _allowed(self, part: bytes) -> bytes:
        if len(part) > self._budget:
            self._num_dropped_bytes += len(part)
            return b""
        self._budget -= len(part)
        if not self._num_dropped_bytes:
            return part
        note = f"({self._num_dropped_bytes} bytes that a child process printed were dropped)\n"
        self._num_dropped_bytes = 0
        return note.encode() + part
