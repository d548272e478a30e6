"""`relax deadletter`: records that a role could not process."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from relax_events.cli.parameters import Output, Overrides, RunFile, Yes
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.history.run_log import RunLog
    from relax_events.kafka.producer import RecordProducer
    from relax_events.ops.dead_letters import DeadLetter, Selection

app = App(
    name="deadletter",
    help=(
        "List, show, requeue and drop records that a role could not process.\n\nExample: "
        "relax deadletter list "
        "configs/quickstart.toml"
    ),
)
Ids = Annotated[list[str] | None, Parameter(name="--id", negative="")]
COLUMNS = ["id", "time", "origin", "reason", "bytes", "key", "resolution"]
HEAD_BYTES = 256


@app.command(name="list")
def list_(
    config: RunFile,
    *overrides: Overrides,
    role: str = "",
    reason: str = "",
    resolved: bool = False,
    output: Output = "table",
) -> None:
    """List dead letters, oldest first, and count them by reason.

    Example: relax deadletter list configs/quickstart.toml --role reward

    Args:
        role: Only those of this role.
        reason: Only those with this class of error, such as PoisonSample.
        resolved: Also those that were requeued or dropped.
    """
    from relax_events.cli.output import print_rows
    from relax_events.cli.run_reader import open_run_log
    from relax_events.ops.dead_letters import read_dead_letters

    with open_run_log(config, overrides, name="deadletter") as log:
        selected = [
            dead_letter
            for dead_letter in read_dead_letters(log, roles=[role] if role else ())
            if reason in ("", dead_letter.error_class)
        ]
    selected = [dead_letter for dead_letter in selected if resolved or not dead_letter.resolution]
    counts = Counter(f"{dead_letter.role} {dead_letter.error_class}" for dead_letter in selected)
    data = {
        "counts": counts,
        "dead_letters": [{"id": dead_letter.id, **asdict(dead_letter)} for dead_letter in selected],
    }
    print_rows(COLUMNS, list(map(_cells, selected)), output, data=data)
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


@app.command
def show(
    id_: Annotated[str, Parameter(name="ID")],
    config: RunFile,
    *overrides: Overrides,
    output: Output = "table",
) -> None:
    """Show one dead letter: its origin, its error and its content.

    Example: relax deadletter show reward@12 configs/quickstart.toml

    Args:
        id_: Id of the dead letter, as `list` shows it.
    """
    from relax_events.cli.output import print_fields
    from relax_events.cli.run_reader import open_run_log
    from relax_events.ops.dead_letters import read_dead_letter
    from relax_events.ops.topic_tail import read_record

    with open_run_log(config, overrides, name="deadletter") as log:
        dead_letter, record = read_dead_letter(log, id_)
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


@app.command
def requeue(
    config: RunFile,
    *overrides: Overrides,
    ids: Ids = None,
    role: str = "",
    reason: str = "",
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    force: bool = False,
    dry_run: bool = False,
    yes: Yes = False,
) -> int:
    """Write records back to their origin topic, so that the role processes them again.

    Example: relax deadletter requeue configs/quickstart.toml --role reward --dry-run

    Args:
        ids: Id of a dead letter, as `list` shows it; may be given several times.
        role: Those of this role.
        reason: Those with this class of error.
        all_: Those of every role.
        force: Also those that were requeued or dropped before.
        dry_run: Show which, and write nothing.
    """
    from relax_events.cli.run_reader import open_run_log
    from relax_events.ops import dead_letters

    selection = dead_letters.Selection(ids or (), role, reason, all_, force)
    with open_run_log(config, overrides, name="deadletter") as log:
        selected = _choose(log, selection, "requeue", dry_run=dry_run, yes=yes)
        if selected is None:
            return 0 if dry_run else CheckFailed.exit_code
        producer = _producer(log)
        print(f"requeued {dead_letters.requeue(log, selected, producer)} records")
        producer.close()
    return 0


@app.command
def drop(
    config: RunFile,
    *overrides: Overrides,
    comment: str,
    ids: Ids = None,
    role: str = "",
    reason: str = "",
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    dry_run: bool = False,
    yes: Yes = False,
) -> int:
    """Mark dead letters as dropped, with a comment; the records stay on the log.

    Example: relax deadletter drop configs/quickstart.toml --id reward@12 --comment "written by
        a test"

    Args:
        comment: Why the records are dropped, kept with the resolution.
        ids: Id of a dead letter, as `list` shows it; may be given several times.
        role: Those of this role.
        reason: Those with this class of error.
        all_: Those of every role.
        dry_run: Show which, and write nothing.
    """
    from relax_events.cli.run_reader import open_run_log
    from relax_events.ops import dead_letters

    selection = dead_letters.Selection(ids or (), role, reason, all_)
    with open_run_log(config, overrides, name="deadletter") as log:
        selected = _choose(log, selection, "drop", dry_run=dry_run, yes=yes)
        if selected is None:
            return 0 if dry_run else CheckFailed.exit_code
        producer = _producer(log)
        print(f"dropped {dead_letters.drop(log, selected, producer, reason=comment)} records")
        producer.close()
    return 0


def _choose(
    log: RunLog, selection: Selection, verb: str, *, dry_run: bool, yes: bool
) -> list[DeadLetter] | None:
    """Show the selected dead letters; return them when the user agrees."""
    from relax_events.cli.output import agreed, print_rows
    from relax_events.ops.dead_letters import read_dead_letters

    selected = selection.choose(
        read_dead_letters(log, roles=[selection.role] if selection.role else ())
    )
    print_rows(COLUMNS, list(map(_cells, selected)))
    if dry_run:
        print(f"would {verb} {len(selected)} records", file=sys.stderr)
        return None
    return (
        selected
        if not selected or agreed(f"{verb} these {len(selected)} records?", yes=yes)
        else None
    )


def _producer(log: RunLog) -> RecordProducer:
    from relax_events.kafka.producer import RecordProducer

    return RecordProducer(log.connection)
