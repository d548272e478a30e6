"""Does a long run on clips wear out? Thousands of steps, watched from outside: reward, time,
memory, disk and lag by step."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.curve_plot import Curve, small_multiples
from benchmarks.environment import ROOT
from benchmarks.processes import BROKER, RUN
from benchmarks.watched_run import Look, RunEye, watch

FOLDER = ROOT / ".relax" / "endurance"
RUN_ID = "endurance"
NUM_STEPS = 2_200
SETTLED_STEP = 200
"""From which on growth is judged: the log has been purged and the caches are full by then."""
LOOK_EVERY_SECONDS = 10.0
STAGES = 5
MIB, KIB = 2**20, 2**10
KEPT = ("log, control", "logs", "figures")
"""Parts of the disk that a run keeps for good."""
DRAWN_ROLES = ("trainer", "rollout", "broker", "controller")
SETTINGS = (
    "run.prompts_per_step=8",
    "run.retain_versions=50",
    "broker.segment_seconds=60",
    "data.num_problems=1024",
    "model.media.cache_bytes=16777216",
)
QUESTION = """configs/motion.toml, asynchronous with all roles and an embedded broker: {num_steps:,} train steps of 8 prompt groups with 8 samples.
There are 1,024 clips, of which the machine's cache holds some 340: the others are fetched, verified and decoded again and again. 50 versions are
retained on the log. Looked at every {every:g} s from outside: memory of every process, shared pages divided, blocks on disk, and unread
records as the workers' `/metrics` say. Steps take as long as other work on the machine lets them.

![Reward, time, memory, disk and lag by train step](media-endurance.svg)"""


def run(folder: Path, num_steps: int) -> None:
    """Run it on a broker of its own, and leave what was seen in `looks.json`, beside the run's
    files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    places = [
        f"run.id={RUN_ID}",
        f"run.directory={folder}",
        f"model.path={folder / 'model'}",
        f"run.num_steps={num_steps}",
    ]
    command = [
        sys.executable,
        "-m",
        "relax_events.cli",
        "run",
        str(ROOT / "configs" / "motion.toml"),
        *places,
        *SETTINGS,
    ]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
    try:
        looks = watch(
            process,
            RunEye(process, directory=folder, run_id=RUN_ID).look,
            every_seconds=LOOK_EVERY_SECONDS,
        )
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise SystemExit(
            f"the run ended with {process.returncode}:\n{(folder / 'output').read_text()[-2000:]}"
        )
    (folder / "looks.json").write_text(json.dumps([asdict(look) for look in looks]))


def read(folder: Path) -> tuple[list[Look], dict[str, Any]]:
    """Return what was seen while steps were trained, and the run's report."""
    looks = [Look(**look) for look in json.loads((folder / "looks.json").read_text())]
    found: dict[str, Any] = json.loads((folder / "runs" / RUN_ID / "report.json").read_text())
    return [look for look in looks if look.train_step], found


def growth(looks: Sequence[Look], value: Callable[[Look], float]) -> float:
    """Return the slope of a value over steps, by least squares over those from `SETTLED_STEP`
    on."""
    settled = [look for look in looks if look.train_step >= SETTLED_STEP]
    slope, _ = np.polyfit(
        [look.train_step for look in settled], [value(look) for look in settled], 1
    )
    return float(slope)


def sized_row(name: str, looks: Sequence[Look], value: Callable[[Look], float]) -> dict[str, str]:
    """Lay out what one part takes at points of the run, in MiB, its most, and its growth."""
    settled = [look for look in looks if look.train_step >= SETTLED_STEP]
    picked = [settled[place * (len(settled) - 1) // (STAGES - 1)] for place in range(STAGES)]
    at = {f"step {look.train_step:,}": f"{value(look) / MIB:,.1f}" for look in picked}
    return {
        "MiB of": name,
        **at,
        "most": f"{max(map(value, settled)) / MIB:,.1f}",
        "growth a step": f"{growth(looks, value) / KIB:+.2f} KiB",
    }


def parts_of(looks: Sequence[Look], kind: str) -> Iterator[tuple[str, Callable[[Look], float]]]:
    """Give each part that takes memory or disk, the largest at the end first, with what reads it
    off a look."""
    last = getattr(looks[-1], kind)
    for name in sorted(last, key=lambda part: -last[part]):
        yield name, lambda look, name=name: getattr(look, kind).get(name, 0)


def stage_rows(looks: Sequence[Look], curves: dict[str, Any]) -> list[dict[str, str]]:
    """Lay out reward, time and lag by fifths of the run."""
    steps = len(curves["train_step"])
    rows = []
    for stage in range(STAGES):
        begin, end = stage * steps // STAGES, (stage + 1) * steps // STAGES
        lags = [sum(look.lag_records.values()) for look in looks if begin <= look.train_step < end]
        rows.append(
            {
                "steps": f"{begin:,} to {end - 1:,}",
                "mean reward": f"{statistics.mean(curves['reward_mean'][begin:end]):.3f}",
                "seconds a step, median": f"{statistics.median(curves['step_seconds'][begin:end]):.2f}",
                "unread records, median": f"{statistics.median(lags):.0f}",
                "most": f"{max(lags)}",
            }
        )
    return rows


def panels_of(looks: Sequence[Look], curves: dict[str, Any]) -> dict[str, list[Curve]]:
    """Return what is drawn."""
    steps = [look.train_step for look in looks]
    log = [
        sum(size for name, size in look.disk_bytes.items() if name.startswith("log, ")) / MIB
        for look in looks
    ]
    rest = [
        sum(size for name, size in look.disk_bytes.items() if not name.startswith("log, ")) / MIB
        for look in looks
    ]
    panels = {
        "reward": Curve(curves["train_step"], curves["reward_mean"]),
        "seconds a step": Curve(curves["train_step"], curves["step_seconds"]),
    }
    panels |= {
        "unread records": Curve(steps, [float(sum(look.lag_records.values())) for look in looks])
    }
    panels |= {
        f"memory of {role}, MiB": Curve(
            steps, [look.memory_bytes.get(role, 0) / MIB for look in looks]
        )
        for role in DRAWN_ROLES
    }
    panels |= {"broker's disk, MiB": Curve(steps, log), "run's disk, MiB": Curve(steps, rest)}
    return {name: [curve] for name, curve in panels.items()}


def conclusion_of(looks: Sequence[Look], found: dict[str, Any]) -> str:
    """Say what grew, and whether the run got worse."""
    rewards = found["curves"]["reward_mean"]
    memory = {name: growth(looks, value) / KIB for name, value in parts_of(looks, "memory_bytes")}
    disk = {name: growth(looks, value) / KIB for name, value in parts_of(looks, "disk_bytes")}
    most, named = max((slope, name) for name, slope in disk.items() if name not in KEPT)
    first, *_, last = stage_rows(looks, found["curves"])
    rest = max(slope for name, slope in memory.items() if name not in (BROKER, RUN, "controller"))
    return (
        f"Mean reward {statistics.mean(rewards[:3]):.2f} in the first three steps, "
        f"{statistics.mean(rewards[SETTLED_STEP:]):.3f} from step "
        f"{SETTLED_STEP} on and {statistics.mean(rewards[-200:]):.3f} in the last 200; "
        f"{found['samples_lost']} samples lost, "
        f"{len(found['ledger_problems'])} broken promises. A step took "
        f"{first['seconds a step, median']} s in the first fifth and "
        f"{last['seconds a step, median']} s in the last, with "
        f"{first['unread records, median']} and {last['unread records, median']} unread "
        "records.\n\nMemory: the broker's Java heap, which may have 512 MiB, fills by "
        f"{memory[BROKER]:.1f} KiB a step; controller and "
        f"`relax run` keep the figures of each step and the end of each prompt group, "
        f"{memory['controller']:.1f} and {memory[RUN]:.1f} KiB a step; the others {rest:.1f} "
        "KiB at most.\n\nDisk: what is purged, evicted or "
        f"replaced grows by {most:.1f} KiB a step at most ({named}); what a run keeps for "
        "good, its control log, logs and figures, by "
        f"{sum(disk[name] for name in KEPT):.1f} KiB."
    )


def publish(folder: Path, *, to: Path = report.FOLDER) -> None:
    """Write the picture and the page from what a run has left."""
    looks, found = read(folder)
    title = "Reward, time, memory, disk and lag by train step, a panel for each"
    (to / "media-endurance.svg").write_text(
        small_multiples(panels_of(looks, found["curves"]), title=title, own_axes=True)
    )
    report.write(
        "media-endurance",
        title="A long run on clips",
        question=QUESTION.format(
            num_steps=len(found["curves"]["train_step"]), every=LOOK_EVERY_SECONDS
        ),
        command="python -m benchmarks.endurance",
        tables={
            "By fifths of the run": stage_rows(looks, found["curves"]),
            "Memory": [
                sized_row(name, looks, value) for name, value in parts_of(looks, "memory_bytes")
            ],
            "Disk": [
                sized_row(name, looks, value) for name, value in parts_of(looks, "disk_bytes")
            ],
        },
        conclusion=conclusion_of(looks, found),
        data={
            "looks": [asdict(look) for look in looks[::6]],
            "wall_seconds": found["wall_seconds"],
        },
        folder=to,
    )


def main() -> None:
    """Run it and write the page; some forty minutes."""
    parser = argparse.ArgumentParser(
        description="A long run on clips: reward, time, memory, disk and lag."
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="train steps")
    parser.add_argument(
        "--page-only", action="store_true", help="write the page of the run that is there"
    )
    arguments = parser.parse_args()
    if not arguments.page_only:
        run(FOLDER, arguments.steps)
    publish(FOLDER)


if __name__ == "__main__":
    main()
