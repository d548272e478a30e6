"""`relax status`: the view of a running run from another shell."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from relax_events.cli.parameters import DEFAULT_BROKER, BrokerOptions, Output

if TYPE_CHECKING:
    from relax_events.projections.run_view import RunView

TURN_SECONDS = 0.5
COLUMNS = {
    "worker": "worker_id",
    "state": "state",
    "version": "policy_version",
    "processed": "num_processed",
    "in flight": "num_in_flight",
    "per s": "records_per_second",
    "last heartbeat": "heartbeat_age_seconds",
}


def status(
    run: str,
    *,
    once: bool = False,
    broker: BrokerOptions = DEFAULT_BROKER,
    output: Output = "table",
) -> None:
    """Show the progress of a run: live on a terminal until it ends or Ctrl-C, else once. The run is
    not touched.

    Example: relax status quickstart --output json

    Args:
        run: Id of the run, or its run file.
        once: Show it once on a terminal, too.
        output: A table to read, or JSON for programs, which is shown once.
    """
    from dataclasses import asdict

    from relax_events.cli.output import print_json
    from relax_events.cli.run_reader import reader_may_leave
    from relax_events.reports.status import StatusReader

    opened = broker.open_run(run, name="status")
    with opened as settings, StatusReader(settings) as reader, reader_may_leave():
        if output == "json":
            print_json(asdict(reader.read()))
        elif once or not sys.stdout.isatty():
            _print(reader.read())
        else:
            reader.show(getattr(sys.stdout, "terminal", sys.stdout), turn_seconds=TURN_SECONDS)
            _print(reader.read(), with_workers=False)


def _print(view: RunView, *, with_workers: bool = True) -> None:
    from relax_events.cli.output import print_rows
    from relax_events.printable import printable
    from relax_events.reports.terminal import format_progress

    reason = f": {view.reason}" if view.reason else ""
    print(printable(view.verdict.line))
    print(f"run {view.run_id} {view.status}{reason}")
    if with_workers:
        print(format_progress(view))
        rows = [[_cell(getattr(row, name)) for name in COLUMNS.values()] for row in view.workers]
        print_rows(list(COLUMNS), rows)


def _cell(value: str | float | None) -> str | int | None:
    return f"{value:.3g}" if isinstance(value, float) else value
