"""The quickstart is watched in a browser from its first minute until it is interrupted: the address
comes from the output of `relax run`, and every page is filled while the run is running.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import report_of

from tests.chromium import Chromium, find_chromium

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\?run=\S+")
SHOWS = {
    "alarms": "document.querySelector('main h1')",
    "overview": "document.querySelectorAll('[data-plot] canvas').length >= 6",
    "timeline": "document.querySelectorAll('main svg rect').length > 20",
    "lag": "document.querySelectorAll('tbody tr').length >= 3",
    "samples": "document.querySelectorAll('tbody tr').length >= 20",
    "lineage": "document.querySelectorAll('main dl dt, main tbody tr').length > 3",
    "deadletters": "document.querySelector('main')",
    "fleet": "document.querySelector('main').innerText.includes('rollout-0')",
    "config": "document.querySelector('main').innerText.includes('max_staleness')",
    "tails": "document.querySelector('main').innerText.includes('rollout-0')",
    "runs": "document.querySelectorAll('tbody tr').length >= 1",
}
INTERRUPTED = 130
FOLDER_OF_IMAGES = "RELAX_TEST_PHOTOGRAPHS"
"""Names the folder where photographs of the pages are kept; none are kept without it."""


def address_of(output: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait until the run prints where its page is."""
    stop = time.monotonic() + 400
    while not (found := ADDRESS.search(output.read_text())):
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < stop, output.read_text()
        time.sleep(0.1)
    return found.group()


def photograph(browser: Chromium, name: str) -> None:
    """Keep what the page looks like, where a folder is named."""
    if folder := os.environ.get(FOLDER_OF_IMAGES):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.photograph(Path(folder) / f"{name}.png", whole=False)


def look_at_every_page(browser: Chromium, address: str, name: str) -> None:
    """Open every page, and wait until it shows the run."""
    for page, shows in SHOWS.items():
        browser.open(f"{address}&page={page}")
        browser.wait_for(f"document.getElementById('main')?.dataset.page === '{page}' && ({shows})")
        assert not browser.run("!!document.querySelector('main .banner.bad')"), page
        photograph(browser, f"{name}-{page}")


@pytest.mark.skipif(not find_chromium(), reason="no Chromium is installed")
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_quickstart_is_watched_until_it_is_interrupted(
    bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    output = tmp_path / "output.txt"
    command = [sys.executable, "-m", "relax_events.cli", "run", str(QUICKSTART), f"run.id={run_id}"]
    command += [f"broker.bootstrap_servers={bootstrap_servers}", f"model.path={tmp_path / 'model'}"]
    command += ["run.num_steps=100000"]  # so that no machine is too slow to look at every page
    environment = {name: value for name, value in os.environ.items() if name[:6] != "RELAX_"}
    with output.open("wb") as sink:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=sink, stderr=sink, env=environment)
    try:
        address = address_of(output, process)
        with Chromium(timeout_seconds=120) as browser:
            browser.resize(1400)
            browser.open(f"{address}&page=overview")
            browser.wait_for("document.getElementById('status')?.innerText === 'running'")
            step = "Number(document.getElementById('step')?.innerText.split('/')[0])"
            browser.wait_for(f"{step} >= 5", seconds=600)
            look_at_every_page(browser, address, "running-light-en")
            browser.resize(400, dark=True)
            look_at_every_page(browser, f"{address}&lang=zh", "running-dark-zh")
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
            server = address.partition("/?")[0]
            asked = [one for one in browser.requests if one.startswith(("http", "ws"))]
            assert [one for one in asked if not one.startswith(server)] == []
            assert browser.problems == []
            process.send_signal(signal.SIGINT)
        assert process.wait(600) == INTERRUPTED, output.read_text()
    finally:
        process.kill()
        process.wait()
    report = report_of(tmp_path, run_id)
    assert report["steps"] >= 5
    assert report["ledger_problems"] == []
