"""`relax report`: the report of a run, from its log."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path


def report(config: Path, *overrides: str) -> int:
    """Write report.html and report.json of a run from its log, at any time: also of one that was
    killed; exit code 6 when a promise is broken.

    Example: relax report configs/quickstart.toml

    `relax run` writes them at its end, whatever ended it. Both files lie in the run's folder.

    Args:
        config: The run file, TOML.
        overrides: section.key=value, overrides the run file.
    """
    from relax_events.cli.output import print_progress
    from relax_events.config import load_run_config
    from relax_events.errors import CheckFailed
    from relax_events.history.runs.replay import resolve_parent
    from relax_events.reports.reading_progress import ReadingProgress
    from relax_events.reports.run_report import find_report, rewrite_report
    from relax_events.session.broker_address import attach, open_admin, require_run
    from relax_events.session.defaults import resolve_defaults
    from relax_events.session.resume import known_settings, read_last_session
    from relax_events.topics import TopicPlan

    with attach(load_run_config(config, overrides), by="relax report") as settings:
        with closing(open_admin(settings, name="report")) as admin:
            require_run(settings, admin.topics(TopicPlan.from_config(settings).topic("")))
        settings = resolve_parent(settings)
        settings, _ = resolve_defaults(
            settings, earlier_config=known_settings(settings, read_last_session(settings))
        )
        written, ledger = rewrite_report(settings, on_progress=ReadingProgress(print_progress))
    outcome = "reached its goal" if written["succeeded"] else "did not reach its goal"
    print(
        f"run {written['run_id']} {outcome} at step {written['steps']} of "
        f"{written['num_steps']}: {written['reason']}"
    )
    print(find_report(settings.run_directory))
    print(f"export the model: {written['export_command']}")
    for warning in ledger.warnings():
        print(f"WARNING  {warning}")
    for problem in ledger.problems():
        print(f"BROKEN  {problem}")
    return CheckFailed.exit_code if ledger.problems() else 0
