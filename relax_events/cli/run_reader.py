"""What all commands share that look back at a run: its log opened from a run file, and a note on
what could not be read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_events.config import RunConfig
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


@contextmanager
def open_run(
    run: str, *, config: Path | None, bootstrap_servers: str, directory: Path, name: str
) -> Iterator[RunConfig]:
    """Give the configuration of a run on some broker, with the broker's address and the operator's
    principal filled in.

    Args:
        run: Its id, or its run file, which names the broker as well.
        config: A run file whose broker is meant, for an id.
        bootstrap_servers: The cluster that is meant, for an id.
        directory: Where the embedded broker is, for an id without either.
        name: Of the command.
    Raises:
        RelaxError: Two brokers are named, none answers, or it has no such run.
    """
    from relax_events.config import load_run_config
    from relax_events.errors import ConfigError
    from relax_events.history.cluster import Cluster
    from relax_events.history.runs.listing import read_run

    run_file = load_run_config(Path(run)) if is_run_file(run) else None
    cluster = (
        Cluster.from_options(
            config=config, bootstrap_servers=bootstrap_servers, directory=directory
        )
        if run_file is None
        else Cluster.from_run_file(run_file)
    )
    with cluster.running(by=f"relax {name}"):
        connection = cluster.connection(name=name)
        summary = read_run(connection, run if run_file is None else run_file.run.id)
        settings = run_file or summary.config
        if settings is None:
            raise ConfigError(
                f"the log of run {run} does not describe it: it is half deleted; give its run file"
            )
        yield settings.model_copy(update={"broker": cluster.broker_with_address})


def note_unreadable(log: RunLog) -> None:
    """Say on stderr which records could not be read."""
    if log.unreadable.count:
        print(f"{log.unreadable.count} records could not be read, for example:", file=sys.stderr)
        print("\n".join(f"  {text}" for text in log.unreadable.named), file=sys.stderr)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exit without an error on Ctrl-C."""
    with suppress(KeyboardInterrupt):
        yield
