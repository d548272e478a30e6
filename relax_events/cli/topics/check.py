"""`relax topics check`."""

from __future__ import annotations

from relax_events.cli.output import print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.cli.topics.run_topics import open_run
from relax_events.errors import CheckFailed


def check(config: RunFile, *overrides: Overrides, output: Output = "table") -> int:
    """Look whether topics, partitions, groups and transactions are in order; exit code 6 when
    something is not.

    Example: relax topics check configs/quickstart.toml

    """
    from relax_events.ops.topic_check import check_topics

    with open_run(config, overrides, may_be_new=True) as (settings, admin):
        findings = check_topics(settings, admin)
    rows = [
        [
            "note" if item.is_note else "ok" if item.is_good else "FAIL",
            item.what,
            item.text,
            item.remedy,
        ]
        for item in findings
    ]
    print_rows(["verdict", "what", "finding", "remedy"], rows, output)
    return 0 if all(item.is_good for item in findings) else CheckFailed.exit_code
