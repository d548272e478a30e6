"""The file of figures that the metrics role adds to, and where on the log it stands: a process that
starts again goes on there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson


class MetricsFile:
    """JSON lines, and beside them in `<name>.position.json` how many bytes of the file belong to
    which positions of the log.

    What a killed process wrote behind the last saved position is cut off and written again, so no
    line is doubled and none is missing.
    """

    def __init__(self, path: Path) -> None:
        """Open the file where the last process saved it, or a new one."""
        self._notes = path.with_name(f"{path.stem}.position.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = self._saved(path)
        self.positions: dict[str, int] = saved["positions"]
        """Offsets to read on at, by entity; empty where nothing was saved, and everything is to be
        read."""
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
        """Note that the file holds what lies before these positions of the log."""
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
