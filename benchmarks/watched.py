"""What a run pays for being watched: one quickstart, in which windows with five pages open and without
take turns (without, with, with, without, ...), and neighbours are compared.

    python -m benchmarks.watched

The pages are clients that ask what a browser's pages ask (`benchmarks.open_pages`). In the windows
without, the server's process is stopped by a signal; with pages, it also reads what the log got
meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import quickstart, report
from benchmarks.open_pages import CALL_SECONDS, VIEWS, PageClients
from relax_events.config import load_run_config
from relax_events.events.types import TrainStepCommitted
from relax_events.history.run_log import RunLog
from tests.page_login import log_in, login_headers

RUN_ID = "watched"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\?token=\S+")
NUM_PAIRS, WINDOW_SECONDS, SETTLING_SECONDS = 20, 11.0, 3.0
FIRST_STEPS = 40  # the workers' start, and the pages' first reading, come before the windows
DRAIN_SECONDS = 120.0
RESAMPLES = 10_000
BUSY_LOAD = 10.0  # by core: a quickstart alone makes up to 8.5
SERVER = "relax_events.launcher.run_page_server"


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the run; processor times are seconds of all that time."""

    is_watched: bool
    start: float
    stop: float
    server_cpu: float
    broker_cpu: float


class WatchedRun:
    """A quickstart that runs until it is interrupted."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._output = folder, folder / "output.txt"
        settings = [f"run.id={RUN_ID}", f"run.directory={folder}", "run.num_steps=100000"]
        settings += [f"model.path={folder / 'model'}"]
        command = [sys.executable, "-m", "relax_events.cli", "run", str(quickstart.CONFIG)]
        with self._output.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, *settings], stdout=sink, stderr=subprocess.STDOUT
            )

    @property
    def run_file(self) -> Path:
        """The resolved run file."""
        return self._folder / "runs" / RUN_ID / "run.json"

    def wait_for_address(self) -> str:
        """Return where the run's page is, once its link was opened."""
        while not (found := ADDRESS.search(self._output.read_text())):
            self._check()
            time.sleep(0.2)
        return log_in(found[0])

    def wait_for_steps(self, num_steps: int, address: str) -> None:
        """Wait until so many steps are committed."""
        step = 0
        summary = f"{address}/api/runs/{RUN_ID}/summary"
        request = urllib.request.Request(summary, headers=login_headers(address))
        while step < num_steps:
            self._check()
            with (
                suppress(OSError),  # the start of the workers comes before that of the page
                urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer,
            ):
                step = json.loads(answer.read())["step"]
            time.sleep(1.0)

    def _check(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the run has ended:\n{self._output.read_text()}")

    def find_process(self, word: str) -> psutil.Process:
        """Return the process of this run with a word in its command line."""
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if word in words and str(self._folder) in words:
                return process
        raise RuntimeError(f"no process of the run has {word} in its command line")

    def read_commits(self) -> list[float]:
        """Return when the steps were committed, seconds since the epoch."""
        with RunLog(load_run_config(self.run_file), name="benchmark") as log:
            found = log.read_control("control.train-steps", TrainStepCommitted)
            return sorted(one.event.committed_at / 1e6 for one in found)

    def interrupt(self) -> None:
        """End the run as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(DRAIN_SECONDS)
        except subprocess.TimeoutExpired:  # what was measured is none the worse for it
            self.process.kill()
            self.process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time that a process has taken."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(run: WatchedRun, num_pairs: int) -> tuple[list[Window], list[float]]:
    """Take the windows in turn; return them, and how long the pages waited for each answer."""
    address = run.wait_for_address()
    run.wait_for_steps(FIRST_STEPS, address)
    with PageClients(address, RUN_ID, login_headers(address)["Cookie"]) as clients:
        return take_windows(run, num_pairs, clients)


def take_windows(
    run: WatchedRun, num_pairs: int, clients: PageClients
) -> tuple[list[Window], list[float]]:
    """Take the windows in turn."""
    server, broker = run.find_process(SERVER), run.find_process("kafka.Kafka")
    windows: list[Window] = []
    waits: list[float] = []
    server.suspend()
    for is_watched in order_of(num_pairs):
        before = cpu_seconds(server), cpu_seconds(broker)
        start = time.time()
        if is_watched:
            server.resume()
            waits += clients.open_for(WINDOW_SECONDS)
            server.suspend()
        else:
            time.sleep(WINDOW_SECONDS)
        taken = (cpu_seconds(server) - before[0], cpu_seconds(broker) - before[1])
        windows.append(Window(is_watched, start, time.time(), *taken))
        print(f"window {len(windows)} of {2 * num_pairs}", flush=True)
    server.resume()
    return windows, waits


def order_of(num_pairs: int) -> list[bool]:
    """Return for each window whether it is watched: a drift of the run favours neither side."""
    return [
        is_watched for pair in range(num_pairs) for is_watched in (pair % 2 == 1, pair % 2 == 0)
    ]


def rate(commits: Sequence[float], start: float, stop: float) -> float:
    """Return steps a second; a step that a bound divides counts by its part."""
    counts = np.interp([start, stop], commits, np.arange(len(commits)))
    return float(counts[1] - counts[0]) / (stop - start)


def pair_ratios(windows: Sequence[Window], commits: Sequence[float]) -> list[float]:
    """Return, for each pair of neighbours, the rate with pages relative to the rate without."""
    ratios = []
    for first, second in zip(windows[::2], windows[1::2], strict=True):
        watched, alone = (first, second) if first.is_watched else (second, first)
        rates = [rate(commits, one.start + SETTLING_SECONDS, one.stop) for one in (watched, alone)]
        ratios.append(rates[0] / rates[1])
    return ratios


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the geometric mean, from pairs chosen at random, with replacement."""
    random, logs = np.random.default_rng(0), np.log(ratios)
    means = logs[random.integers(0, len(logs), (RESAMPLES, len(logs)))].mean(axis=1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return float(low), float(high)


def row_of(side: str, windows: Sequence[Window], commits: Sequence[float]) -> dict[str, Any]:
    """Return a row of the table."""
    rates = [rate(commits, one.start + SETTLING_SECONDS, one.stop) for one in windows]
    seconds = sum(one.stop - one.start for one in windows)
    return {
        "side": side,
        "windows": len(windows),
        "steps a second": f"{statistics.mean(rates):.3f}",
        "server, % of a core": f"{100 * sum(one.server_cpu for one in windows) / seconds:.1f}",
        "broker, % of a core": f"{100 * sum(one.broker_cpu for one in windows) / seconds:.1f}",
    }


def main(num_pairs: int = NUM_PAIRS) -> None:
    """Measure, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        run = WatchedRun(Path(folder))
        try:
            windows, waits = measure(run, num_pairs)
            load = os.getloadavg()[0]
            commits = run.read_commits()
        finally:
            run.interrupt()
    write(windows, commits, waits, load)


def write(
    windows: Sequence[Window], commits: Sequence[float], waits: Sequence[float], load: float
) -> None:
    """Write the result.

    Args:
        windows: In their order.
        commits: When the steps were committed, seconds since the epoch.
        waits: Seconds that the pages waited for each answer.
        load: The machine's load average at the end.
    """
    num_pairs, num_cores = len(windows) // 2, os.cpu_count() or 1
    busy = " Other programs kept the machine busy." if load > BUSY_LOAD * num_cores else ""
    ratios = pair_ratios(windows, commits)
    low, high = interval(ratios)
    mean = statistics.geometric_mean(ratios)
    report.write(
        "watched",
        title="A run with five pages open",
        question=(
            f"One quickstart, {num_pairs} pairs of neighbouring windows of {WINDOW_SECONDS:g} s, the "
            f"first {SETTLING_SECONDS:g} s of each left out: with five pages open ({', '.join(VIEWS)}) "
            "and without."
        ),
        command="python -m benchmarks.watched",
        rows=[
            row_of("without", [one for one in windows if not one.is_watched], commits),
            row_of("five pages", [one for one in windows if one.is_watched], commits),
        ],
        conclusion=(
            f"With five pages open the throughput is {mean:.3f} of that without (geometric mean of "
            f"the pairs; 95 % interval {low:.3f} to {high:.3f} by bootstrap; median "
            f"{statistics.median(ratios):.3f}). The pages waited {1e3 * statistics.median(waits):.0f} "
            f"ms for an answer in the median of {len(waits):,}, at most {max(waits):.1f} s. "
            f"The load average of the {num_cores} cores was {load:.0f} at the end.{busy}"
        ),
        data={
            "ratios": ratios,
            "windows": [asdict(one) for one in windows],
            "commits": commits,
            "waits": waits,
            "load": load,
        },
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
