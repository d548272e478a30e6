"""Bring the stack up, wait for the run's goal, check the ledger and report the costs: `make stack`.

python -m tests.stack.run up        build what is missing, run, check; everything stays up for inspection
python -m tests.stack.run down      take the containers down, and with --volumes delete all that the run wrote

--overlay FILE lays another file of compose/ over the stack, which runs and is checked in the same
way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.stack.container_engine import (
    PROJECT,
    ContainerEngine,
    StackError,
    exit_code_of,
    open_container_engine,
)
from tests.stack.images import Stopwatch, provide_images
from tests.stack.panels import panels_with_data
from tests.stack.run_monitor import RunMonitor

RUN_FILE = "configs/quickstart.toml"
RUN_SECONDS = 1800.0
RUN_LABEL = "quickstart"
GOAL_REWARD = 0.8
LAST_STEPS = 10
QUESTION = """A run on one machine in containers: Kafka, every role a container of its own, Prometheus and Alertmanager, brought up by docker-compose
from nothing. The run is over when its controller has ended it; then the ledger is checked in the stack."""


def up(engine: ContainerEngine) -> dict[str, Any]:
    """Bring the stack up, wait for the run's end and check it.

    Raises:
        StackError: An image, the start, the goal or the ledger failed.
    """
    watch = Stopwatch()
    images = provide_images(engine, watch)
    started, started_at = time.monotonic(), time.time()
    with watch.measure("docker-compose up, until the workers are started"):
        engine.compose("up", "--detach", "--no-build")
    run, memory = RunMonitor(engine), Memory(engine)

    def is_over() -> bool:
        memory.update()
        return run.has_ended

    print("waiting for the goal ...", flush=True)
    run.wait_until(is_over, seconds=RUN_SECONDS, what="the end of the run")
    run.update()
    watch.seconds["from docker-compose up to the first train step"] = run.first_step_at - started
    watch.seconds["from docker-compose up to the end of the run"] = time.monotonic() - started
    with watch.measure("relax ledger check"):
        ledger = json.loads(engine.relax("ledger", "check", RUN_FILE, "--output", "json"))
    reward = (
        sum(value for step, value in run.rewards.items() if step >= run.num_steps - LAST_STEPS)
        / LAST_STEPS
    )
    if ledger["problems"] or reward < GOAL_REWARD:
        raise StackError(
            f"mean reward of the last {LAST_STEPS} steps {reward:.3f}, the goal is "
            f"{GOAL_REWARD}; ledger: {ledger['problems'] or 'clean'}"
        )
    return {
        "reward": {"first": run.rewards[0], "last": reward, "steps": run.num_steps},
        "ledger": ledger,
        "seconds": watch.seconds,
        "image_bytes": {name: image_bytes(engine, name) for name in images.values()},
        "load": os.getloadavg()[1],
        "panels": {
            panel.title: has_data
            for panel, has_data in panels_with_data(RUN_LABEL, start=started_at, end=time.time())
        },
        "memory_bytes": memory.peak_bytes,
        "volume_bytes": volume_bytes(engine, images["light"]),
    }


class Memory:
    """The highest memory use seen of each container."""

    def __init__(self, engine: ContainerEngine) -> None:
        self._engine = engine
        self.peak_bytes: dict[str, int] = {}

    def update(self) -> None:
        """Read the current memory use."""
        for line in self._engine.docker(
            "stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}", seconds=60
        ).splitlines():
            name, used, *_ = line.split()
            self.peak_bytes[name] = max(bytes_of(used), self.peak_bytes.get(name, 0))


def bytes_of(text: str) -> int:
    """Return how many bytes `1.5GiB` or `20MB` are."""
    number = text.rstrip("BKMGTikm")
    unit = text[len(number) :]
    base = 1024 if "i" in unit else 1000
    return int(float(number) * base ** " KMGT".index(unit[0].upper() if unit[0] != "B" else " "))


def image_bytes(engine: ContainerEngine, name: str) -> int:
    """Return the size of an image, all of its layers."""
    return int(engine.docker("image", "inspect", "--format", "{{.Size}}", name))


def volume_bytes(engine: ContainerEngine, image: str) -> dict[str, int]:
    """Return the disk use of each of the stack's volumes; Kafka's index files are sparse."""
    names = engine.docker(
        "volume", "ls", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}"
    ).split()
    look = ["run", "--rm", "--user", "root", "--entrypoint", "du"]
    measured = {
        name: engine.docker(
            *look,
            "--volume",
            f"{name}:/volume:ro",
            image,
            "--summarize",
            "--block-size=1",
            "/volume",
        )
        for name in names
    }
    return {name: int(text.split()[0]) for name, text in measured.items()}


def write_report(measured: dict[str, Any], images: dict[str, int]) -> None:
    """Write .relax/benchmarks/stack.md."""
    reward, ledger, panels = measured["reward"], measured["ledger"], measured["panels"]
    empty = ", ".join(title for title, has_data in panels.items() if not has_data) or "none"
    report.write(
        "stack",
        title="The stack on one machine",
        question=QUESTION,
        command="make stack",
        conclusion=f"Mean reward {reward['first']:.2f} in the first step, {reward['last']:.2f} over the "
        f"last {LAST_STEPS} of {reward['steps']}; "
        f"the ledger is clean over {ledger['outcomes']['trained']} trained prompt groups. "
        f"Prometheus has data for {sum(panels.values())} of the "
        f"{len(panels)} dashboard panels; empty: {empty}. Load average of the machine over "
        f"five minutes: {measured['load']:.0f}.",
        tables={
            "Times": [
                {"what": what, "seconds": f"{seconds:.1f}"}
                for what, seconds in measured["seconds"].items()
            ],
            "Images": [
                {"image": name, "MB": f"{size / 1e6:,.0f}"} for name, size in images.items()
            ],
            "Memory, the most that was seen": [
                {"container": name, "MB": f"{size / 1e6:,.0f}"}
                for name, size in sorted(measured["memory_bytes"].items())
            ],
            "Volumes at the end": [
                {"volume": name, "MB": f"{size / 1e6:,.1f}"}
                for name, size in sorted(measured["volume_bytes"].items())
            ],
        },
        data=measured,
    )


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["up", "down"])
    parser.add_argument(
        "--volumes",
        action="store_true",
        help="with down: delete the log, the files and the series too",
    )
    parser.add_argument(
        "--overlay",
        type=Path,
        action="append",
        default=[],
        help="lay this file over the stack; may be given several times",
    )
    arguments = parser.parse_args()
    overlays = [file.resolve() for file in arguments.overlay]
    return exit_code_of(
        lambda: (
            up_and_report(overlays)
            if arguments.what == "up"
            else down(overlays, volumes=arguments.volumes)
        )
    )


def up_and_report(overlays: list[Path]) -> None:
    """Bring the stack up and check it; write the report, or print it if there are overlays; raises
    as `up`.
    """
    engine = open_container_engine()
    engine.overlays += overlays
    measured = up(engine)
    if overlays:
        reward, seconds = (
            measured["reward"],
            measured["seconds"]["from docker-compose up to the end of the run"],
        )
        names = ", ".join(file.name for file in overlays)
        print(
            f"with {names}: mean reward {reward['first']:.2f} -> {reward['last']:.2f} in "
            f"{seconds:.0f} s; the ledger is clean"
        )
    else:
        write_report(measured, measured["image_bytes"])


def down(overlays: list[Path], *, volumes: bool) -> None:
    """Take the stack's containers down, and with `volumes` delete all that the run wrote.

    Raises:
        StackError: There is no engine, or it failed.
    """
    engine = open_container_engine()
    engine.overlays += overlays
    engine.compose("down", "--remove-orphans", *(["--volumes"] if volumes else []))


if __name__ == "__main__":
    sys.exit(main())
