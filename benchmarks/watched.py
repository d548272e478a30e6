"""What a run pays for being watched: the quickstart with five pages open and without, in turn, same
seeds.

    python -m benchmarks.watched

A page is a client of this process that does what a browser's page does: it follows the stream of
events, and asks for its view again whenever the stream says that something is new. Drawing, which a
person's own machine does, is left out.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import quickstart, report

ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/\?run=\S+")
VIEWS = ("overview", "timeline", "samples", "fleet", "lag")
STEPS_LEFT_OUT = 2  # the first steps carry the workers' start
CALL_SECONDS = 60.0


def main(repeats: int = 5, num_steps: int = 60) -> None:
    """Run both sides `repeats` times, alternating, and write the result."""
    measured: dict[str, list[dict[str, Any]]] = {"without": [], "five pages": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(repeats):
            for side in sorted(measured, reverse=bool(seed % 2)):
                found = run(Path(folder), seed, num_steps, is_watched=side == "five pages")
                measured[side].append(found)
    pairs = zip(measured["without"], measured["five pages"], strict=True)
    ratios = [one["step_seconds"] / other["step_seconds"] for one, other in pairs]
    report.write(
        "watched",
        title="A run with five pages open",
        question=(
            f"The quickstart, {repeats} seeds, each with five pages open and without, one after "
            "the other on the same machine."
        ),
        command="python -m benchmarks.watched",
        rows=[row_of(side, runs) for side, runs in measured.items()],
        conclusion=f"With five pages open the throughput is {statistics.median(ratios):.3f} of that "
        f"without (median of the paired ratios; {', '.join(f'{one:.3f}' for one in ratios)}).",
        data=measured,
    )


def run(folder: Path, seed: int, num_steps: int, *, is_watched: bool) -> dict[str, Any]:
    """Run the quickstart once, watched or not; return its metrics."""
    run_id = f"{'watched' if is_watched else 'alone'}-{seed}"
    settings = [f"run.id={run_id}", f"run.seed={seed}", f"run.num_steps={num_steps}"]
    settings += [f"run.directory={folder}", f"model.path={folder / 'model'}"]
    command = [sys.executable, "-m", "relax_events.cli", "run", str(quickstart.CONFIG), *settings]
    calls: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = threading.Timer(quickstart.RUN_SECONDS, process.kill)
        deadline.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if is_watched and (found := ADDRESS.search(line)):
                for view in VIEWS:
                    given = (f"{found[1]}/api/runs/{run_id}", view, calls)
                    threading.Thread(target=watch, args=given, daemon=True).start()
        deadline.cancel()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    data = json.loads((folder / "runs" / run_id / "report.json").read_text())
    seconds = [one for one in data["curves"]["step_seconds"][STEPS_LEFT_OUT:] if one is not None]
    return {
        "step_seconds": statistics.mean(seconds),
        "reward": data["reward_last_10"],
        "calls": len(calls),
    }


def watch(address: str, view: str, calls: list[str]) -> None:
    """Follow a run's stream of events until it ends, and ask for a view at each."""
    with (
        suppress(OSError),  # the run has ended, and its page with it
        urllib.request.urlopen(f"{address}/events", timeout=CALL_SECONDS) as stream,
    ):
        for line in stream:
            if line.startswith(b"data:"):
                with urllib.request.urlopen(f"{address}/{view}", timeout=CALL_SECONDS) as answer:
                    answer.read()
                calls.append(view)


def row_of(side: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table."""
    return {
        "side": side,
        "seconds a step": f"{statistics.median(one['step_seconds'] for one in runs):.3f}",
        "views answered": f"{statistics.median(one['calls'] for one in runs):.0f}",
    }


if __name__ == "__main__":
    main()
