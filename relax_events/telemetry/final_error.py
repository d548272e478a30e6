"""The error that ended a worker, as the last line of its log, for the supervisor to read."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from relax_events.printable import write_line
from relax_events.secret_handling import redact

EVENT = "worker.failed"
MAX_TEXT = 4000
TAIL_BYTES = 2**18
"""Far more than a process writes after its final error."""


@dataclass(frozen=True, slots=True)
class FinalError:
    """The error that ended a process.

    Attributes:
        pid: The process id: a log holds the output of several consecutive processes.
        error_class: The exception's class.
        text: The error text, truncated if long.
        exit_code: The process's exit code.
        failed_at: Microseconds since the epoch.
    """

    pid: int
    error_class: str
    text: str
    exit_code: int
    failed_at: int

    def __str__(self) -> str:
        """Return class and text, like the last line of a traceback."""
        return f"{self.error_class}: {self.text}" if self.text else self.error_class


def write_final_error(error: BaseException, *, exit_code: int) -> None:
    """Write the error that ends this process to stderr as one line of JSON, independent of the log
    format.
    """
    text = redact(str(error))[:MAX_TEXT]
    final = FinalError(os.getpid(), type(error).__name__, text, exit_code, time.time_ns() // 1000)
    line = orjson.dumps({"event": EVENT, "level": "error", **asdict(final)}).decode()
    write_line(f"\n{line}", sys.stderr)


def read_final_error(path: Path, *, pid: int) -> FinalError | None:
    """Return the error that ended a process, or None when it wrote none because a signal or the
    interpreter ended it.

    Args:
        path: The process's log.
        pid: The process id.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    errors = (
        final
        for line in reversed(lines)
        if EVENT.encode() in line and (final := _parsed(line)) is not None
    )
    return next((final for final in errors if final.pid == pid), None)


def _parsed(line: bytes) -> FinalError | None:
    try:
        event = orjson.loads(line)
        return FinalError(
            event["pid"],
            event["error_class"],
            event["text"],
            event["exit_code"],
            event["failed_at"],
        )
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None  # a line that only mentions the event
