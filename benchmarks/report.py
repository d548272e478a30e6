"""Writes a measurement as JSON for programs and Markdown for people."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"


def machine() -> str:
    """Name the machine by what matters: cores, processor, Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


def write(name: str, *, title: str, question: str, command: str, rows: Sequence[Mapping[str, Any]], conclusion: str, data: Any = None) -> None:
    """Write `<name>.json` and `<name>.md`, and print the latter."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    document = {"title": title, "machine": machine(), "command": command, "rows": list(rows), "conclusion": conclusion, "data": data}
    (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    heads = list(rows[0])
    body = ["| " + " | ".join(str(row[head]) for head in heads) + " |" for row in rows]
    table = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *body]
    text = "\n".join([f"# {title}", "", question, "", *table, "", conclusion, "", f"Machine: {machine()}. Command: `{command}`.", ""])
    (FOLDER / f"{name}.md").write_text(text)
    print(text)
