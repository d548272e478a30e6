"""`relax topics plan` and `apply`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

from relax_events.cli.output import print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile, Yes
from relax_events.cli.topics.run_topics import open_run
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.config import RunConfig
    from relax_events.kafka.admin import Admin
    from relax_events.ops.topic_apply import Change

Danger = Literal["partitions", "retention", "cleanup", "record-size", "durability", "delete"]


def plan(
    config: RunFile, *overrides: Overrides, allow: tuple[Danger, ...] = (), output: Output = "table"
) -> int:
    """Show what `apply` would change, with the danger in it; exit code 6 when something would.

    Example: relax topics plan configs/quickstart.toml

    Args:
        allow: A danger that is agreed to, once for each.
    """
    with open_run(config, overrides, may_be_new=True) as (settings, admin):
        return CheckFailed.exit_code if _show_changes(settings, admin, allow, output) else 0


def apply(
    config: RunFile,
    *overrides: Overrides,
    allow: tuple[Danger, ...] = (),
    dry_run: bool = False,
    yes: Yes = False,
    output: Output = "table",
) -> int:
    """Create and alter the run's topics, and publish this release's schemas; what would lose or
    misplace records is refused without a word for it.

    Example: relax topics apply configs/quickstart.toml --dry-run

    Args:
        allow: A danger that is agreed to, once for each.
        dry_run: Show the changes and make none.
    """
    from relax_events.cli.output import agreed
    from relax_events.ops.schemas import find_missing_schemas, publish_schemas
    from relax_events.ops.topic_apply import apply_topics, require_allowed

    with open_run(config, overrides, may_be_new=True) as (settings, admin):
        changes = _show_changes(settings, admin, allow, output)
        num_missing = len(find_missing_schemas(settings, admin))
        print(f"{num_missing} schema(s) of this release to publish", file=sys.stderr)
        if dry_run or not (changes or num_missing):
            return 0
        require_allowed(changes, allow=allow)
        what = f"make {len(changes)} change(s) and publish {num_missing} schema(s)?"
        if not agreed(what, yes=yes):
            return CheckFailed.exit_code
        apply_topics(settings, admin, allow=allow)
        publish_schemas(settings, admin)
        return 0


def _show_changes(
    settings: RunConfig, admin: Admin, allow: tuple[str, ...], output: Output
) -> list[Change]:
    """Show the whole plan; return what `apply` would have to do."""
    from relax_events.ops.topic_apply import DANGERS, count_records_at_risk, plan_changes
    from relax_events.topics import TopicPlan

    topics = TopicPlan.from_config(settings)
    states = admin.topics(topics.topic(""))
    changes = plan_changes(topics.specs(), states, allow=allow)
    at_stake = count_records_at_risk(changes, admin, states)
    rows = [
        [change.kind, change.topic, change.detail, change.danger, at_stake.get(change.topic)]
        for change in changes
    ]
    print_rows(["change", "topic", "detail", "danger", "records_at_stake"], rows, output)
    for danger in sorted({change.danger for change in changes if change.danger}):
        print(f"--allow {danger}: {DANGERS[danger]}", file=sys.stderr)
    return [change for change in changes if change.is_drift]
