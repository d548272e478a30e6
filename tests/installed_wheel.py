"""Builds the package's wheel and installs it into an environment of its own.

What the package needs is seen through a .pth file, so that nothing is downloaded. Lines of such a
file are only put on the path: the .pth file that makes ours an editable install is not followed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHERE = "import sysconfig; print(sysconfig.get_path('purelib'))"


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it."""

    wheel: Path
    site_packages: Path
    relax: Path

    def call(
        self, *arguments: str, cwd: Path, timeout_seconds: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run the installed `relax`, without the checkout on its path."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RELAX_")}
        kept.pop("PYTHONPATH", None)
        return subprocess.run(
            [self.relax, *arguments],
            cwd=cwd,
            env=kept | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )


def install_wheel(folder: Path) -> Installed:
    """Build the wheel, and install it into `folder`/fresh."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("relax_events-*.whl")
    binaries = folder / "fresh" / "bin"
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    _run(uv, "venv", "--quiet", "--python", sys.executable, folder / "fresh")
    install = (uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python")
    _run(*install, binaries / "python", wheel)
    site_packages = Path(_run(binaries / "python", "-c", WHERE).strip())
    (site_packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return Installed(wheel, site_packages, binaries / "relax")


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
