"""Inject faults into a running stack one by one, and measure the recovery time of the run: `make
stack-faults`.

The run has recovered when a train step commits whose prompts were issued after the fault ended. At
the end the run gets a near goal, every worker restarts to resume it, and the ledger is checked.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import report
from relax_events.config import RunConfig, load_run_config
from tests.stack.container_engine import ROOT, ContainerEngine, exit_code_of, open_container_engine
from tests.stack.images import Stopwatch, provide_images
from tests.stack.run_monitor import RunMonitor
from tests.stack.volumes import VOLUME_OF, fill, free, write_small_volumes

RUN_FILES = ROOT / ".relax" / "stack"
RUN_FILE = "configs/faults.toml"
HELD_SECONDS = 10.0
"""How long a service is paused or disconnected: longer than the session timeout of 6 s."""
MORE_WORKERS, SCALED_SECONDS = 3, 40.0
BOUND_SECONDS = 180.0
START_SECONDS = 600.0
ENDLESS = 1_000_000
STEPS_LEFT = 50
QUESTION = f"""The quickstart's task in containers, and one fault after the other: a service
is killed, paused for {HELD_SECONDS:g} s, disconnected from its networks for {HELD_SECONDS:g} s,
its volume is full for {HELD_SECONDS:g} s, it is restarted gracefully, or gets two more workers for
{SCALED_SECONDS:g} s. Seconds from the end of the fault to the first committed train step whose
prompts were issued after it; samples that are ready are trained meanwhile."""
WORKERS = (
    "controller",
    "metrics",
    "prompter",
    "rollout",
    "reward",
    "reference",
    "actor-forward",
    "advantage",
    "trainer",
)


@dataclass(frozen=True)
class Injected:
    """A fault, and the seconds from its end to the recovery of the run."""

    service: str
    fault: str
    seconds: float


def kill(engine: ContainerEngine, service: str) -> None:
    """Kill a service's processes as a crash would: after `docker kill` the engine would not restart
    them.
    """
    for container in engine.containers(service):
        if pid := engine.state(container)["Pid"]:
            os.kill(pid, signal.SIGKILL)


def pause(engine: ContainerEngine, service: str) -> None:
    """Pause a service for a while."""
    for container in engine.containers(service):
        engine.docker("pause", container)
        time.sleep(HELD_SECONDS)
        engine.docker("unpause", container)


def disconnect(engine: ContainerEngine, service: str) -> None:
    """Disconnect a service from its networks for a while."""
    for container in engine.containers(service):
        networks = engine.networks(container)
        for network in networks:
            engine.docker("network", "disconnect", network, container)
        time.sleep(HELD_SECONDS)
        for network in networks:
            engine.docker("network", "connect", "--alias", service, network, container)


def restart(engine: ContainerEngine, service: str) -> None:
    """Restart a service gracefully, as an upgrade does."""
    engine.compose("restart", service)


def scale(engine: ContainerEngine, service: str) -> None:
    """Scale a role out by two workers, and in again after a while."""
    for num_workers in (MORE_WORKERS, 1):
        engine.compose(
            "up",
            "--detach",
            "--no-build",
            "--no-deps",
            "--no-recreate",
            "--scale",
            f"{service}={num_workers}",
            service,
        )
        time.sleep(SCALED_SECONDS if num_workers > 1 else 0)


def run_full(engine: ContainerEngine, service: str) -> None:
    """Fill the volume that a service writes to, and free it after a while."""
    fill(engine, VOLUME_OF[service])
    try:
        time.sleep(HELD_SECONDS)
    finally:
        free(engine, VOLUME_OF[service])


FAULTS: dict[str, Callable[[ContainerEngine, str], None]] = {
    "kill": kill, "pause": pause, "disconnect": disconnect, "restart": restart, "full": run_full, "scale": scale,
}  # fmt: skip
SCALED = ("rollout", "reward", "reference", "actor-forward", "advantage")
"""Roles that may have several workers."""


def fits(fault: str, service: str) -> bool:
    """Return whether a fault applies to a service."""
    return service in {"scale": SCALED, "full": VOLUME_OF}.get(fault, (service,))


class FaultRun:
    """A run of the stack that continues until it gets a goal."""

    def __init__(self, engine: ContainerEngine, image: str) -> None:
        self._engine = engine
        self.config = self._write_goal(ENDLESS)
        engine.overlays.append(write_small_volumes(RUN_FILES, image))
        engine.settings |= {"RUN_FILE": RUN_FILE, "RUN_FILES": str(RUN_FILES)}
        self._watch = RunMonitor(engine)

    def _write_goal(self, num_steps: int) -> RunConfig:
        """Write the quickstart's run file with another name and goal, and a rate of learning that
        knows no end.
        """
        text = (ROOT / "configs" / "quickstart.toml").read_text()
        changes = {
            'id = "quickstart"': 'id = "faults"',
            "num_steps = 60": f"num_steps = {num_steps}",
            'schedule = "linear"': 'schedule = "constant"',
        }
        for old, new in changes.items():
            text = text.replace(old, new)
        RUN_FILES.mkdir(parents=True, exist_ok=True)
        path = RUN_FILES / Path(RUN_FILE).name
        path.write_text(text)
        return load_run_config(path)

    @property
    def num_steps(self) -> int:
        """Train steps that were committed."""
        return self._watch.num_steps

    def start(self) -> None:
        """Bring the stack up, and wait until the run is at work."""
        self._engine.compose("up", "--detach", "--no-build")
        self._watch.wait_until(
            lambda: self._watch.num_steps > 0, seconds=START_SECONDS, what="the first train steps"
        )

    def inject(self, fault: str, service: str) -> Injected:
        """Inject a fault and wait until the run is over it.

        Raises:
            StackError: It was not, in time.
        """
        FAULTS[fault](self._engine, service)
        self._watch.update()
        issued_after = (
            self._watch.num_steps + self.config.run.max_staleness + 1
        )  # steps up to here may have been admitted before
        seconds = self._watch.wait_until(
            lambda: self._watch.num_steps > issued_after,
            seconds=BOUND_SECONDS,
            what=f"over {fault} of {service}",
        )
        print(f"{fault:<11}{service:<15}{seconds:6.1f} s", flush=True)
        return Injected(service, fault, seconds)

    def finish(self) -> str:
        """Set a near goal, wait for the run's end, and return the ledger's totals.

        Raises:
            StackError: It did not end, or the ledger found a broken promise.
        """
        self._watch.update()
        self._write_goal(self._watch.num_steps + STEPS_LEFT)
        self._engine.compose("restart", *WORKERS)
        self._watch.wait_until(
            lambda: self._watch.has_ended, seconds=START_SECONDS, what="the end of the run"
        )
        return self._engine.relax("ledger", "check", RUN_FILE)


def write_report(injected: list[Injected], ledger: str, num_steps: int) -> None:
    """Write .relax/benchmarks/stack-faults.md."""
    kinds = list(dict.fromkeys(one.fault for one in injected))
    seconds = {(one.service, one.fault): f"{one.seconds:.1f}" for one in injected}
    rows = [
        {"service": service, **{kind: seconds.get((service, kind), "-") for kind in kinds}}
        for service in dict.fromkeys(one.service for one in injected)
    ]
    report.write(
        "stack-faults",
        title="Faults in the running stack",
        question=QUESTION,
        command=shlex.join(["python", "-m", "tests.stack.faults", *sys.argv[1:]]),
        conclusion=f"{len(injected)} faults in {num_steps} train steps; median "
        f"{median(one.seconds for one in injected):.1f} s, longest "
        f"{max(one.seconds for one in injected):.1f} s. The run then went on to its goal, "
        "and the ledger is clean.",
        rows=rows,
        data={"injected": [vars(one) for one in injected], "ledger": ledger},
    )


def main() -> int:
    """Inject the faults that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument(
        "--services", nargs="+", choices=["kafka", *WORKERS], default=["kafka", *WORKERS]
    )
    arguments = parser.parse_args()
    return exit_code_of(lambda: inject_all(arguments.services, arguments.faults))


def inject_all(services: Sequence[str], faults: Sequence[str]) -> None:
    """Start a run, inject every fault into every service, and write the report.

    Raises:
        StackError: An image, the start, the run or the ledger failed.
    """
    engine = open_container_engine()
    images = provide_images(engine, Stopwatch())
    run = FaultRun(engine, images["light"])
    run.start()
    injected = [
        run.inject(fault, service)
        for service in services
        for fault in faults
        if fits(fault, service)
    ]
    ledger = run.finish()
    print(ledger)
    write_report(injected, ledger, run.num_steps)


if __name__ == "__main__":
    sys.exit(main())
