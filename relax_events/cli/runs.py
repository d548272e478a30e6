"""`relax runs`: the runs of a cluster, read back from their logs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import App

from relax_events.cli.output import agreed, format_time
from relax_events.cli.parameters import DEFAULT_BROKER, BrokerOptions, Output, Yes
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.history.run_log import RunLog
    from relax_events.history.runs.deletion import Deletion

app = App(
    name="runs",
    help="Look back at the runs of a cluster, and train from them.\n\nExample: relax runs show",
)
for verb in ("replay", "fork"):
    app.command(f"relax_events.cli.run_training:{verb}", name=verb)
COLUMNS = {
    "run": "run_id",
    "status": "status",
    "step": "step",
    "version": "policy_version",
    "reward": "reward",
    "started": "started_at",
    "records": "num_records",
    "source": "source",
}
CHANGE = ("caller", "identity", "address", "command", "arguments", "outcome", "answer")
"""What is shown of a change."""
STOP_MARGIN_SECONDS = 15.0
"""Waited for workers on top of the time that they may take to drain: the command has to reach them,
and the record with which a worker leaves has to reach the log."""


@app.command
def show(
    run: str = "",
    *,
    part: Literal["", "changes", "evaluations"] = "",
    dataset: str = "",
    trace: Path | None = None,
    broker: BrokerOptions = DEFAULT_BROKER,
    output: Output = "table",
) -> None:
    """List the runs of a cluster; of one run show its settings, outcomes, metrics by step, and the
    versions from which it can be trained again.

    Example: relax runs show quickstart

    Args:
        run: Id of the run, or its run file; without it all runs are listed.
        part: Show who asked for changes of the run, or its evaluations by policy version and
            dataset.
        dataset: Only the evaluations on this one.
        trace: Write the run's steps with their phases, versions, evaluations and commands into
            this file instead, as a trace that ui.perfetto.dev opens.
    """
    from relax_events.errors import ConfigError

    if dataset and part != "evaluations":
        raise ConfigError("--dataset is for --part evaluations; add that, or leave it out")
    if not run and (part or trace):
        raise ConfigError("no run is named; give its id, or its run file")
    if not run:
        _list_runs(broker, output)
    elif not part and trace is None:
        _show_overview(run, broker, output)
    else:
        _show_part(run, part, dataset, trace, broker, output)


def _list_runs(broker: BrokerOptions, output: Output) -> None:
    from relax_events.cli.output import format_number, print_rows
    from relax_events.history.runs.listing import read_runs

    cluster = broker.cluster()
    with cluster.running(by="relax runs"):
        summaries = read_runs(cluster.connection(name="runs"))
    runs = [run.as_row() for _, run in sorted(summaries.items())]
    rows = []
    for run in runs:
        cells = run | {"reward": format_number(run["reward"]), "started_at": _time(run)}
        rows.append([cells[name] for name in COLUMNS.values()])
    print_rows(list(COLUMNS), rows, output, data=runs)


def _show_overview(run: str, broker: BrokerOptions, output: Output) -> None:
    from relax_events.cli.output import print_fields, print_json, print_rows
    from relax_events.history.runs.details import details_as_dict, read_details
    from relax_events.history.runs.listing import read_run

    run_file, cluster = broker.find(run)
    with cluster.running(by="relax runs"):
        connection = cluster.connection(name="runs")
        summary = read_run(connection, run_file.run.id if run_file else run)
        tree = details_as_dict(read_details(connection, summary))
    if output == "json":
        print_json(tree)
        return
    steps = tree.pop("steps")
    tree["run"] |= {"started_at": _time(tree["run"])}
    print_fields(
        {
            part: {name: _joined(value) for name, value in values.items()}
            for part, values in tree.items()
        }
    )
    if steps:
        columns = list(steps[-1])
        print_rows(
            columns, [[_format_metric(step.get(name)) for name in columns] for step in steps]
        )


def _show_part(
    run: str, part: str, dataset: str, trace: Path | None, broker: BrokerOptions, output: Output
) -> None:
    """Show what is read from the whole log of a run, or write it as a trace."""
    from dataclasses import asdict

    from relax_events.cli.output import print_rows
    from relax_events.cli.run_reader import note_unreadable
    from relax_events.history.run_log import RunLog
    from relax_events.history.runs.details import read_changes
    from relax_events.reports.evaluations import build_table, read_evaluations

    with broker.open_run(run, name="runs") as settings, RunLog(settings, name="runs") as log:
        if trace is not None:
            _write_trace(log, trace)
        if part == "changes":
            changes = [asdict(change) for change in read_changes(log)]
            rows = [
                [format_time(change["requested_at"]), *(change[name] for name in CHANGE)]
                for change in changes
            ]
            print_rows(["time", *CHANGE], rows, output, data=changes)
        elif part:
            evaluations = [row for row in read_evaluations(log) if dataset in ("", row["dataset"])]
            print_rows(*build_table(evaluations), output, data=evaluations)
        note_unreadable(log)


def _write_trace(log: RunLog, path: Path) -> None:
    import orjson

    from relax_events.history.runs.timeline import format_trace, read_timeline

    with path.open("w") as file:
        file.writelines(format_trace(orjson.dumps(entry).decode() for entry in read_timeline(log)))
    print(f"{path}; open it at https://ui.perfetto.dev")


def _time(run: dict[str, Any]) -> str:
    return format_time(run["started_at"]) if run["started_at"] else ""


@app.command
def stop(
    run: str,
    *,
    timeout: float = 0.0,
    broker: BrokerOptions = DEFAULT_BROKER,
    output: Output = "table",
) -> int:
    """Ask all workers of a run to drain, wherever they run, and wait for it; exit code 6 when some
    do not in time. `relax run` resumes the run.

    Example: relax runs stop quickstart

    Args:
        run: Id of the run, or its run file.
        timeout: Seconds to wait for the workers; 0 is `workers.drain_seconds` and 15 s more.
    """
    from dataclasses import asdict

    from relax_events.cli.output import print_json
    from relax_events.history.live_run import stop_run

    with broker.open_run(run, name="stop") as settings:
        done = stop_run(
            settings,
            timeout_seconds=timeout or settings.workers.drain_seconds + STOP_MARGIN_SECONDS,
        )
    if output == "json":
        print_json(asdict(done))
    else:
        print(done.text)
    return CheckFailed.exit_code if done.not_drained else 0


def _joined(value: Any) -> Any:
    return (", ".join(map(str, value)) or "-") if isinstance(value, list) else value


def _format_metric(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@app.command
def delete(
    run_id: str,
    *,
    broker: BrokerOptions = DEFAULT_BROKER,
    force: bool = False,
    dry_run: bool = False,
    yes: Yes = False,
    output: Output = "table",
) -> int:
    """Delete a run's topics, groups and objects, and nothing else; logs and reports in its
    directory stay.

    Example: relax runs delete quickstart --dry-run

    Args:
        run_id: The run.
        force: Also a run with live workers, or whose rollouts another run replays.
        dry_run: Show what would go and delete nothing.
    """
    from relax_events.history.runs.deletion import delete_run, plan_deletion, require_deletable
    from relax_events.history.runs.listing import read_run, read_runs

    cluster = broker.cluster()
    with cluster.running(by="relax runs"):
        connection = cluster.connection(name="runs")
        deletion = plan_deletion(connection, run_id, run_file=cluster.run_file)
        _show_deletion(deletion, output)
        if not force:
            require_deletable(
                read_run(connection, run_id), read_runs(connection, with_progress=False).values()
            )
        if dry_run:
            return 0
        if not agreed(f"delete all this of run {run_id}?", yes=yes):
            return CheckFailed.exit_code
        delete_run(connection, deletion)
        return 0


def _show_deletion(deletion: Deletion, output: Output) -> None:
    from relax_events.cli.output import print_rows

    rows = [
        *(["topic", name, f"{count} partitions"] for name, count in deletion.topics.items()),
        *(["group", name, ""] for name in deletion.groups),
        *(
            [["objects", deletion.store_uri, f"{len(deletion.objects)} objects"]]
            if deletion.objects
            else []
        ),
    ]
    print_rows(["kind", "name", "detail"], rows, output)
    if deletion.note:
        print(f"note: {deletion.note}", file=sys.stderr)
