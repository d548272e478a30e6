"""`relax eval`: how good the policy versions of a run are."""

from __future__ import annotations

from cyclopts import App

from relax_events.cli.parameters import Output, Overrides, RunFile

app = App(
    name="eval",
    help=(
        "Look at how good the policy versions of a run are.\n\nExample: relax eval show "
        "configs/quickstart.toml"
    ),
)


@app.command
def show(
    config: RunFile, *overrides: Overrides, dataset: str = "", output: Output = "table"
) -> None:
    """Show the evaluations of a run, by policy version and dataset.

    Example: relax eval show configs/quickstart.toml

    Args:
        dataset: Show only this one.
    """
    from relax_events.cli.output import print_rows
    from relax_events.cli.run_reader import note_unreadable, open_run_log
    from relax_events.reports.evaluations import build_table, read_evaluations

    with open_run_log(config, overrides, name="eval") as log:
        rows = [row for row in read_evaluations(log) if dataset in ("", row["dataset"])]
        note_unreadable(log)
    print_rows(*build_table(rows), output, data=rows)
