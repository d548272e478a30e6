"""The quickstart is watched in a browser from its first minute until it has ended: the link comes from
the output of `relax run`, every page is filled while the run is running, and the open page says at
last that it has ended.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from command_line import call_relax, report_of

from tests.axe import fetch_axe, find_violations
from tests.chromium import Chromium, find_chromium

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
LINK = re.compile(r"(http://127\.0\.0\.1:\d+)/\?token=\S+")
ROW = "document.querySelector('tbody a[data-focus^=row-]')"
SHOWS = {
    "alarms": "document.querySelector('main h1')",
    "overview": "document.querySelectorAll('[data-plot] canvas').length >= 6",
    "timeline": "document.querySelectorAll('main svg rect').length > 20",
    "lag": "document.querySelectorAll('tbody tr').length >= 3",
    "samples": f"document.querySelectorAll('tbody tr').length >= 20 && {ROW}",
    "samples&row=0": "document.querySelectorAll('main .said').length >= 2"
    " && document.querySelectorAll('main .card').length >= 8",
    "lineage": "document.querySelectorAll('main dl dt, main tbody tr').length > 3",
    "deadletters": "document.querySelector('main')",
    "fleet": "document.querySelector('main').innerText.includes('rollout-0')",
    "config": "document.querySelector('main').innerText.includes('max_staleness')",
    "tails": "document.querySelector('main').innerText.includes('rollout-0')",
    "runs": "document.querySelectorAll('tbody tr').length >= 1",
}
LOOKS = list(product((400, 1400), ("dark", "light"), ("zh", "en")))
FOLDER_OF_IMAGES = "RELAX_TEST_PHOTOGRAPHS"
"""Names the folder where photographs of the pages are kept; else they go to the test's own."""
PNG_WIDTH = slice(16, 20)
PAGE_SECONDS = 400
"""The page's server gives way to whatever else a busy machine runs, other tests too."""
needs_chromium = pytest.mark.skipif(not find_chromium(), reason="no Chromium is installed")


@dataclass(frozen=True, slots=True)
class Run:
    """A running quickstart: `link` opens its page once, at `address` from then on."""

    run_id: str
    link: str
    address: str
    process: subprocess.Popen[bytes]
    output: Path


@contextmanager
def quickstart(bootstrap_servers: str, run_id: str, folder: Path, *settings: str) -> Iterator[Run]:
    """Run the quickstart during the block; it is killed if it did not end by itself."""
    output = folder / "output.txt"
    command = [sys.executable, "-m", "relax_events.cli", "run", str(QUICKSTART), f"run.id={run_id}"]
    command += [f"broker.bootstrap_servers={bootstrap_servers}", f"model.path={folder / 'model'}"]
    environment = {name: value for name, value in os.environ.items() if name[:6] != "RELAX_"}
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [*command, *settings], cwd=folder, stdout=sink, stderr=sink, env=environment
        )
    try:
        link = wait_for_link(output, process)
        yield Run(run_id, link[0], f"{link[1]}/?run={run_id}", process, output)
    finally:
        process.kill()
        process.wait()


def wait_for_link(output: Path, process: subprocess.Popen[bytes]) -> re.Match[str]:
    """Wait until the run prints the link to its page."""
    stop = time.monotonic() + 400
    while not (found := LINK.search(output.read_text())):
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < stop, output.read_text()
        time.sleep(0.1)
    return found


def open_link(browser: Chromium, run: Run) -> None:
    """Open the link, which leads to the address without the token."""
    browser.open(run.link)
    browser.wait_for("document.getElementById('main') && !location.search.includes('token')")


def wait_for_step(browser: Chromium, step: int) -> None:
    """Wait until the head of the page shows this train step, or a later one."""
    shown = "Number(document.getElementById('step')?.innerText.split('/')[0].replace(/\\D/g, ''))"
    browser.wait_for(f"{shown} >= {step}", seconds=600)


def photograph(browser: Chromium, folder: Path, name: str, width: int) -> None:
    """Keep what the page looks like."""
    chosen = Path(os.environ.get(FOLDER_OF_IMAGES) or folder / "photographs")
    chosen.mkdir(parents=True, exist_ok=True)
    path = chosen / f"{name}.png"
    browser.photograph(path, whole=False)
    assert int.from_bytes(path.read_bytes()[PNG_WIDTH]) == width


def show(browser: Chromium, address: str, page: str, *, is_loaded: bool = False) -> None:
    """Open a page, or turn to it where another one is loaded; wait until it shows the run."""
    target = f"{address}&page={page}"
    if is_loaded:
        browser.run(f"history.pushState(null, '', {json.dumps(target)})")
        browser.run("dispatchEvent(new PopStateEvent('popstate')) && null")
    else:
        browser.open(target)
    name = page.partition("&")[0]
    browser.wait_for(
        f"document.getElementById('main')?.dataset.page === '{name}' && ({SHOWS[page]})"
    )
    assert not browser.run("!!document.querySelector('main .banner.bad')"), page


def find_wrong(browser: Chromium, language: str, theme: str) -> list[str]:
    """Return what is wrong with how the shown page looks."""
    found = []
    if browser.run("document.documentElement.scrollWidth > innerWidth"):
        found.append("wider than the window")
    if browser.run("document.documentElement.lang") != language:
        found.append("another language")
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    if (sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128) != (theme == "dark"):
        found.append(f"background {background}")
    return found


def requests_elsewhere(browser: Chromium, address: str) -> list[str]:
    """Return the requests of the browser that went to another server."""
    server = address.partition("/?")[0]
    asked = [one for one in browser.requests if one.startswith(("http", "ws"))]
    assert asked
    return [one for one in asked if not one.startswith(f"{server}/")]


def wait_for_end(browser: Chromium, run: Run) -> int:
    """Wait until the open page says that the run has ended, and then that its server has too."""
    browser.wait_for("document.getElementById('status')?.innerText === 'ended'", seconds=300)
    browser.wait_for("document.getElementById('server-gone')", seconds=300)
    assert browser.run("document.getElementById('status').innerText") == "ended"
    assert not browser.run("!!document.querySelector('main .banner.bad')")
    return run.process.wait(300)


@needs_chromium
@pytest.mark.timeout(600)
def test_open_page_follows_a_short_quickstart_to_its_end(
    bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    with (
        quickstart(bootstrap_servers, run_id, tmp_path, "run.num_steps=12") as run,
        Chromium(timeout_seconds=PAGE_SECONDS) as browser,
    ):
        browser.resize(1400)
        open_link(browser, run)
        show(browser, run.address, "samples")
        assert wait_for_end(browser, run) == 0, run.output.read_text()
        assert browser.run("document.getElementById('step').innerText") == "12/12"
        assert browser.run("document.querySelectorAll('tbody tr').length") == 50
        assert requests_elsewhere(browser, run.address) == []
    assert report_of(tmp_path, run_id)["steps"] == 12


@needs_chromium
@pytest.mark.long
@pytest.mark.timeout(3000)
def test_every_page_of_a_running_quickstart_in_every_look(
    bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    axe = fetch_axe(tmp_path)
    # so that no machine is too slow to look at every page
    with (
        quickstart(bootstrap_servers, run_id, tmp_path, "run.num_steps=100000") as run,
        Chromium(timeout_seconds=PAGE_SECONDS) as browser,
    ):
        browser.resize(1400)
        open_link(browser, run)
        browser.open(f"{run.address}&page=overview")
        browser.wait_for("document.getElementById('status')?.innerText === 'running'")
        wait_for_step(browser, 5)
        wrong = []
        for (width, theme, language), page in product(LOOKS, SHOWS):
            browser.resize(width, dark=theme == "dark")
            is_loaded = page != next(iter(SHOWS))
            show(browser, f"{run.address}&lang={language}", page, is_loaded=is_loaded)
            look = f"{page.replace('&', '-')}-{width}-{theme}-{language}"
            found = find_wrong(browser, language, theme) + find_violations(browser, axe)
            wrong += [f"{look}: {one}" for one in found]
            photograph(browser, tmp_path, look, width)
        assert wrong == []
        assert run.process.poll() is None, run.output.read_text()
        stopped = call_relax(
            *("runs", "stop", run_id, "--bootstrap-servers", bootstrap_servers),
            cwd=tmp_path,
            timeout_seconds=300,
        )
        assert stopped.code == 0, stopped.err
        assert wait_for_end(browser, run) == 1, run.output.read_text()
        assert requests_elsewhere(browser, run.address) == []
        gone = [one for one in browser.problems if "ERR_" not in one]
        assert gone == [], "when its server has ended, calls of the page fail"
    report = report_of(tmp_path, run_id)
    assert report["steps"] >= 5
    assert report["ledger_problems"] == []
