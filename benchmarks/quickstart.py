"""Runs the quickstart, or another run file, as a user does, by `relax run` with settings of one's
own, and returns the run's report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
RUN_SECONDS = 900.0


def run(
    folder: Path, run_id: str, overrides: Sequence[str], *, run_file: Path = CONFIG
) -> dict[str, Any]:
    """Run it once, with all that it writes below a folder; runs of one folder share the model,
    which the first of them makes.

    Args:
        folder: For the model, the broker and the runs.
        run_id: Of the run.
        overrides: section.key=value, laid over the run file.
        run_file: The quickstart's, or another.
    Raises:
        CalledProcessError: The run did not reach its goal; its output is above.
        TimeoutExpired: It took longer than a quarter of an hour.
    """
    paths = [f"run.id={run_id}", f"run.directory={folder}", f"model.path={folder / 'model'}"]
    command = [sys.executable, "-m", "relax_events.cli", "run", str(run_file), *paths, *overrides]
    subprocess.run(command, check=True, timeout=RUN_SECONDS, cwd=CONFIG.parent.parent)
    report: dict[str, Any] = json.loads((folder / "runs" / run_id / "report.json").read_text())
    return report
