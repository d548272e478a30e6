"""The table of docs/explanation/security.md: who may write which topic."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/explanation/security.md"
HEADING = "## What a forged record can do"
ROW = re.compile(
    r"^\| `(?P<topic>[A-Za-z.-]+)` \| (?P<who>[^|]+) \| (?P<worst>[^|]+) \|$", re.MULTILINE
)


def writes_by_page(
    roles: tuple[str, ...], *, with_dead_letters: tuple[str, ...]
) -> dict[str, set[str]]:
    """Return what each role may write by the page.

    Args:
        roles: All roles; `ROLE` in a topic is replaced by each of them.
        with_dead_letters: Roles with a dead-letter topic.
    """
    writes: dict[str, set[str]] = {role: set() for role in roles}
    section = PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    for row in ROW.finditer(section):
        named = {
            "no role": (),
            "its role": roles,
            "its role, where it keeps dead letters": with_dead_letters,
        }
        for role in named.get(row["who"], row["who"].split(", ")):
            writes[role].add(row["topic"].replace("ROLE", role))
    return writes
