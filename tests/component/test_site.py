"""The docs site: it builds without a warning, every link of every page leads somewhere, and a browser
finds pages in both languages without asking another server.

The generator is installed in an environment of its own, `make site`.
"""

from __future__ import annotations

import os
import posixpath
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.chromium import Chromium, find_chromium

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-site" / "bin" / "python"
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
"""Elements that a browser loads by itself."""
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make site`")


class Page(HTMLParser):
    """What a page links to, loads, and offers as anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if found := named.get("id"):
            self.anchors.add(found)
        if tag == "a" and (found := named.get("href")):
            self.links.append(found)
        is_named = tag == "link" and named.get("rel") in {"canonical", "alternate"}
        if (found := named.get(LOADED.get(tag, ""))) and not is_named:
            self.loaded.append(found)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; any warning of the generator fails it."""
    folder = tmp_path_factory.mktemp("site") / "built"
    done = subprocess.run(
        [PYTHON, "docs/site.py", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """Return every page by its path."""
    return {
        path.relative_to(site).as_posix(): Page(path.read_text("utf-8"))
        for path in sorted(site.rglob("*.html"))
    }


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    """Serve the site on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(20)


def test_every_page_of_the_docs_is_on_the_site_once_in_each_language(
    pages: dict[str, Page],
) -> None:
    names = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if not path.name.endswith(".zh.md")
    }
    assert len(names) > 80
    assert {
        "index.html",
        "how-to/install.html",
        "adr/0001-the-trainer-decides-prompt-group-outcomes.html",
    } <= names | {"index.html"}
    assert sorted(names - set(pages)) == []
    assert sorted(f"zh/{name}" for name in names if f"zh/{name}" not in pages) == []


def test_every_link_leads_to_a_page_and_a_heading(pages: dict[str, Page], site: Path) -> None:
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    broken = []
    for name, page in pages.items():
        for link in {*page.links, *page.loaded}:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            folder = "" if link.startswith("/") else posixpath.dirname(name)
            path = unquote(target.path).lstrip("/" if link.startswith("/") else "")
            found = posixpath.normpath(posixpath.join(folder, path)) if path else name
            found = found if found in files else posixpath.normpath(f"{found}/index.html")
            fragment = unquote(target.fragment)
            if found not in files or (
                fragment and found in pages and fragment not in pages[found].anchors
            ):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_no_page_loads_anything_from_another_server(pages: dict[str, Page], site: Path) -> None:
    loaded = {link for page in pages.values() for link in page.loaded}
    assert {link for link in loaded if urlsplit(link).netloc} == set()
    styles = [path.read_text("utf-8") for path in site.rglob("*.css")]
    assert styles
    assert not any("url(http" in text or "url(//" in text for text in styles)


@pytest.mark.skipif(not find_chromium(), reason="no Chromium is installed")
@pytest.mark.timeout(300)
def test_browser_finds_pages_in_both_languages_offline(url: str) -> None:
    with Chromium(timeout_seconds=120) as browser:
        browser.resize(1400)
        browser.open(f"{url}/index.html")
        browser.wait_for("document.querySelector('h1')?.innerText.includes('Relax Events')")
        find(browser, "staleness consumer offset", "explanation/staleness.html")
        browser.open(f"{url}/tutorials/first-run.html")
        browser.wait_for("document.querySelector('a[hreflang=zh]')")
        browser.run("document.querySelector('a[hreflang=zh]').click()")
        browser.wait_for("location.pathname === '/zh/tutorials/first-run.html'")
        browser.wait_for("document.documentElement.lang === 'zh' && document.querySelector('h1')")
        find(browser, "奖励函数", "zh/how-to/rewards.html")
        for page in ("index.html", "zh/index.html", "reference/config.html", "how-to/migrate.html"):
            browser.resize(400)
            browser.open(f"{url}/{page}")
            browser.wait_for(f"location.pathname === '/{page}' && document.querySelector('h1')")
            # once the navigation has slid out
            browser.wait_for("document.documentElement.scrollWidth <= innerWidth")
        asked = [one for one in browser.requests if one.startswith(("http", "ws"))]
        assert [one for one in asked if not one.startswith(url)] == []
        # the theme looks for a sitemap next to each page of the other language, and does without
        assert [one for one in browser.problems if not one.endswith("/sitemap.xml")] == []


def find(browser: Chromium, words: str, page: str) -> None:
    """Type words into the search, and wait until a page is among what it finds."""
    browser.wait_for("document.querySelector('input[name=query]')")
    browser.run(
        "(() => { const input = document.querySelector('input[name=query]');"
        "document.querySelector('#__search').checked = true; input.focus();"
        f"input.value = '{words}';"
        "input.dispatchEvent(new Event('input', {bubbles: true}));"
        "input.dispatchEvent(new Event('keyup', {bubbles: true})); })()"
    )
    browser.wait_for(
        f"[...document.querySelectorAll('.md-search-result__link')].some(a => new URL(a.href).pathname === '/{page}')"
    )
