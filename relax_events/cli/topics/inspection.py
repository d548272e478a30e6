"""`relax topics` check, describe, lag and tail: what is there, and how far it is read."""

from __future__ import annotations

import base64
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from relax_events.cli.output import print_json, print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.cli.topics.run_topics import open_run
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.config import RunConfig
    from relax_events.kafka.admin import Admin
    from relax_events.ops.topic_tail import TailedRecord


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


def describe(config: RunFile, *overrides: Overrides, output: Output = "table") -> None:
    """Show the run's topics: partitions, offsets, replicas, what they are for.

    Example: relax topics describe configs/quickstart.toml

    The numbers of records count the transactions' own marks, which no reader sees.

    """
    from relax_events.topics import TopicPlan

    with open_run(config, overrides) as (settings, admin):
        topics = TopicPlan.from_config(settings)
        docs = {spec.name: spec.doc for spec in topics.specs()}
        states = admin.topics(topics.topic(""))
        partitions = [
            (state.name, partition)
            for state in states.values()
            for partition in range(state.num_partitions)
        ]
        begins, ends = admin.beginning_offsets(partitions), admin.end_offsets(partitions)
        rows = []
        for name, state in sorted(states.items()):
            mine = [partition for partition in partitions if partition[0] == name]
            gone = sum(begins[partition] for partition in mine)
            kept = sum(ends[partition] - begins[partition] for partition in mine)
            rows.append(
                [
                    name,
                    state.num_partitions,
                    state.replication_factor,
                    kept,
                    gone,
                    docs.get(name, "not in the plan"),
                ]
            )
        print_rows(["topic", "partitions", "replicas", "records", "purged", "what"], rows, output)


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
            _show_lag(settings, admin, by, output)
            return
        with suppress(KeyboardInterrupt):
            while True:
                if output == "table":
                    print(CLEAR, end="", file=getattr(sys.stdout, "terminal", sys.stdout))
                _show_lag(settings, admin, by, output)
                time.sleep(every)


def _show_lag(settings: RunConfig, admin: Admin, by: str, output: Output) -> None:
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


LINE_CHARACTERS = 400


def tail(
    entity: str,
    config: RunFile,
    *overrides: Overrides,
    from_: Annotated[str, Parameter(name="--from")] = "end",
    partition: int | None = None,
    limit: int | None = None,
    follow: bool = True,
    headers: bool = False,
    raw: Literal["", "hex", "base64"] = "",
    output: Literal["table", "json"] = "table",
) -> None:
    """Show a topic's records as they come, decoded, one line each; Control-C ends it.

    Example: relax topics tail rollout.samples configs/quickstart.toml --from beginning --limit 5

    Args:
        entity: The topic without its run, for example rollout.samples or control.train-steps.
        from_: Where to begin: beginning, end, an offset, version:V or a time like
            2026-01-31T12:00:00Z.
        partition: Only this one.
        limit: End after so many records.
        follow: Wait for what comes; `--no-follow` ends at the log's end.
        headers: Show the headers too.
        raw: Show the value's bytes in this form instead of the event.
        output: A line to read, or a JSON object a line for programs.
    """
    from relax_events.history.run_log import RunLog
    from relax_events.ops import topic_tail

    with open_run(config, overrides) as (settings, admin):
        partitions = topic_tail.find_partitions(settings.run, admin, entity, partition=partition)
        with RunLog(settings, name="tail") as log, suppress(KeyboardInterrupt):
            starts = topic_tail.find_start_offsets(log, admin, partitions, from_)
            stops = None if follow else admin.end_offsets(partitions)
            for item in islice(topic_tail.tail(log, starts, stops=stops), limit):
                if output == "json":
                    print_json(_tail_document(item, headers, raw), on_a_line=True)
                else:
                    print(_tail_line(item, headers, raw), flush=True)


def _tail_content(item: TailedRecord, raw: str) -> Any:
    if raw:
        return (
            item.record.value.hex()
            if raw == "hex"
            else base64.b64encode(item.record.value).decode()
        )
    return item.error or item.fields


def _tail_document(item: TailedRecord, headers: bool, raw: str) -> dict[str, Any]:
    record = item.record
    position = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
    }
    shown = position | {
        "key": record.key,
        "event": item.event,
        "error" if item.error and not raw else "raw" if raw else "fields": _tail_content(item, raw),
    }
    return shown | ({"headers": dict(record.headers)} if headers else {})


def _tail_line(item: TailedRecord, headers: bool, raw: str) -> str:
    record = item.record
    written = (
        datetime.fromtimestamp(record.timestamp_ms / 1000, UTC)
        .isoformat(timespec="milliseconds")
        .removesuffix("+00:00")
    )
    content = _tail_content(item, raw)
    text = (
        content
        if isinstance(content, str)
        else " ".join(f"{name}={value}" for name, value in content.items())
    )
    shown = text if raw or len(text) <= LINE_CHARACTERS else f"{text[: LINE_CHARACTERS - 3]}..."
    extra = (
        "".join(f" [{name}: {value}]" for name, value in record.headers.items()) if headers else ""
    )
    return f"{written} {record.location} {record.key or '-'} {item.event}{extra} {shown}".replace(
        "\n", "\\n"
    )
