"""axe-core, which finds what keeps people from using a page: fetched by npm, run in a browser's page."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.chromium import Chromium

AXE = "axe-core@4.14.1"
FIND = (
    "axe.run(document, {resultTypes: ['violations']}).then((found) => "
    "found.violations.map((one) => one.id + ': ' + one.nodes[0].html.slice(0, 200)))"
)


def fetch_axe(folder: Path) -> str:
    """Return axe-core's script; the test is skipped where npm can't fetch it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm is installed, which fetches axe-core")
    packed = subprocess.run(
        [npm, "pack", AXE, "--silent"], cwd=folder, capture_output=True, timeout=120, check=False
    )
    if packed.returncode:
        pytest.skip(f"npm can't fetch {AXE}")
    shutil.unpack_archive(next(folder.glob("*.tgz")), folder)
    return (folder / "package" / "axe.min.js").read_text()


def find_violations(browser: Chromium, axe: str) -> list[str]:
    """Return what is wrong with the page that a browser shows."""
    browser.run(f"{axe}; null")
    found: list[str] = browser.run(FIND)
    return found
