"""Bounds what a reward function prints: it may print without end, and the log that takes it has a disk."""

from __future__ import annotations

MAX_LINE_BYTES = 4_000
BURST_BYTES = 262_144
BYTES_PER_SECOND = 1_024.0
"""Of printed text, over a long time: 84 MiB a day."""


class PrintBudget:
    """Says what of a stream of printed bytes is written: lines are cut, and what exceeds the budget is counted in its place."""

    def __init__(self, *, now: float) -> None:
        """Begin with a full budget.

        Args:
            now: Seconds, by any clock that only grows.
        """
        self._budget, self._at = float(BURST_BYTES), now
        self._line_bytes = 0
        self._num_left_out = 0

    def take(self, data: bytes, *, now: float) -> bytes:
        """Return what is written of the next bytes; a line that is cut ends in dots."""
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
        return (part[:room] + b"..." if room >= 0 and before <= MAX_LINE_BYTES else b"") + (b"\n" if is_whole else b"")

    def _allowed(self, part: bytes) -> bytes:
        if len(part) > self._budget:
            self._num_left_out += len(part)
            return b""
        self._budget -= len(part)
        if not self._num_left_out:
            return part
        note, self._num_left_out = f"({self._num_left_out} bytes that the reward function printed are left out)\n".encode(), 0
        return note + part
