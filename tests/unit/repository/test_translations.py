"""Chinese pages follow their English pages: content, code, names and links.

The first line of each Chinese page names its English page and the digest of the translated text.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.zh.md"), *(ROOT / "docs").rglob("*.zh.md")])
HEADER = re.compile(r"<!-- of: (\S+\.md) sha256: ([0-9a-f]{16}) -->\n")
BLOCK = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def english_page(page: Path) -> Path:
    """Return the English page next to a Chinese page."""
    return page.with_name(page.name.replace(".zh.md", ".md"))


def digest(page: Path) -> str:
    """Return the first 16 hex digits of the SHA-256 of a page."""
    return hashlib.sha256(page.read_bytes()).hexdigest()[:16]


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return BLOCK.sub("", page.read_text())


def code_spans(page: Path) -> set[str]:
    """Return the code within sentences, with line breaks as spaces."""
    return {" ".join(found.split()) for found in CODE.findall(prose(page))}


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in HEADING.findall(prose(page))
    }


def test_chinese_pages_exist() -> None:
    assert len(PAGES) >= 10


@every_page
def test_translation_is_of_the_current_english_page(page: Path) -> None:
    name = page.relative_to(ROOT)
    english = english_page(page)
    header = HEADER.match(page.read_text())
    assert header, f"{name} must begin with <!-- of: PAGE sha256: DIGEST -->"
    assert header[1] == str(english.relative_to(ROOT))
    assert header[2] == digest(english), (
        f"{header[1]} has changed since {name} was translated; "
        f"revise the translation, then set its sha256 to {digest(english)}"
    )


@every_page
def test_translation_has_the_same_code_blocks(page: Path) -> None:
    assert BLOCK.findall(page.read_text()) == BLOCK.findall(english_page(page).read_text())


@every_page
def test_translation_has_the_same_code_spans(page: Path) -> None:
    assert code_spans(page) == code_spans(english_page(page))


@every_page
def test_pages_link_to_each_other(page: Path) -> None:
    english = english_page(page)
    assert f"]({english.name})" in page.read_text()
    assert f"[中文]({page.name})" in english.read_text()


@every_page
def test_links_lead_to_chinese_pages_and_existing_headings(page: Path) -> None:
    for target, anchor in LINK.findall(prose(page)):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if linked.suffix == ".md" and linked != english_page(page):
            translated = linked.with_name(linked.name.replace(".md", ".zh.md"))
            assert not translated.exists(), f"link to {translated.name}"
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"
