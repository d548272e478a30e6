"""Writes a measurement as JSON for programs and Markdown for people."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / ".relax" / "benchmarks"
"""Outside the tree: `docs/benchmarks.md` says what was measured, where and when."""


def machine() -> str:
    """Name the machine by what matters: cores, processor, Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


Rows = Sequence[Mapping[str, Any]]


def write(
    name: str,
    *,
    title: str,
    command: str,
    question: str = "",
    conclusion: str = "",
    rows: Rows = (),
    tables: Mapping[str, Rows] | None = None,
    data: Any = None,
    folder: Path = FOLDER,
) -> None:
    """Write `<name>.json` and `<name>.md`, and print the latter.

    Args:
        name: Of the files.
        title: Heading of the page.
        command: What measures it again.
        question: What was measured, and how.
        conclusion: What the metrics say.
        rows: The one table, where there is one.
        tables: Further tables by their headings.
        data: What the tables were made from, for the JSON alone.
        folder: Where the files go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = {heading: list(table) for heading, table in (tables or {}).items()}
    document = {
        "title": title,
        "machine": machine(),
        "command": command,
        "rows": list(rows),
        "tables": named,
        "conclusion": conclusion,
        "data": data,
    }
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    parts = [
        f"# {title}",
        *([question] if question else []),
        *([lay_out_table(rows)] if rows else []),
    ]
    for heading, table in named.items():
        parts += [f"## {heading}", lay_out_table(table)]
    if conclusion:
        parts += [*(["## What follows"] if named else []), conclusion]
    parts += [f"Machine: {machine()}. Command: `{command}`."]
    text = "\n\n".join(parts) + "\n"
    (folder / f"{name}.md").write_text(text)
    print(text)


def lay_out_table(rows: Rows) -> str:
    """Lay rows out as a Markdown table; the first row names the columns."""
    heads = list(rows[0])
    body = ["| " + " | ".join(str(row[head]) for head in heads) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *body])
