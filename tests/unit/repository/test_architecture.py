"""Every file and every name in `docs/architecture.md` exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]
MENTION = re.compile(
    r"`((?:relax_events|workers|docs|tests|schemas|configs)(?:/[\w.-]+)+/?)(?::([\w.]+))?`"
)


def mentions() -> list[tuple[str, str]]:
    """Return each path with the name that a page says it defines, or an empty name."""
    found = {match for page in PAGES for match in MENTION.findall(page.read_text())}
    return sorted(found)


def defines(file: Path, name: str) -> bool:
    """Return whether a module defines `Class`, `function` or `Class.method`."""
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for part in name.split("."):
        node = next(
            (
                node
                for node in body
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
            ),
            None,
        )
        if node is None:
            return False
        body = node.body
    return True


def test_architecture_pages_mention_source_files() -> None:
    assert len(mentions()) > 50


@pytest.mark.parametrize(("path", "name"), mentions())
def test_mentioned_file_exists_and_defines_the_mentioned_name(path: str, name: str) -> None:
    assert (ROOT / path).exists()
    assert not name or defines(ROOT / path, name)
