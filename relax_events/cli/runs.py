"""`relax runs`: the runs of a cluster, read back from their logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from relax_events.cli.output import accept_source, agreed

if TYPE_CHECKING:
    from relax_events.history.cluster import Cluster
    from relax_events.history.runs.deletion import Deletion
    from relax_events.history.runs.forking import ParentChoice
    from relax_events.history.runs.listing import RunSummary
    from relax_events.kafka.connection import Connection

app = App(
    name="runs",
    help="Look back at the runs of a cluster, and train from them.\n\nExample: relax runs list",
)
Output = Literal["table", "json"]
Config = Annotated[Path | None, Parameter(help="A run file whose broker is meant.")]
Servers = Annotated[str, Parameter(help="The cluster that is meant, as host:port,host:port.")]
Directory = Annotated[Path, Parameter(help="Where runs and the embedded broker keep their files.")]
HOME = Path(".relax")
STOP_MARGIN_SECONDS = 15.0
"""How much longer than they may take to drain one waits for workers: the command has to reach them,
their goodbye us."""


def _cluster(config: Path | None, bootstrap_servers: str, directory: Path) -> Cluster:
    from relax_events.history.cluster import Cluster

    return Cluster.from_options(
        config=config, bootstrap_servers=bootstrap_servers, directory=directory
    )


@contextmanager
def _connection(
    config: Path | None, bootstrap_servers: str, directory: Path
) -> Iterator[Connection]:
    cluster = _cluster(config, bootstrap_servers, directory)
    with cluster.running(by="relax runs"):
        yield cluster.connection(name="runs")


@app.command(name="list")
def list_runs(
    run_file: Path | None = None,
    /,
    *,
    config: Config = None,
    bootstrap_servers: Servers = "",
    directory: Directory = HOME,
    output: Output = "table",
) -> None:
    """Show the runs of a cluster: their progress, whether they are still running, what they started
    from.

    Example: relax runs list configs/quickstart.toml

    Args:
        run_file: A run file whose broker is meant, as --config.
        config: A run file whose broker is meant.
        bootstrap_servers: The cluster that is meant, as host:port,host:port.
        directory: Folder of the embedded broker, unless another option names a broker.
        output: A table to read, or JSON for programs.
    """
    from relax_events.cli.output import print_json, print_table
    from relax_events.history.runs.listing import read_runs

    with _connection(config or run_file, bootstrap_servers, directory) as connection:
        rows = [_row(run) for _, run in sorted(read_runs(connection).items())]
    if output == "json":
        print_json(rows)
        return
    for row in rows:
        row["reward"] = "-" if row["reward"] is None else f"{row['reward']:.3f}"
    columns = ["run", "state", "steps", "version", "reward", "started", "records", "source"]
    print_table(columns, [[row[column] for column in columns] for row in rows])


def _row(run: RunSummary) -> dict[str, Any]:
    return {
        "run": run.run_id,
        "state": run.status,
        "steps": run.num_steps,
        "version": run.policy_version,
        "reward": run.state.reward,
        "started": _time(run.started_at),
        "records": run.num_records,
        "source": run.source,
    }


def _time(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S") if micros else ""


@app.command
def show(
    run_id: str,
    *,
    config: Config = None,
    bootstrap_servers: Servers = "",
    directory: Directory = HOME,
    output: Output = "table",
) -> None:
    """Show a run from its log: settings, outcomes, metrics by step, and the versions from which
    it can be trained again.

    Example: relax runs show quickstart

    Args:
        run_id: The run.
        config: A run file whose broker is meant.
        bootstrap_servers: The cluster that is meant, as host:port,host:port.
        directory: Folder of the embedded broker, unless another option names a broker.
        output: A table to read, or JSON for programs.
    """
    from relax_events.cli.output import print_json, print_pairs, print_table
    from relax_events.history.runs.details import details_as_dict, read_details
    from relax_events.history.runs.listing import read_run

    with _connection(config, bootstrap_servers, directory) as connection:
        tree = details_as_dict(read_details(connection, read_run(connection, run_id)))
        if output == "json":
            print_json(tree)
            return
        steps = tree.pop("steps")
        tree["run"] |= {"started_at": _time(tree["run"]["started_at"])}
        print_pairs(
            {
                part: {name: _joined(value) for name, value in values.items()}
                for part, values in tree.items()
            }
        )
        if steps:
            columns = list(steps[-1])
            print_table(
                columns, [[_format_metric(step.get(name)) for name in columns] for step in steps]
            )


@app.command
def stop(
    run: str,
    *,
    timeout: Annotated[
        float,
        Parameter(
            help="Seconds to wait for the workers; by default as long as they may take to drain."
        ),
    ] = 0.0,
    config: Config = None,
    bootstrap_servers: Servers = "",
    directory: Directory = HOME,
    output: Output = "table",
) -> int:
    """Ask all workers of a run to drain, wherever they run, and wait for it; exit code 6 when some
    do not in time. `relax run` resumes the run.

    Example: relax runs stop quickstart

    Args:
        run: Id of the run, or its run file.
        timeout: How long to wait for the workers, in seconds; 0 stands for `workers.drain_seconds`
            and 15 s more.
        config: A run file whose broker is meant.
        bootstrap_servers: The cluster that is meant, as host:port,host:port.
        directory: Folder of the embedded broker, unless another option names a broker.
        output: A text to read, or JSON for programs.
    """
    from dataclasses import asdict

    from relax_events.cli.output import print_json
    from relax_events.cli.run_reader import open_run
    from relax_events.history.live_run import stop_run

    with open_run(
        run, name="stop", config=config, bootstrap_servers=bootstrap_servers, directory=directory
    ) as settings:
        done = stop_run(
            settings,
            timeout_seconds=timeout or settings.workers.drain_seconds + STOP_MARGIN_SECONDS,
        )
    if output == "json":
        print_json(asdict(done))
    else:
        print(done.text)
    return 6 if done.not_drained else 0


def _joined(value: Any) -> Any:
    return (", ".join(map(str, value)) or "-") if isinstance(value, list) else value


def _format_metric(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@app.command
def timeline(
    config: Path,
    *overrides: str,
    out: Annotated[Path, Parameter(name=["--out", "-o"], help="The file to write.")] = Path(
        "trace.json"
    ),
) -> None:
    """Write a run's steps with their phases, versions, evaluations and commands as a trace that
    ui.perfetto.dev opens.

    Example: relax runs timeline configs/quickstart.toml --out trace.json

    Args:
        config: The run file.
        overrides: section.key=value, overrides the run file.
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
    config: Config = None,
    bootstrap_servers: Servers = "",
    directory: Directory = HOME,
    force: bool = False,
    dry_run: bool = False,
    yes: bool = False,
    output: Output = "table",
) -> int:
    """Delete a run's topics, groups and objects, and nothing else; logs and reports in its
    directory stay.

    Example: relax runs delete quickstart --dry-run

    Args:
        run_id: The run.
        config: A run file whose broker is meant.
        bootstrap_servers: The cluster that is meant, as host:port,host:port.
        directory: Folder of the embedded broker, unless another option names a broker.
        force: Also a run with live workers, or whose rollouts another run replays.
        dry_run: Show what would go and delete nothing.
        yes: Don't ask.
        output: A table to read, or JSON for programs.
    """
    from relax_events.history.runs.deletion import delete_run, plan_deletion, require_deletable
    from relax_events.history.runs.listing import read_run, read_runs

    cluster = _cluster(config, bootstrap_servers, directory)
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
            return 6
        delete_run(connection, deletion)
        return 0


def _show_deletion(deletion: Deletion, output: Output) -> None:
    import sys

    from relax_events.cli.output import print_json, print_table

    rows = [
        *(["topic", name, f"{count} partitions"] for name, count in deletion.topics.items()),
        *(["group", name, ""] for name in deletion.groups),
        *(
            [["objects", deletion.store_uri, f"{len(deletion.objects)} objects"]]
            if deletion.objects
            else []
        ),
    ]
    if output == "json":
        print_json([dict(zip(("kind", "name", "detail"), row, strict=True)) for row in rows])
    else:
        print_table(["kind", "name", "detail"], rows)
    if deletion.note:
        print(f"note: {deletion.note}", file=sys.stderr)


@app.command
def replay(
    source: str,
    new: str,
    *overrides: str,
    from_version: int = -1,
    until_version: int = -1,
    follow: bool = False,
    scores: str = "",
    verify: bool = False,
    trust_source: bool = False,
    config: Config = None,
    bootstrap_servers: Servers = "",
    directory: Directory = HOME,
) -> int:
    """Train again on the rollouts that a run's log holds, as they were or with other settings;
    nothing is generated.

    Example: relax runs replay quickstart quickstart-gspo algorithm.name=gspo

    Args:
        source: The run whose rollouts and weights are taken.
        new: Id of the run that is made; the same command resumes it.
        overrides: section.key=value, laid over the source's settings.
        from_version: The source's version to start from; -1 is its first.
        until_version: The version to end at; -1 is the end of the source's log.
        follow: Follow a running parent, and end after it: a second learner.
        scores: Rewards of a rescoring, by its name, in place of the recorded ones.
        verify: Compare every step with the recorded one, bit for bit; exit code 6 when one differs.
        trust_source: Don't ask about code, programs, addresses and files that the source's log
            names and no run file here does.
        config: A run file whose broker is meant.
        bootstrap_servers: The cluster that is meant, as host:port,host:port.
        directory: Where runs are kept, and the embedded broker unless one of the other two says
            where to look.
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
        _cluster(config, bootstrap_servers, directory),
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
    *overrides: str,
    at_version: int = -1,
    from_log: bool = False,
    trust_source: bool = False,
    config: Config = None,
    bootstrap_servers: Servers = "",
    directory: Directory = HOME,
) -> int:
    """Start an independent run from another's weights, at the same position of the data, with other
    settings.

    Example: relax runs fork quickstart quickstart-longer --at-version 30 trainer.learning_rate=1e-3

    Args:
        source: The run whose weights are taken.
        new: Id of the run that is made; the same command resumes it.
        overrides: section.key=value, laid over the source's settings.
        at_version: The source's version to start from; -1 is its newest.
        from_log: Train the recorded rollouts up to that version with the new settings instead: a
            replay, to be forked in turn.
        trust_source: Don't ask about code, programs, addresses and files that the source's log
            names and no run file here does.
        config: A run file whose broker is meant.
        bootstrap_servers: The cluster that is meant, as host:port,host:port.
        directory: Where runs are kept, and the embedded broker unless one of the other two says
            where to look.
    """
    from relax_events.history.runs.forking import ParentChoice

    live, recorded = (
        ParentChoice(source, "fork", from_version=at_version),
        ParentChoice(source, "replay", until_version=at_version),
    )
    return _train(
        _cluster(config, bootstrap_servers, directory),
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
        found = verify_replay(
            Cluster.from_run_file(settings).connection(name="runs"), choice.run, new
        )
        same = f"{found.num_steps} steps are those of {choice.run}, bit for bit"
        print(f"differs from {choice.run}: {found.difference}" if found.difference else same)
        return 6 if found.difference else 0
