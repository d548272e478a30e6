"""The other planes' own virtual environment: Ray and its sixty companions stay out of ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".relax" / "bench"
REQUIREMENTS = ROOT / "requirements" / "bench.txt"


def python() -> Path:
    """Return the interpreter that has TransferQueue and the Redis client; the first call on a machine installs them (480 MB).

    What our own environment has at the pinned version, torch above all, is taken from there.
    """
    made = FOLDER / "bin" / "python"
    stamp = FOLDER / "requirements.txt"
    if not (stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text()):
        shutil.rmtree(FOLDER, ignore_errors=True)
        venv.create(FOLDER, with_pip=True)
        purelib = subprocess.run([made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True)
        (Path(purelib.stdout.strip()) / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        print(f"installing {REQUIREMENTS.name} into {FOLDER.relative_to(ROOT)}", file=sys.stderr)
        install = ["pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "-r", str(REQUIREMENTS)]
        subprocess.run([made, "-m", *install], check=True, timeout=900)
        shutil.copyfile(REQUIREMENTS, stamp)
    return made
