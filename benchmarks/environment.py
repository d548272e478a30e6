"""Virtual environments of what we are measured beside: Ray, TRL and their companions stay out of ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(name: str = "bench") -> Path:
    """Return the interpreter that has what `requirements/<name>.txt` pins; the first call on a machine installs it into `.relax/<name>`.

    What our own environment has at the pinned version, torch above all, is taken from there.
    """
    folder, requirements = ROOT / ".relax" / name, ROOT / "requirements" / f"{name}.txt"
    made = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    if not (stamp.exists() and stamp.read_text() == requirements.read_text()):
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        purelib = subprocess.run([made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True)
        (Path(purelib.stdout.strip()) / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        print(f"installing {requirements.name} into {folder.relative_to(ROOT)}", file=sys.stderr)
        install = ["pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "-r", str(requirements)]
        subprocess.run([made, "-m", *install], check=True, timeout=900)
        shutil.copyfile(requirements, stamp)
    return made
