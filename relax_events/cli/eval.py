"""`relax eval`: how good the policy versions of a run are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cyclopts import App

app = App(
    name="eval",
    help=(
        "Look at how good the policy versions of a run are.\n\nExample: relax eval show "
        "configs/quickstart.toml"
    ),
)


@app.command
def show(
    config: Path, *overrides: str, dataset: str = "", output: Literal["table", "json"] = "table"
) -> None:
    """Show the evaluations of a run, by policy version and dataset.

    Example: relax eval show configs/quickstart.toml

    Args:
        config: The run file, TOML.
        overrides: section.key=value, overrides the run file.
        dataset: Show only this one.
        output: A table to read, or JSON for programs.
    """
    from relax_events.cli.output import print_json, print_table
    from relax_events.cli.run_reader import note_unreadable, open_run_log
    from relax_events.reports.evaluations import build_table, read_evaluations

    with open_run_log(config, overrides, name="eval") as log:
        rows = [row for row in read_evaluations(log) if dataset in ("", row["dataset"])]
        note_unreadable(log)
    if output == "json":
        print_json(rows)
    else:
        print_table(*build_table(rows))
