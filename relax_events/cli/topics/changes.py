"""`relax topics` apply, purge and reset: changes, each shown before it is made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from relax_events.cli.output import print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile, Yes
from relax_events.cli.topics.run_topics import open_run
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.config import RunConfig
    from relax_events.kafka.admin import Admin
    from relax_events.ops.offset_reset import ResetPlan
    from relax_events.ops.run_purger import PlannedPurge
    from relax_events.ops.topic_apply import Change


OUTPUT_HELP = Parameter(
    help=(
        "The changes as a table to read, or JSON for programs. Or the plan as a document, without "
        "a broker and with no change: Strimzi's topics and users for kubectl, or AsyncAPI 3."
    )
)
Danger = Literal["partitions", "retention", "cleanup", "record-size", "durability", "delete"]


def apply(
    config: RunFile,
    *overrides: Overrides,
    allow: tuple[Danger, ...] = (),
    dry_run: bool = False,
    yes: Yes = False,
    output: Annotated[Literal["table", "json", "strimzi", "asyncapi"], OUTPUT_HELP] = "table",
    cluster: str = "relax",
) -> int:
    """Create and alter the run's topics, and publish this release's schemas; what would lose or
    misplace records is refused without a word for it.

    Example: relax topics apply configs/quickstart.toml --dry-run

    Args:
        allow: A danger that is agreed to, once for each.
        dry_run: Show the changes and make none; exit code 6 when there are any.
        cluster: With --output strimzi, the name of the cluster's Kafka resource.
    """
    if output == "strimzi" or output == "asyncapi":
        _print_document(config, overrides, output, cluster)
        return 0
    from relax_events.cli.output import agreed
    from relax_events.ops.schemas import find_missing_schemas, publish_schemas
    from relax_events.ops.topic_apply import apply_topics, require_allowed

    with open_run(config, overrides, may_be_new=True) as (settings, admin):
        changes = _show_changes(settings, admin, allow, output)
        num_missing = len(find_missing_schemas(settings, admin))
        print(f"{num_missing} schema(s) of this release to publish", file=sys.stderr)
        if dry_run or not (changes or num_missing):
            return CheckFailed.exit_code if changes or num_missing else 0
        require_allowed(changes, allow=allow)
        what = f"make {len(changes)} change(s) and publish {num_missing} schema(s)?"
        if not agreed(what, yes=yes):
            return CheckFailed.exit_code
        apply_topics(settings, admin, allow=allow)
        publish_schemas(settings, admin)
        return 0


def _print_document(
    config: Path, overrides: tuple[str, ...], form: Literal["strimzi", "asyncapi"], cluster: str
) -> None:
    from relax_events.cli.output import print_json
    from relax_events.config import load_run_config
    from relax_events.ops.topic_documents import build_asyncapi, build_strimzi

    settings = load_run_config(config, overrides)
    if form == "asyncapi":
        print_json(build_asyncapi(settings))
    else:
        items = build_strimzi(settings, cluster=cluster)
        print_json({"apiVersion": "v1", "kind": "List", "items": items})


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
