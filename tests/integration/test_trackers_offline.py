"""Each tracker really runs, offline, in a metrics worker that reads a run's log: it keeps the metrics
of every train step once, also when the worker was restarted.

The trackers are installed in an environment of their own, `make trackers`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from written_run import WrittenRun

from relax_events.config import RunConfig

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-trackers" / "bin"
READERS = Path(__file__).with_name("tracker_readers.py")
METRICS = [{"reward_mean": 0.25, "loss": 1.5}, {"reward_mean": 0.5, "loss": -0.75}, {"reward_mean": 1.0, "loss": 0.0}]  # fmt: skip
SECONDS = 120.0
UNREACHABLE = "http://127.0.0.1:9"
"""Of a proxy that does not run: what a tracker asks of the internet is refused at once."""
pytestmark = pytest.mark.skipif(
    not (BIN / "relax").exists(), reason="needs the environment of `make trackers`"
)


def settings_of(folder: Path) -> dict[str, str]:
    """Return the variables by which the trackers stay offline, with what they keep below a folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RELAX_")}
    return kept | {
        "HOME": str(folder),
        "WANDB_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HTTP_PROXY": UNREACHABLE,
        "HTTPS_PROXY": UNREACHABLE,
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def written(
    bootstrap_servers: str, make_run_config: Callable[..., RunConfig]
) -> Iterator[WrittenRun]:
    run = WrittenRun(make_run_config(broker={"bootstrap_servers": bootstrap_servers}))
    run.describe()
    run.publish(0)
    yield run
    run.close()


def delivered(run: WrittenRun, tracker: str) -> int:
    """Return the newest step that the metrics worker has handed to the tracker; -1 before any."""
    path = run.config.run_directory / "trackers" / f"{tracker}.json"
    return int(json.loads(path.read_bytes())["steps"].get("train", -1)) if path.exists() else -1


def run_metrics_worker(run: WrittenRun, tracker: str, folder: Path, *, until_step: int) -> None:
    """Run a metrics worker until the tracker has a step, then drain it."""
    run_file = folder / "run.json"
    run_file.write_text(run.config.model_dump_json(exclude_unset=True))
    output = folder / "output.txt"
    command = [BIN / "relax", "worker", "metrics", run_file, f'telemetry.trackers=["{tracker}"]']
    with output.open("ab") as sink:
        process = subprocess.Popen(
            command, cwd=folder, env=settings_of(folder), stdout=sink, stderr=sink
        )
    try:
        stop = time.monotonic() + SECONDS
        while delivered(run, tracker) < until_step:
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < stop, output.read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) in {0, 143}, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert "delivery." not in output.read_text()


def read_back(tracker: str, folder: Path) -> list[dict[str, Any]]:
    """Return what the tracker has kept, read in its own environment."""
    done = subprocess.run(
        [BIN / "python", READERS, tracker, folder],
        env=settings_of(folder),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def points(name: str, *, num_steps: int) -> list[list[float]]:
    return [[step, METRICS[step][name]] for step in range(num_steps)]


@pytest.mark.long
@pytest.mark.parametrize("tracker", ["tensorboard", "trackio", "mlflow", "wandb", "clearml"])
def test_tracker_keeps_each_step_of_a_run_once(
    written: WrittenRun, tracker: str, tmp_path: Path
) -> None:
    for num_steps in (2, 3):
        first = 0 if num_steps == 2 else 2
        for step in range(first, num_steps):
            written.commit(step, metrics=METRICS[step], phase_seconds={"forward": 0.5})
        run_metrics_worker(written, tracker, tmp_path, until_step=num_steps - 1)
    runs = read_back(tracker, tmp_path)
    for name in ("reward_mean", "loss"):
        assert runs[-1][f"train/{name}"] == points(name, num_steps=3)
        if tracker == "clearml":  # an offline session can't be continued: each has all steps
            assert [run[f"train/{name}"] for run in runs[:-1]] == [points(name, num_steps=2)]
        else:
            assert len(runs) == 1
    assert runs[-1]["phase_seconds/forward"] == [[0, 0.5], [1, 0.5], [2, 0.5]]
