"""Builds the docs site: `make site`, or `python docs/site.py FOLDER` in the environment of
`requirements/site.txt`.

The pages are those of the checkout; nothing is written twice. README.md is the first page, each
folder gets a page that lists its pages, and a file outside `docs` that a page links to is copied.
Any warning fails the build: a link without a target, an anchor that no heading has, a page that the
navigation lacks.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jieba
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
SWITCH = re.compile(r"\[(?:中文|English)\]\([^)]*\)(?: · )?")
"""Links from a page to its other language, for which the site has a menu."""
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
HEADING_OR_BLOCK = re.compile(r"^```.*?^```$|^##+ (?P<heading>[^\n]+)$", re.MULTILINE | re.DOTALL)
ZH, MD = ".zh.md", ".md"
MOVED = {
    "README": "index",
    "CONTRIBUTING": "project/contributing",
    "CHANGELOG": "project/changelog",
    "SECURITY": "project/security-policy",
}
"""Pages of the checkout's top, and where the site has them."""
FOLDERS = {
    "tutorials": ("Tutorials", "教程"),
    "how-to": ("How-to guides", "操作指南"),
    "explanation": ("Explanation", "原理"),
    "reference": ("Reference", "参考"),
    "adr": ("Decisions", "设计决策"),
}
"""Folders of `docs`, with the titles of the pages that list what is in them."""
FIRST = (
    "how-to/install.md",
    "tutorials/first-run.md",
    "how-to/migrate.md",
    "explanation/known-pains.md",
)


def locate(path: Path) -> Path:
    """Return where the site has a file or folder of the checkout; for a page in Chinese, where it
    has that page in English, since the site finds the translation itself.
    """
    name = path.relative_to(ROOT).as_posix()
    stem = name.removesuffix(ZH).removesuffix(MD)
    if stem in MOVED:
        return Path(f"{MOVED[stem]}.md")
    if path.is_dir():
        return Path(name).relative_to("docs") / "index.md"
    if name.startswith("docs/"):
        return Path(f"{stem}.md" if name.endswith(MD) else name).relative_to("docs")
    return Path("files") / name


def slug(heading: str) -> str:
    """Return the anchor that GitHub, and the site, make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def add_english_anchors(text: str, english: str) -> str:
    """Give each heading of a page in Chinese the anchor that it has in English too: pages that are
    not translated link to that one.
    """
    found = [one["heading"] for one in HEADING_OR_BLOCK.finditer(english) if one["heading"]]
    headings = iter(found)

    def anchored(match: re.Match[str]) -> str:
        if not match["heading"]:
            return match[0]
        return f'<a id="{slug(next(headings))}"></a>\n\n{match[0]}'

    same = sum(bool(one["heading"]) for one in HEADING_OR_BLOCK.finditer(text)) == len(found)
    return HEADING_OR_BLOCK.sub(anchored, text) if same else text


class Pages:
    """The pages of the site, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        """Copy every page, and write those that list others."""
        self._folder = folder
        self._titles: dict[tuple[str, bool], str] = {}
        tops = [ROOT / f"{name}{end}" for name in MOVED for end in (MD, ZH)]
        for page in [*tops, *sorted((ROOT / "docs").rglob("*.md"))]:
            if page.exists():
                self._copy(page)
        for name in FOLDERS:
            for is_chinese in (False, True):
                self._list(name, is_chinese=is_chinese)

    def _copy(self, page: Path) -> None:
        text = SWITCH.sub("", page.read_text("utf-8"))
        is_chinese = page.name.endswith(ZH)
        target = locate(page)
        title = TITLE.search(text)
        self._titles[target.as_posix(), is_chinese] = title[1] if title else target.stem
        text = LINK.sub(lambda link: self._move(link, page), text)
        if is_chinese:
            english = page.with_name(page.name.replace(ZH, MD)).read_text("utf-8")
            text = add_english_anchors(text, english)
        self._write(target.with_suffix(ZH) if is_chinese else target, text)

    def _move(self, link: re.Match[str], page: Path) -> str:
        """Return a link as the site needs it, and copy what it leads to unless it is a page."""
        linked = (page.parent / link["path"]).resolve()
        if not linked.exists():
            return link[0]  # the build names it
        target = locate(linked)
        if linked.is_file() and linked.suffix != MD:
            (self._folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, self._folder / target)
        return os.path.relpath(target, locate(page).parent) + (link["anchor"] or "")

    def _list(self, name: str, *, is_chinese: bool) -> None:
        lines = [f"# {FOLDERS[name][is_chinese]}", ""]
        for path in self.of(name):
            title = self._titles.get((path, is_chinese)) or self._titles[path, False]
            lines.append(f"- [{title}]({Path(path).name})")
        self._write(Path(name) / f"index{ZH if is_chinese else MD}", "\n".join(lines) + "\n")

    def _write(self, path: Path, text: str) -> None:
        (self._folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / path).write_text(text, "utf-8")

    def of(self, name: str) -> list[str]:
        """Return the pages of a folder, in the order of their titles."""
        found = [path for path, is_chinese in self._titles if not is_chinese]
        inside = [path for path in found if Path(path).parent.as_posix() == name]
        if name == "adr":
            return sorted(inside)
        return sorted(inside, key=lambda path: self._titles[path, False].lower())

    def navigation(self) -> list[Any]:
        """Return the order of the pages, as mkdocs takes it."""

        def section(name: str) -> list[Any]:
            return [f"{name}/index.md", *(path for path in self.of(name) if path not in FIRST)]

        return [
            "index.md",
            {"Start": ["contents.md", *FIRST, "tutorials/index.md"]},
            {"How-to": section("how-to")},
            {"Concepts": ["architecture.md", "glossary.md", *section("explanation")]},
            {"Reference": section("reference")},
            {"Benchmarks": "benchmarks.md"},
            {"Decisions": section("adr")},
            {"Project": self.of("project")},
        ]


def build_site(target: Path) -> None:
    """Build the site into a folder, which is emptied first."""
    with tempfile.TemporaryDirectory(prefix="site-") as folder:
        jieba.dt.tmp_dir = folder
        pages = Pages(Path(folder) / "pages")
        config = load_config(
            str(ROOT / "docs" / "site.yml"),
            docs_dir=str(Path(folder) / "pages"),
            site_dir=str(target),
            nav=pages.navigation(),
            strict=True,
        )
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
        config.plugins.on_shutdown()


def main() -> None:
    """Build the site into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Build the docs site.")
    parser.add_argument("folder", type=Path)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    jieba.setLogLevel(logging.WARNING)
    folder: Path = parser.parse_args().folder.resolve()
    build_site(folder)
    print(f"open {folder / 'index.html'}")


if __name__ == "__main__":
    main()
