"""What all commands share that look back at a run: its log opened from a run file, and a note on
what could not be read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from relax_events.cli.entry import raise_lost_signals

if TYPE_CHECKING:
    from relax_events.history.run_log import RunLog


@contextmanager
def open_run_log(config: Path, overrides: Iterable[str], *, name: str) -> Iterator[RunLog]:
    """Open the log of the run that a run file describes; an embedded broker that is down is brought
    up for the block.

    Raises:
        RelaxError: The run file is wrong, no broker answers, or it has no such run.
    """
    from relax_events.config import load_run_config
    from relax_events.history.run_log import RunLog
    from relax_events.session.broker_address import attach

    with (
        attach(load_run_config(config, overrides), by=f"relax {name}") as settings,
        RunLog(settings, name=name) as log,
    ):
        yield log


def is_run_file(run: str) -> bool:
    """Return whether a run was named by its run file; an id holds neither a dot nor a slash."""
    return "." in run or "/" in run


def run_folder(run: str, directory: Path) -> Path:
    """Return the folder in which a run keeps its files on this machine.

    Args:
        run: Its id, or its run file.
        directory: Where runs keep their files, for an id.
    Raises:
        ConfigError: The run file is wrong.
    """
    from relax_events.config import load_run_config

    return (
        load_run_config(Path(run)).run_directory if is_run_file(run) else directory / "runs" / run
    )


def note_unreadable(log: RunLog) -> None:
    """Say on stderr which records could not be read."""
    if log.unreadable.count:
        print(f"{log.unreadable.count} records could not be read, for example:", file=sys.stderr)
        print("\n".join(f"  {text}" for text in log.unreadable.named), file=sys.stderr)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exit without an error on Ctrl-C."""
    with suppress(KeyboardInterrupt), raise_lost_signals():
        yield
