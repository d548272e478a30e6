"""Data on stdout: tables for people, JSON for pipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_json(data: Any) -> None:
    """Print one JSON document."""
    import orjson

    print(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())


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
    widths = [max([len(column), *(len(row[index]) for row in cells)]) for index, column in enumerate(columns)]
    for row in [list(columns), *cells]:
        print("  ".join(f"{value:<{width}}" for value, width in zip(row, widths, strict=True)).rstrip())
