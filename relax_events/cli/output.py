"""What commands print: data on stdout, as tables for people or JSON for pipes; progress and
questions on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from relax_events.history.runs.inherited_code import UntrustedSettingsError


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


def print_progress(line: str) -> None:
    """Print a line about a command's progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """Print one JSON document."""
    import orjson

    print(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())


def print_rows(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], output: Literal["table", "json"]
) -> None:
    """Print rows as a table with a dash for None, or as a JSON list of objects."""
    if output == "json":
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, [["-" if value is None else value for value in row] for row in rows])


def print_fields(data: Mapping[str, Any], output: Literal["table", "json"]) -> None:
    """Print what a model holds, as names and values or as a JSON object."""
    if output == "json":
        print_json(data)
    else:
        print_pairs(data)


def print_pairs(data: Mapping[str, Any], *, indent: int = 0) -> None:
    """Print names and values, nested ones indented."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            print(f"{'':{indent}}{name}")
            print_pairs(value, indent=indent + 2)
        else:
            print(f"{'':{indent}}{name:<{26 - indent}}{value}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under aligned columns; nothing but the heads when there are none."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [
        max([len(column), *(len(row[index]) for row in cells)])
        for index, column in enumerate(columns)
    ]
    for row in [list(columns), *cells]:
        print(
            "  ".join(
                f"{value:<{width}}" for value, width in zip(row, widths, strict=True)
            ).rstrip()
        )
