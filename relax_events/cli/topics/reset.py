"""`relax topics reset`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relax_events.cli.output import print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile, Yes
from relax_events.cli.topics.run_topics import open_run
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.ops.offset_reset import ResetPlan


def reset(
    config: RunFile,
    *overrides: Overrides,
    role: str,
    to_version: int | None = None,
    to_time: str = "",
    to_offset: tuple[str, ...] = (),
    to_beginning: bool = False,
    to_end: bool = False,
    allow: tuple[Literal["trainer", "skip"], ...] = (),
    dry_run: bool = False,
    yes: Yes = False,
    output: Output = "table",
) -> int:
    """Move what a role reads next: to a policy version, a time, named offsets, the beginning or the
    end.

    Example: relax topics reset configs/quickstart.toml --role reward --to-version 5 --dry-run

    The role must be stopped. Records that are read again are harmless: their ids are known.

    Args:
        role: For example reward, judge, reference, actor-forward, critic, teacher, advantage.
        to_version: Read this policy version and what came after it.
        to_time: Read what was written since then, ISO 8601.
        to_offset: topic[partition]@offset, once for each partition.
        to_beginning: Read everything again.
        to_end: Pass over everything.
        allow: A danger that is agreed to: `skip` unread records, or touch the `trainer`.
        dry_run: Show the moves and make none.
    """
    from relax_events.cli.output import agreed
    from relax_events.ops.offset_reset import (
        ResetTarget,
        apply_reset,
        parse_time_ms,
        plan_reset,
        require_safe_reset,
    )

    with open_run(config, overrides) as (settings, admin):
        target = ResetTarget(
            version=to_version,
            time_ms=parse_time_ms(to_time) if to_time else None,
            offsets=to_offset,
            to_beginning=to_beginning,
            to_end=to_end,
        )
        plan = plan_reset(settings, admin, role, target)
        _show_moves(plan, output)
        if dry_run or not plan.moves:
            return 0
        require_safe_reset(admin, plan, allow=allow)
        if not agreed(f"move {len(plan.moves)} offset(s) of {plan.consumer_group}?", yes=yes):
            return CheckFailed.exit_code
        apply_reset(admin, plan, allow=allow)
        return 0


def _show_moves(plan: ResetPlan, output: Output) -> None:
    """Show the offsets before and after, and how many records are read again or passed over."""
    columns = ["topic", "partition", "before", "after", "read_again", "passed_over"]
    rows = [
        [
            *move.topic_partition,
            move.before,
            move.after,
            max(-move.num_skipped, 0),
            max(move.num_skipped, 0),
        ]
        for move in plan.moves
    ]
    print_rows(columns, rows, output)
