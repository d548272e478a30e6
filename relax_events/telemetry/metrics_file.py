"""The metrics file of a run, with the log offsets that it contains, where a restarted process
continues.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson


class MetricsFile:
    """A file of JSON lines, and `<name>.position.json` with the number of bytes that belong to the
    saved offsets.

    Lines that a killed process wrote after the last save are truncated and written again, so no
    line is duplicated or missing.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at the last saved position, or create it."""
        self._notes = path.with_name(f"{path.stem}.position.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = self._saved(path)
        self.positions: dict[str, int] = saved["positions"]
        """Offsets at which to continue, by topic; empty when nothing was saved, so that everything
        is read."""
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(saved["bytes"])
        self._file.seek(saved["bytes"])

    def _saved(self, path: Path) -> dict[str, Any]:
        try:
            saved: dict[str, Any] = orjson.loads(self._notes.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            saved = {"bytes": 0, "positions": {}}
        is_whole = path.exists() and path.stat().st_size >= saved["bytes"]
        return saved if is_whole else {"bytes": 0, "positions": {}}

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        self._file.write(orjson.dumps(line) + b"\n")

    def save(self, positions: Mapping[str, int]) -> None:
        """Record that the file contains all metrics before these offsets."""
        self.positions = dict(positions)
        newer = self._notes.with_suffix(".new")
        newer.write_bytes(orjson.dumps({"bytes": self._file.tell(), "positions": self.positions}))
        os.replace(newer, self._notes)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
