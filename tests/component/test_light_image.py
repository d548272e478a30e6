"""The image `light` holds no model library: its commands, pages and roles need none."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import relax_events.cli
import relax_events.packages.dashboard

ROOT = Path(__file__).parents[2]
LIGHT_ROLES = ("controller", "metrics", "prompter", "reward", "advantage")
PROGRAM = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Absent())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def packages(file: str) -> set[str]:
    """Return the names that a requirements file pins."""
    text = (ROOT / "requirements" / file).read_text()
    return {
        name.lower().replace("-", "_") for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)
    }


def test_light_image_has_what_its_commands_and_roles_import() -> None:
    absent = packages("cpu.txt") - packages("light.txt")
    assert {"torch", "transformers"} <= absent
    modules = [
        f"{package.__name__}.{module.name}"
        for package in (relax_events.cli, relax_events.packages.dashboard)
        for module in pkgutil.iter_modules(package.__path__)
        if module.name != "__main__"
    ]
    assert "relax_events.packages.dashboard.details" in modules
    workers = [f"workers.{role.replace('-', '_')}" for role in LIGHT_ROLES]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(absent), *modules, *workers],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
