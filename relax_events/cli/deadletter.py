"""`relax deadletter`: records that a role could not process."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from relax_events.cli.parameters import Output, Overrides, RunFile, Yes
from relax_events.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from relax_events.history.run_log import RunLog
    from relax_events.ops.dead_letters import DeadLetter

COLUMNS = ["id", "time", "origin", "reason", "bytes", "key", "resolution"]
HEAD_BYTES = 256


def deadletter(
    config: RunFile,
    *overrides: Overrides,
    ids: Annotated[list[str] | None, Parameter(name="--id", negative="")] = None,
    role: str = "",
    reason: str = "",
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    resolved: Annotated[bool, Parameter(negative="")] = False,
    requeue: Annotated[bool, Parameter(negative="")] = False,
    drop: str = "",
    dry_run: bool = False,
    yes: Yes = False,
    output: Output = "table",
) -> int:
    """List dead letters, oldest first, and count them by reason; show one with its content; write
    records back to their origin topic, or mark them as dropped.

    Example: relax deadletter configs/quickstart.toml --role reward --requeue --dry-run

    Args:
        ids: Id of a dead letter; may be given several times. A single one is shown in full.
        role: Only those of this role.
        reason: Only those with this class of error, such as PoisonSample.
        all_: Those of every role, for --requeue and --drop.
        resolved: Also those that were requeued or dropped.
        requeue: Write the records back, so that the role processes them again.
        drop: Mark them as dropped, with this comment; the records stay on the log.
        dry_run: Show which, and write nothing.
    """
    from relax_events.cli.output import print_rows
    from relax_events.cli.run_reader import open_run_log
    from relax_events.ops import dead_letters

    if requeue and drop:
        raise ConfigError("--requeue and --drop exclude each other; give one")
    verb = "requeue" if requeue else "drop" if drop else ""
    selection = dead_letters.Selection(
        ids or (),
        role,
        reason,
        all_roles=all_ or not verb,
        include_resolved=resolved or (bool(ids) and not verb),
    )
    with open_run_log(config, overrides, name="deadletter") as log:
        if not verb and ids and len(ids) == 1:
            _show_one(log, ids[0], output)
            return 0
        selected = selection.choose(
            dead_letters.read_dead_letters(log, roles=[role] if role else ())
        )
        if not verb:
            _list(selected, output)
            return 0
        print_rows(COLUMNS, list(map(_cells, selected)))
        if dry_run:
            print(f"would {verb} {len(selected)} records", file=sys.stderr)
            return 0
        return _resolve(log, selected, verb, drop, yes=yes)


def _resolve(log: RunLog, selected: list[DeadLetter], verb: str, reason: str, *, yes: bool) -> int:
    """Ask, then write records back to their topics, or mark them as dropped with a reason."""
    from relax_events.cli.output import agreed
    from relax_events.kafka.producer import RecordProducer
    from relax_events.ops import dead_letters

    if selected and not agreed(f"{verb} these {len(selected)} records?", yes=yes):
        return CheckFailed.exit_code
    producer = RecordProducer(log.connection)
    if reason:
        print(f"dropped {dead_letters.drop(log, selected, producer, reason=reason)} records")
    else:
        print(f"requeued {dead_letters.requeue(log, selected, producer)} records")
    producer.close()
    return 0


def _list(dead_letters: list[DeadLetter], output: Output) -> None:
    from relax_events.cli.output import print_rows

    counts = Counter(f"{letter.role} {letter.error_class}" for letter in dead_letters)
    data = {
        "counts": counts,
        "dead_letters": [{"id": letter.id, **asdict(letter)} for letter in dead_letters],
    }
    print_rows(COLUMNS, list(map(_cells, dead_letters)), output, data=data)
    if output == "table":
        lines = "\n".join(f"{count:>6}  {what}" for what, count in counts.most_common())
        print(f"\n{lines or 'no dead letters'}")


def _cells(dead_letter: DeadLetter) -> list[Any]:
    from relax_events.cli.output import excerpt, format_time

    topic = dead_letter.origin_topic.split(".", 2)[-1]
    origin = f"{topic}[{dead_letter.origin_partition}]@{dead_letter.origin_offset}"
    reason = f"{dead_letter.error_class}: {excerpt(dead_letter.error_text, 60)}"
    return [
        dead_letter.id,
        format_time(dead_letter.written_at * 1000),
        origin,
        reason,
        dead_letter.num_bytes,
        excerpt(dead_letter.key, 24),
        dead_letter.resolution,
    ]


def _show_one(log: RunLog, name: str, output: Output) -> None:
    from relax_events.cli.output import print_fields
    from relax_events.ops.dead_letters import read_dead_letter
    from relax_events.ops.topic_tail import read_record

    dead_letter, record = read_dead_letter(log, name)
    read = read_record(log, record)
    document = {
        **asdict(dead_letter),
        "headers": dict(record.headers),
        "holds": read.event,
        "event": read.fields,
        "decoding_error": read.error,
    }
    head = record.value[:HEAD_BYTES]
    fields = {name: value for name, value in document.items() if value not in ("", {})}
    print_fields(fields, output, data=document | {"head_hex": head.hex()})
    if not read.fields and output == "table":
        print("\n".join(hex_lines(head)))


def hex_lines(data: bytes) -> list[str]:
    """Return bytes as lines of 16: offset, hexadecimal, text."""
    rows = [(start, data[start : start + 16]) for start in range(0, len(data), 16)]
    return [
        (
            f"{start:06x}  {row.hex(' '):<47}  "
            f"{''.join(chr(byte) if 32 <= byte < 127 else '.' for byte in row)}"
        )
        for start, row in rows
    ]
