"""`relax topics` show and tail: what is there, and how far it is read."""

from __future__ import annotations

import base64
import sys
import time
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from relax_events.cli.output import print_json, print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.cli.run_reader import reader_may_leave
from relax_events.cli.topics.run_topics import open_run
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.config import RunConfig
    from relax_events.kafka.admin import Admin
    from relax_events.ops.topic_tail import TailedRecord


CLEAR = "\x1b[H\x1b[2J"
LINE_CHARACTERS = 400


def show(
    config: RunFile,
    *overrides: Overrides,
    by: Literal["topic", "slot", "member"] = "topic",
    check: bool = False,
    watch: bool = False,
    every: float = 2.0,
    output: Output = "table",
) -> int:
    """Show the run's topics: partitions, records, replicas, what they are for; the records behind
    by role; or whether topics, partitions, groups and transactions are in order.

    Example: relax topics show configs/quickstart.toml --by slot

    The numbers of records of topics count the transactions' own marks, which no reader sees. Of
    records behind, `stale` ones belong to a version before the slot's owner; `oldest_seconds` is
    how long ago the oldest unread one was written. A role `run ID` is a run that replays this one:
    it counts what its newest checkpoint does not cover.

    Args:
        by: Topics; or records behind by slot, with the version that owns it, or by the member that
            holds them.
        check: Check instead; exit code 6 when something is not in order.
        watch: Show it again and again, until Control-C.
        every: Seconds between two looks.
    """
    with open_run(config, overrides, may_be_new=check) as (settings, admin):
        if check:
            return _check(settings, admin, output)
        if not watch:
            _show(settings, admin, by, output)
            return 0
        with reader_may_leave():
            while True:
                if output == "table":
                    print(CLEAR, end="", file=getattr(sys.stdout, "terminal", sys.stdout))
                _show(settings, admin, by, output)
                time.sleep(every)
    return 0


def _show(settings: RunConfig, admin: Admin, by: str, output: Output) -> None:
    read = {"topic": _read_topics, "slot": _read_slots, "member": _read_members}[by]
    print_rows(*read(settings, admin), output)


def _check(settings: RunConfig, admin: Admin, output: Output) -> int:
    from relax_events.ops.topic_check import check_topics

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


def _read_topics(settings: RunConfig, admin: Admin) -> tuple[list[str], list[list[Any]]]:
    from relax_events.topics import TopicPlan

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
        doc = docs.get(name, "not in the plan")
        rows.append([name, state.num_partitions, state.replication_factor, kept, gone, doc])
    return ["topic", "partitions", "replicas", "records", "purged", "what"], rows


def _read_slots(settings: RunConfig, admin: Admin) -> tuple[list[str], list[list[Any]]]:
    from relax_events.ops.consumer_lag import read_partition_lag, sum_by_slot

    slots = sum_by_slot(read_partition_lag(settings, admin), now_ms=int(time.time() * 1000))
    rows = [
        [
            slot.role,
            slot.slot,
            slot.policy_version,
            slot.num_records,
            slot.num_stale,
            slot.age_seconds,
        ]
        for slot in slots
    ]
    return ["role", "slot", "policy_version", "lag", "stale", "oldest_seconds"], rows


def _read_members(settings: RunConfig, admin: Admin) -> tuple[list[str], list[list[Any]]]:
    from relax_events.ops.consumer_lag import read_partition_lag, sum_by_member
    from relax_events.topics import TopicPlan
    from relax_events.topics.plan import list_role_inputs

    lags, now_ms = read_partition_lag(settings, admin), int(time.time() * 1000)
    plan = TopicPlan.from_config(settings)
    groups = admin.groups(plan.consumer_group(""))
    by_role = {
        role: groups[plan.consumer_group(role)]
        for role in list_role_inputs(settings)
        if plan.consumer_group(role) in groups
    }
    rows = [
        [
            member.role,
            member.member,
            member.host,
            member.num_records,
            member.num_stale,
            member.age_seconds,
            member.partitions,
        ]
        for member in sum_by_member(lags, by_role, now_ms=now_ms)
    ]
    return ["role", "member", "host", "lag", "stale", "oldest_seconds", "partitions"], rows


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
        with RunLog(settings, name="tail") as log, reader_may_leave():
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
