"""`relax topics tail`."""

from __future__ import annotations

import base64
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from relax_events.cli.parameters import Overrides, RunFile
from relax_events.cli.topics.run_topics import open_run

if TYPE_CHECKING:
    from relax_events.ops.topic_tail import TailedRecord

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
                print(
                    _json(item, headers, raw) if output == "json" else _line(item, headers, raw),
                    flush=True,
                )


def _content(item: TailedRecord, raw: str) -> Any:
    if raw:
        return (
            item.record.value.hex()
            if raw == "hex"
            else base64.b64encode(item.record.value).decode()
        )
    return item.error or item.fields


def _json(item: TailedRecord, headers: bool, raw: str) -> str:
    import orjson

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
        "error" if item.error and not raw else "raw" if raw else "fields": _content(item, raw),
    }
    return orjson.dumps(shown | ({"headers": dict(record.headers)} if headers else {})).decode()


def _line(item: TailedRecord, headers: bool, raw: str) -> str:
    record = item.record
    written = (
        datetime.fromtimestamp(record.timestamp_ms / 1000, UTC)
        .isoformat(timespec="milliseconds")
        .removesuffix("+00:00")
    )
    content = _content(item, raw)
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
