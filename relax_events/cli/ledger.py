"""`relax ledger`: what the log proves about a run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cyclopts import App

from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.projections.ledger_findings import Finding

app = App(
    name="ledger",
    help=(
        "Prove from the log that nothing was lost or trained twice.\n\nExample: relax ledger "
        "check configs/quickstart.toml"
    ),
)


@app.command
def check(config: RunFile, *overrides: Overrides, output: Output = "table") -> int:
    """Recompute from the run's records what the run promised; exit code 6 when a promise is broken.

    Example: relax ledger check configs/quickstart.toml

    Nothing is taken from the trainer's sums: every trained sample is looked up at its recorded
    offset, and its staleness is that of the versions that drew its tokens. Each topic is read once;
    memory does not grow with the length of the run.
    """
    from relax_events.cli.output import print_fields, print_progress
    from relax_events.config import load_run_config
    from relax_events.history.ledger import read_ledger
    from relax_events.reports.reading_progress import ReadingProgress
    from relax_events.session.broker_address import attach, open_admin, require_run
    from relax_events.topics import TopicPlan

    with attach(load_run_config(config, overrides), by="relax ledger check") as settings:
        with closing(open_admin(settings, name="ledger")) as admin:
            require_run(settings, admin.topics(TopicPlan.from_config(settings).topic("")))
        ledger = read_ledger(settings, on_progress=ReadingProgress(print_progress))
    totals, findings, unproven = ledger.totals(), ledger.findings(), ledger.unverified()
    warnings = ledger.warnings()
    lists = {"problems": _as_rows(findings), "warnings": _as_rows(warnings), "unproven": unproven}
    print_fields(totals, output, data={**totals, **lists})
    if output == "table":
        for claim in unproven:
            print(f"NO PROOF  {claim}")
        _print_findings("WARNING", warnings)
        _print_findings("BROKEN", findings)
        if not findings:
            claims = f"no promise is broken; {len(unproven)} claims have no proof"
            print(claims if unproven else "all promises hold")
    return CheckFailed.exit_code if findings else 0


def _as_rows(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) | {"remedy": finding.remedy} for finding in findings]


def _print_findings(mark: str, findings: Iterable[Finding]) -> None:
    for finding in findings:
        lines = (f"{mark}  {finding.rule}: {finding.count}", *finding.examples)
        print(*lines, f"remedy: {finding.remedy}", sep="\n        ")
