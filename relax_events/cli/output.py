"""What commands print: data on stdout, as tables for people or JSON for pipes; progress and
questions on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_events.cli.parameters import Output
    from relax_events.history.runs.inherited_code import UntrustedSettingsError
    from relax_events.launcher.checks import Finding


def agreed(question: str, *, yes: bool) -> bool:
    """Return whether the change may be made; without a terminal the answer is no.

    Args:
        question: What is about to be done, for example `delete 120 records?`.
        yes: The flag `--yes`.
    """
    if yes:
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        print("no answer on stdin; give --yes", file=sys.stderr)
        return False


def accept_source(refused: UntrustedSettingsError, *, trusts: bool) -> None:
    """Show what a log names, and continue if the flag is given or the user agrees.

    Raises:
        UntrustedSettingsError: The user does not agree.
    """
    from relax_events.history.runs.inherited_code import format_values
    from relax_events.printable import printable

    if not trusts and not sys.stdin.isatty():
        raise refused
    print(
        printable(
            f"the log of run {refused.source} names what will be used "
            f"here:\n{format_values(refused.named)}"
        ),
        file=sys.stderr,
    )
    if not agreed("take all this over?", yes=trusts):
        raise refused


def print_findings(findings: Iterable[Finding]) -> None:
    """Print a line for each check."""
    for finding in findings:
        print(f"{'ok  ' if finding.is_good else 'FAIL'} {finding.what}: {finding.text}")


def print_progress(line: str) -> None:
    """Print a line about a command's progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(data: Any, *, on_a_line: bool = False) -> None:
    """Print one JSON document: indented, or on a line of a stream, which is read at once."""
    import orjson

    layout = 0 if on_a_line else orjson.OPT_INDENT_2
    print(orjson.dumps(data, option=layout | orjson.OPT_NON_STR_KEYS).decode(), flush=on_a_line)


def print_rows(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    output: Output = "table",
    *,
    data: Any = None,
) -> None:
    """Print rows under aligned columns with a dash for None, or as JSON.

    Args:
        columns: Their heads.
        rows: A cell for each column; without rows the table is its heads.
        output: For people or for programs.
        data: What programs get; by default a list of objects, one a row.
    """
    if output == "json":
        print_json([dict(zip(columns, row, strict=True)) for row in rows] if data is None else data)
        return
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [columns, *cells]:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def print_fields(
    fields: Mapping[str, Any], output: Output = "table", *, data: Any = None, indent: int = 0
) -> None:
    """Print names and values, nested ones indented, or as JSON.

    Args:
        fields: Values by name.
        output: For people or for programs.
        data: What programs get; by default the fields.
        indent: Blanks before each name.
    """
    if output == "json":
        print_json(fields if data is None else data)
        return
    for name, value in fields.items():
        if isinstance(value, Mapping):
            print(f"{'':{indent}}{name}")
            print_fields(value, indent=indent + 2)
        else:
            print(f"{'':{indent}}{name:<{25 - indent}} {value}")


def format_time(micros: int) -> str:
    """Write a time for people, UTC."""
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def format_number(value: float | None, digits: int = 3) -> str:
    """Write a number for people; a dash when there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def excerpt(text: str, length: int) -> str:
    """Return the begin of a text on one line."""
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text[: length + 1])
    return shown if len(shown) <= length else f"{shown[: max(length - 3, 0)]}..."
