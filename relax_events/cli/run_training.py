"""`relax runs replay` and `relax runs fork`: a run trained from another's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from relax_events.cli.output import accept_source
from relax_events.cli.parameters import DEFAULT_BROKER, BrokerOptions
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.history.cluster import Cluster
    from relax_events.history.runs.forking import ParentChoice

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
        if report is not None:
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
