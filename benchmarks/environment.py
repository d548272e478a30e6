"""Virtual environments of what we are measured next to: Ray, TRL and their companions stay out of
ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN_SECONDS = 900.0
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def python(name: str = "bench") -> Path:
    """Return the interpreter that has what `requirements/<name>.txt` pins; the first call on a
    machine installs it into `.relax/<name>`.

    What our own environment has at the pinned version, torch above all, is taken from there.
    """
    folder, requirements = ROOT / ".relax" / name, ROOT / "requirements" / f"{name}.txt"
    made = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    if not (stamp.exists() and stamp.read_text() == requirements.read_text()):
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        purelib = subprocess.run(
            [made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        )
        (Path(purelib.stdout.strip()) / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        print(f"installing {requirements.name} into {folder.relative_to(ROOT)}", file=sys.stderr)
        install = [
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--require-hashes",
            "-r",
            str(requirements),
        ]
        subprocess.run([made, "-m", *install], check=True, timeout=900)
        shutil.copyfile(requirements, stamp)
    return made


def run(name: str, *arguments: str, settings: Mapping[str, str] | None = None) -> str:
    """Run that interpreter in the project's folder, and return what it printed.

    Args:
        name: Of the environment.
        arguments: For the interpreter.
        settings: Environment variables besides this process's own.
    Raises:
        CalledProcessError: It failed; its output is above.
        TimeoutExpired: It took longer than a quarter of an hour.
    """
    variables = {**os.environ, **OFFLINE, **(settings or {})}
    command = [str(python(name)), *arguments]
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_SECONDS,
        cwd=ROOT,
        env=variables,
    )
    printed: str = done.stdout
    return printed


def pinned(name: str, package: str) -> str:
    """Return the version of a package that an environment's requirements pin.

    Raises:
        ValueError: They don't name it.
    """
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        if line.startswith(f"{package}=="):
            return line.split()[0].removeprefix(f"{package}==")
    raise ValueError(f"requirements/{name}.txt does not pin {package}; run make lock")
