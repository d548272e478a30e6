"""`relax topics lag`."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from relax_events.cli.output import print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.cli.topics.run_topics import open_run

if TYPE_CHECKING:
    from relax_events.config import RunConfig
    from relax_events.kafka.admin import Admin

CLEAR = "\x1b[H\x1b[2J"


def lag(
    config: RunFile,
    *overrides: Overrides,
    by: Literal["slot", "member"] = "slot",
    watch: bool = False,
    every: float = 2.0,
    output: Output = "table",
) -> None:
    """Show records behind by role, and by the slot with the version that owns it or by the member
    that holds them.

    Example: relax topics lag configs/quickstart.toml --by member

    `stale` records belong to a version before the slot's owner; `oldest_seconds` is how long ago
    the oldest unread one was written. A role
    `run ID` is a run that replays this one: it counts what its newest checkpoint does not cover.

    Args:
        by: What to sum up by.
        watch: Show it again and again, until Control-C.
        every: Seconds between two looks.
    """
    with open_run(config, overrides) as (settings, admin):
        if not watch:
            _look(settings, admin, by, output)
            return
        with suppress(KeyboardInterrupt):
            while True:
                if output == "table":
                    print(CLEAR, end="", file=getattr(sys.stdout, "terminal", sys.stdout))
                _look(settings, admin, by, output)
                time.sleep(every)


def _look(settings: RunConfig, admin: Admin, by: str, output: Output) -> None:
    from relax_events.ops.consumer_lag import read_partition_lag, sum_by_member, sum_by_slot
    from relax_events.topics import TopicPlan
    from relax_events.topics.plan import list_role_inputs

    rows, now_ms = read_partition_lag(settings, admin), int(time.time() * 1000)
    if by == "slot":
        columns = ["role", "slot", "policy_version", "lag", "stale", "oldest_seconds"]
        slots = sum_by_slot(rows, now_ms=now_ms)
        print_rows(
            columns,
            [
                [
                    row.role,
                    row.slot,
                    row.policy_version,
                    row.num_records,
                    row.num_stale,
                    row.age_seconds,
                ]
                for row in slots
            ],
            output,
        )
        return
    plan = TopicPlan.from_config(settings)
    groups = admin.groups(plan.consumer_group(""))
    by_role = {
        role: groups[plan.consumer_group(role)]
        for role in list_role_inputs(settings)
        if plan.consumer_group(role) in groups
    }
    columns = ["role", "member", "host", "lag", "stale", "oldest_seconds", "partitions"]
    members = sum_by_member(rows, by_role, now_ms=now_ms)
    print_rows(
        columns,
        [
            [
                row.role,
                row.member,
                row.host,
                row.num_records,
                row.num_stale,
                row.age_seconds,
                row.partitions,
            ]
            for row in members
        ],
        output,
    )
