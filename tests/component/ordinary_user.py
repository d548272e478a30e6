"""Lets tests that run as root act as an ordinary user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_events.sandbox.probing import SYSTEM_PYTHON

ORDINARY_USER = 12_345


def as_ordinary_user(home: Path) -> tuple[tuple[str, ...], str]:
    """Return the command that leads to an ordinary user, and an interpreter that such a one can
    run."""
    if os.geteuid() != 0:
        return (), sys.executable
    home.chmod(0o777)
    command = ("setpriv", f"--reuid={ORDINARY_USER}", f"--regid={ORDINARY_USER}", "--clear-groups")
    probe = (
        "import psutil, orjson, subprocess as s, sys\nassert sys.version_info >= (3, 11); "
        "s.run([sys.executable, '-c', ''], check=True)"
    )
    environment = {
        "PYTHONPATH": ":".join(path for path in sys.path if path.endswith("site-packages"))
    }
    for python in (one for one in (sys.executable, SYSTEM_PYTHON) if Path(one).exists()):
        if not subprocess.run(
            [*command, python, "-c", probe], capture_output=True, env=environment, check=False
        ).returncode:
            return command, python
    pytest.skip("an ordinary user finds no interpreter here that has our packages")
