"""What a tracker was given so far, in a file of the run's folder: a metrics worker that starts
again reads the log again, and doubles nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson


class DeliveryProgress:
    """The newest step of each series, and what a tracker notes for its next process. A kill may
    cost the newest note, no more.
    """

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one."""
        self._path = path
        self._held: dict[str, Any] = {"steps": {}, "notes": {}}
        if path.exists():
            self._held |= orjson.loads(path.read_bytes())

    def is_delivered(self, series: str, step: int) -> bool:
        """Tell whether a step was written before."""
        return step <= int(self._held["steps"].get(series, -1))

    def mark_delivered(self, series: str, step: int) -> None:
        """Note a step that was written."""
        self._held["steps"][series] = step
        self._write()

    def get_note(self, name: str) -> str:
        """Return what was noted under a name; empty when nothing was."""
        return str(self._held["notes"].get(name, ""))

    def set_note(self, name: str, text: str) -> None:
        """Note something, such as the id that the tracker has for the run."""
        self._held["notes"][name] = text
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        newer = self._path.with_suffix(".new")
        newer.write_bytes(orjson.dumps(self._held))
        newer.replace(self._path)
