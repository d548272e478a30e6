"""What all commands share that look back at a run: its log opened from a run file, and a note on what could not be read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_events.control.run_log import RunLog


def open_run_log(config: Path, overrides: Iterable[str], *, name: str) -> RunLog:
    """Open the log of the run that a run file describes.

    Raises:
        RelaxError: The run file is wrong, no broker answers, or it has no such run.
    """
    from relax_events.config import load_run_config
    from relax_events.control.address import attach
    from relax_events.control.run_log import RunLog

    return RunLog(attach(load_run_config(config, overrides)), name=name)


def note_unreadable(log: RunLog) -> None:
    """Say on stderr which records could not be read."""
    if log.unreadable.count:
        print(f"{log.unreadable.count} records could not be read, for example:", file=sys.stderr)
        print("\n".join(f"  {text}" for text in log.unreadable.named), file=sys.stderr)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End in peace when whoever reads our output has had enough: Ctrl-C, or the other end of a pipe that closes."""
    try:
        yield
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go


def clock_time(micros: int) -> str:
    """Write a time for people, UTC."""
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def figure(value: float | None, digits: int = 3) -> str:
    """Write a number for people; a dash when there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def excerpt(text: str, length: int) -> str:
    """Return the begin of a text on one line."""
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text[: length + 1])
    return shown if len(shown) <= length else f"{shown[: max(length - 3, 0)]}..."
