"""`relax topics purge`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from relax_events.cli.output import print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile, Yes
from relax_events.cli.topics.run_topics import open_run
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.ops.run_purger import PlannedPurge


def purge(
    config: RunFile,
    *overrides: Overrides,
    before_version: int | None = None,
    dry_run: bool = False,
    yes: Yes = False,
    output: Output = "table",
) -> int:
    """Delete records that only policy versions before the retained ones own, and that no reader
    needs any more.

    Example: relax topics purge configs/quickstart.toml --before-version 20 --dry-run

    What the trainer's recovery, a role or an open prompt group still needs stays, and so do the
    control topics.

    Args:
        before_version: Records of older versions go; by default all but the newest
            `run.retain_versions`.
        dry_run: Show what would go and delete nothing.
    """
    from relax_events.cli.output import agreed
    from relax_events.ops.run_purger import open_purge

    with open_run(config, overrides) as (settings, _):
        with open_purge(settings, before_version=before_version) as purge:
            total = _show_ranges(purge, output)
            if dry_run or not total:
                return 0
            if not agreed(f"delete {total} records for good?", yes=yes):
                return CheckFailed.exit_code
            purge.apply()
        return 0


def _show_ranges(purge: PlannedPurge, output: Output) -> int:
    """Show the records that would go; return their number."""
    sizes = purge.estimate_bytes()
    columns = ["topic", "partition", "records", "about_bytes", "begin", "delete_below", "held_by"]
    rows = [
        [
            *cut.topic_partition,
            cut.num_records,
            sizes.get(cut.topic_partition, 0),
            cut.begin,
            cut.end,
            cut.held_by,
        ]
        for cut in purge.ranges
        if cut.num_records
    ]
    print_rows(columns, rows, output)
    total = sum(cut.num_records for cut in purge.ranges)
    print(
        (
            f"{total} records, about {sum(sizes.values())} bytes, of versions before "
            f"{purge.before_version}"
        ),
        file=sys.stderr,
    )
    return total
