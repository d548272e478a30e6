"""`relax runs`: the runs of a cluster, read back from their logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from relax_events.cli.output import accept_source, agreed, format_time
from relax_events.cli.parameters import (
    DEFAULT_BROKER,
    BrokerOptions,
    Output,
    Overrides,
    RunFile,
    Yes,
)
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.history.cluster import Cluster
    from relax_events.history.runs.deletion import Deletion
    from relax_events.history.runs.forking import ParentChoice
    from relax_events.kafka.connection import Connection

app = App(
    name="runs",
    help="Look back at the runs of a cluster, and train from them.\n\nExample: relax runs list",
)
SourceOverrides = Annotated[
    str, Parameter(help="section.key=value, laid over the source's settings.")
]
TrustSource = Annotated[
    bool,
    Parameter(
        help=(
            "Don't ask about code, programs, addresses and files that the source's log names and "
            "no run file here does."
        )
    ),
]
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
"""How much longer than they may take to drain one waits for workers: the command has to reach them,
their goodbye us."""


@contextmanager
def _connection(broker: BrokerOptions) -> Iterator[Connection]:
    cluster = broker.cluster()
    with cluster.running(by="relax runs"):
        yield cluster.connection(name="runs")


@app.command(name="list")
def list_runs(
    run_file: Path | None = None,
    /,
    *,
    broker: BrokerOptions = DEFAULT_BROKER,
    output: Output = "table",
) -> None:
    """Show the runs of a cluster: their progress, whether they are still running, what they started
    from.

    Example: relax runs list configs/quickstart.toml

    Args:
        run_file: A run file whose broker is meant, as --config.
    """
    from relax_events.cli.output import format_number, print_rows
    from relax_events.history.runs.listing import read_runs

    with _connection(replace(broker, config=broker.config or run_file)) as connection:
        runs = [run.as_row() for _, run in sorted(read_runs(connection).items())]
    rows = []
    for run in runs:
        shown = run | {"reward": format_number(run["reward"]), "started_at": _time(run)}
        rows.append([shown[name] for name in COLUMNS.values()])
    print_rows(list(COLUMNS), rows, output, data=runs)


def _time(run: dict[str, Any]) -> str:
    return format_time(run["started_at"]) if run["started_at"] else ""


@app.command
def show(
    run_id: str,
    *,
    broker: BrokerOptions = DEFAULT_BROKER,
    output: Output = "table",
) -> None:
    """Show a run from its log: settings, outcomes, metrics by step, and the versions from which
    it can be trained again.

    Example: relax runs show quickstart

    Args:
        run_id: The run.
    """
    from relax_events.cli.output import print_fields, print_json, print_rows
    from relax_events.history.runs.details import details_as_dict, read_details
    from relax_events.history.runs.listing import read_run

    with _connection(broker) as connection:
        tree = details_as_dict(read_details(connection, read_run(connection, run_id)))
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


@app.command
def audit(
    run: str,
    *,
    broker: BrokerOptions = DEFAULT_BROKER,
    output: Output = "table",
) -> None:
    """Show who asked for changes of a run: through the API, or by a command.

    Example: relax runs audit quickstart

    Args:
        run: Id of the run, or its run file.
    """
    from dataclasses import asdict

    from relax_events.cli.output import print_rows
    from relax_events.history.run_log import RunLog
    from relax_events.history.runs.details import read_changes

    with broker.open_run(run, name="audit") as settings, RunLog(settings, name="audit") as log:
        changes = [asdict(one) for one in read_changes(log)]
    rows = [[format_time(one["requested_at"]), *(one[name] for name in CHANGE)] for one in changes]
    print_rows(["time", *CHANGE], rows, output, data=changes)


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
def timeline(
    config: RunFile,
    *overrides: Overrides,
    out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("trace.json"),
) -> None:
    """Write a run's steps with their phases, versions, evaluations and commands as a trace that
    ui.perfetto.dev opens.

    Example: relax runs timeline configs/quickstart.toml --out trace.json

    Args:
        out: The file to write; one that is there is replaced.
    """
    import orjson

    from relax_events.cli.run_reader import note_unreadable, open_run_log
    from relax_events.history.runs.timeline import format_trace, read_timeline

    with open_run_log(config, overrides, name="timeline") as log, out.open("w") as file:
        file.writelines(format_trace(orjson.dumps(entry).decode() for entry in read_timeline(log)))
        note_unreadable(log)
    print(f"{out}; open it at https://ui.perfetto.dev")


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
    import sys

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


@app.command
def replay(
    source: str,
    new: str,
    *overrides: SourceOverrides,
    from_version: int = -1,
    until_version: int = -1,
    follow: bool = False,
    scores: str = "",
    verify: bool = False,
    trust_source: TrustSource = False,
    broker: BrokerOptions = DEFAULT_BROKER,
) -> int:
    """Train again on the rollouts that a run's log holds, as they were or with other settings;
    nothing is generated.

    Example: relax runs replay quickstart quickstart-gspo algorithm.name=gspo

    Args:
        source: The run whose rollouts and weights are taken.
        new: Id of the run that is made; the same command resumes it.
        from_version: The source's version to start from; -1 is its first.
        until_version: The version to end at; -1 is the end of the source's log.
        follow: Follow a running parent, and end after it: a second learner.
        scores: Rewards of a rescoring, by its name, in place of the recorded ones.
        verify: Compare every step with the recorded one, bit for bit; exit code 6 when one differs.
    """
    from relax_events.history.runs.forking import ParentChoice

    choice = ParentChoice(
        source,
        "replay",
        from_version=from_version,
        until_version=until_version,
        follow=follow,
        scores=scores,
    )
    return _train(
        broker.cluster(),
        new,
        choice,
        overrides,
        verify=verify,
        trusts=trust_source,
    )


@app.command
def fork(
    source: str,
    new: str,
    *overrides: SourceOverrides,
    at_version: int = -1,
    from_log: bool = False,
    trust_source: TrustSource = False,
    broker: BrokerOptions = DEFAULT_BROKER,
) -> int:
    """Start an independent run from another's weights, at the same position of the data, with other
    settings.

    Example: relax runs fork quickstart quickstart-longer --at-version 30 trainer.learning_rate=1e-3

    Args:
        source: The run whose weights are taken.
        new: Id of the run that is made; the same command resumes it.
        at_version: The source's version to start from; -1 is its newest.
        from_log: Train the recorded rollouts up to that version with the new settings instead: a
            replay, to be forked in turn.
    """
    from relax_events.history.runs.forking import ParentChoice

    live, recorded = (
        ParentChoice(source, "fork", from_version=at_version),
        ParentChoice(source, "replay", until_version=at_version),
    )
    return _train(
        broker.cluster(),
        new,
        recorded if from_log else live,
        overrides,
        verify=False,
        trusts=trust_source,
    )


def _train(
    cluster: Cluster,
    new: str,
    choice: ParentChoice,
    overrides: tuple[str, ...],
    *,
    verify: bool,
    trusts: bool,
) -> int:
    from functools import partial

    from relax_events.history.cluster import Cluster
    from relax_events.history.runs.forking import make_run_file, require_verifiable
    from relax_events.history.runs.replay import verify_replay
    from relax_events.launcher.preparation import prepare_run
    from relax_events.launcher.run import RunSession
    from relax_events.reports.run_report import format_closing_line
    from relax_events.runtime.private_files import keep_private
    from relax_events.runtime.run_description import ParentRun

    with cluster.running(by="relax runs"):
        connection = cluster.connection(name="runs")
        source = ParentRun.read(connection, choice.run)
        settings = make_run_file(
            cluster, source, new, choice, overrides, accept=partial(accept_source, trusts=trusts)
        )
        if verify:
            require_verifiable(source, settings)
        keep_private(settings)
        prepare_run(settings)
        report = RunSession(settings).run()
        print(format_closing_line(report, settings.run_directory))
        if not verify:
            return 0
        verdict = verify_replay(
            Cluster.from_run_file(settings).connection(name="runs"), choice.run, new
        )
        if verdict.difference:
            print(f"differs from {choice.run}: {verdict.difference}")
            return CheckFailed.exit_code
        print(f"{verdict.num_steps} steps are those of {choice.run}, bit for bit")
        return 0
