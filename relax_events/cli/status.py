"""`relax status`: the view of a running run from another shell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from relax_events.reports.status import RunStatus

TURN_SECONDS = 0.5


def status(
    run: str,
    *,
    once: bool = False,
    config: Path | None = None,
    bootstrap_servers: str = "",
    directory: Path = Path(".relax"),
    output: Literal["table", "json"] = "table",
) -> None:
    """Show the progress of a run: live on a terminal until it ends or Ctrl-C, else once. The run is
    not touched.

    Example: relax status quickstart --output json

    Args:
        run: Id of the run, or its run file.
        once: Show it once on a terminal, too.
        config: A run file whose broker is meant.
        bootstrap_servers: The cluster that is meant, as host:port,host:port.
        directory: Folder of the embedded broker, unless another option names a broker.
        output: A table to read, or JSON for programs, which is shown once.
    """
    from relax_events.cli.output import print_json
    from relax_events.cli.run_reader import open_run, reader_may_leave
    from relax_events.reports.status import StatusReader

    opened = open_run(
        run, config=config, bootstrap_servers=bootstrap_servers, directory=directory, name="status"
    )
    with opened as settings, StatusReader(settings) as reader, reader_may_leave():
        if output == "json":
            print_json(reader.read().as_json())
        elif once or not sys.stdout.isatty():
            _print(reader.read())
        else:
            reader.show(getattr(sys.stdout, "terminal", sys.stdout), turn_seconds=TURN_SECONDS)
            _print(reader.read(), with_workers=False)


def _print(found: RunStatus, *, with_workers: bool = True) -> None:
    from relax_events.cli.output import print_table
    from relax_events.reports.terminal import format_progress

    reason = f": {found.reason}" if found.reason else ""
    print(f"run {found.run_id} {found.status}{reason}")
    if with_workers:
        print(format_progress(found.progress, found.workers))
        columns = [
            "worker",
            "state",
            "version",
            "processed",
            "in flight",
            "per s",
            "last heartbeat",
        ]
        print_table(
            columns, [[_cell(value) for value in found.row(worker)] for worker in found.workers]
        )


def _cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
