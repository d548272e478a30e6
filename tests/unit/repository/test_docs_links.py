"""A reader finds every page of the docs within three links of the README, and every decision from a
page or a module that it decides."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
README, CONTENTS = ROOT / "README.md", ROOT / "docs" / "contents.md"
MAX_LINKS = 3


def find_linked_pages(page: Path) -> set[Path]:
    """Return the pages that a page links to."""
    targets = ((page.parent / target).resolve() for target in LINK.findall(page.read_text()))
    return {target for target in targets if target.suffix == ".md" and target.exists()}


def find_pages() -> set[Path]:
    """Return every page of the docs in English."""
    return {page for page in (ROOT / "docs").rglob("*.md") if not page.name.endswith(".zh.md")}


def test_every_page_is_within_three_links_of_the_readme() -> None:
    reached = newest = {README}
    for _ in range(MAX_LINKS):
        newest = set().union(*map(find_linked_pages, newest)) - reached
        reached |= newest
    assert find_pages() - reached == set(), "link these pages from docs/contents.md"


def test_every_decision_is_named_where_it_applies() -> None:
    decisions = set((ROOT / "docs" / "adr").glob("*.md"))
    linked = set().union(*map(find_linked_pages, find_pages() - decisions - {CONTENTS}))
    modules = [*(ROOT / "relax_events").rglob("*.py"), *(ROOT / "workers").rglob("*.py")]
    named = set(re.findall(r"\bADR 0*(\d+)\b", "".join(path.read_text() for path in modules)))
    missing = {path.name for path in decisions - linked if str(int(path.name[:4])) not in named}
    assert missing == set(), "link these decisions from a page that they decide"
