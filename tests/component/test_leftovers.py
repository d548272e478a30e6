"""A test session that leaves a process, port or file behind fails and names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = """
from tests import leftovers

leftovers.GRACE_SECONDS = 5.0

def pytest_configure(config):
    config.pluginmanager.register(leftovers.Leftovers(config))
"""
LEAVING = {
    "process": (
        "import subprocess; subprocess.Popen(['sleep', '301.5'])",
        r"still runs (killed now): sleep 301.5",
    ),
    "file": ("import tempfile; tempfile.mkdtemp(prefix='left-')", "/left-"),
    "port": (
        "import socket; global kept; kept = socket.create_server(('127.0.0.1', 0))",
        "is still listened at by the test process",
    ),
    "nothing": ("import tempfile; tempfile.TemporaryFile().close()", ""),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("more", [(), ("-n", "1")], ids=["alone", "under xdist"])
@pytest.mark.parametrize("what", LEAVING)
def test_pytest_session_that_leaves_resources_behind_fails_and_names_them(
    what: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    deed, named = LEAVING[what]
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    (tmp_path / "test_one.py").write_text(f"def test_one():\n    {deed}\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        *more,
        str(tmp_path),
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == (1 if named else 0), ended.stdout
    assert named in ended.stdout
    assert ("left behind by tests" in ended.stdout) == bool(named)
