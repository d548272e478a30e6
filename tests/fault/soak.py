"""Breaks runs for as long as one likes, by a seeded schedule, and has the ledger check them: `make soak MINUTES=60 SEED=1`.

A soak is a row of runs with different settings; every other one has a link between it and its broker. Into each, one fault after another is
injected; the run must be over each within its bound. The ledger is checked on the running log every minute, and when the run has reached a
goal at its end. Exit code 6 means that a promise was broken, or a bound passed: then everything is kept. Otherwise each run's topics and
files go before the next one starts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import orjson
from harness import FaultRun, assert_books_balance
from link import Link
from node import Node, choose_ports, node_behind_link
from soak_faults import FAULTS, Fault
from stage import laid_over, lay_out, make_model, usual_tree

from relax_events.broker.admin import Admin
from relax_events.broker.embedded import EmbeddedBroker
from relax_events.cli.output import print_table
from relax_events.config import RunConfig

RUN_SECONDS = 300.0
CHECK_SECONDS = 60.0
LINK_REQUEST_SECONDS = 5.0
START_SECONDS = 120.0
LAST_STEPS = 5
ENDLESS = 1_000_000
VIOLATED = 6
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "async", "max_staleness": 2},
    {"mode": "async", "max_staleness": 1, "on_new_version": "swap"},
    {"mode": "sync", "max_staleness": 0},
    {"mode": "async", "max_staleness": 4, "on_new_version": "restart"},
    {"mode": "async", "max_staleness": 2, "batch_order": "ready_first"},
)


@dataclass(slots=True)
class Injected:
    """A fault that was injected, and how long the run needed to be over it; None when it was not, in time."""

    kind: str
    target: str
    seconds: float | None


@dataclass(slots=True)
class Soak:
    """The row of runs. `run` works until the minutes are over; what it found is in its fields."""

    folder: Path
    seed: int
    minutes: float
    patience: float = 1.0
    kinds: list[str] = field(default_factory=lambda: sorted(FAULTS))
    injected: list[Injected] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    num_crash_points: int = 0
    seconds_left: float = field(init=False)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.seconds_left = self.minutes * 60

    def run(self) -> None:
        """Soak until the time is over or a promise is broken."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lay_out(self.folder)
        make_model(self.folder)
        random = Random(self.seed)
        with EmbeddedBroker(self.folder / "broker") as own, far_broker(self.folder / "far") as (far, link):
            self.started = time.monotonic()
            number = 0
            while self.seconds_left > 0 and not self.violations:
                given = (far, link) if number % 2 else (own, None)
                with FaultRun(self._settings(number, random, given[1]), *given) as run:
                    self._soak_one(run, random)
                if not self.violations:
                    forget(run)
                number += 1

    def _settings(self, number: int, random: Random, link: Link | None) -> RunConfig:
        over_link = {"bootstrap_servers": link.address, "request_timeout_seconds": LINK_REQUEST_SECONDS} if link else {}
        tree = laid_over(
            usual_tree(self.folder, f"soak-{self.seed}-{number}"),
            {
                "run": MODES[number % len(MODES)] | {"num_steps": ENDLESS, "seed": random.randrange(2**31), "max_failed_groups": ENDLESS},
                "broker": {"lease": random.choice(["share_group", "share_group", "consumer_group"])} | over_link,
                "objects": {"inline_max_bytes": 60},  # so that the arrays of most samples travel by reference
                "reward": {"function": f"{self.folder / 'reward.py'}:badly", "timeout_seconds": 2.0},
                "workers": {"rollout": random.choice([1, 2]), "advantage": random.choice([1, 2]), "max_restarts": ENDLESS},
            },
        )
        return RunConfig.model_validate(tree)

    def _soak_one(self, run: FaultRun, random: Random) -> None:
        config = run.config
        settings = {
            "lease": config.broker.lease,
            "rollout": config.workers.rollout,
            "advantage": config.workers.advantage,
            "link": run.link is not None,
        }
        self._say(f"run {config.run.id}: {MODES[len(self.runs) % len(MODES)] | settings}")
        try:
            run.start()
            run.until_steps(2, timeout_seconds=START_SECONDS * self.patience)
            self._break(run, random)
            if self.violations:
                return
            ledger = finished(run)
        except AssertionError as error:
            self.violations.append(f"{config.run.id}: {error}")
            return
        self.num_crash_points += len(run.fired())
        self.runs.append({"run_id": config.run.id, "settings": run.config.run.model_dump(mode="json") | settings, "ledger": ledger, **sizes(run)})
        self._say(f"run {config.run.id} ended at its goal, {standing(ledger)}; {sizes(run)}")

    def _break(self, run: FaultRun, random: Random) -> None:
        """Inject faults, every kind before any comes again, until this run's time is over."""
        begun_at = checked_at = time.monotonic()
        ends_at = begun_at + min(RUN_SECONDS, self.seconds_left)
        possible = [kind for kind in self.kinds if run.link is not None or not FAULTS[kind].needs_link]
        kinds: list[str] = []
        while time.monotonic() < ends_at and not self.violations:
            kinds = kinds or random.sample(possible, len(possible))
            run.follow_for(random.uniform(0.2, 3.0))
            self._inject(run, kinds.pop(), random)
            if time.monotonic() - checked_at > CHECK_SECONDS:
                self._say(f"ledger on the running log: {standing(run.ledger())}")
                checked_at = time.monotonic()
        self.seconds_left -= time.monotonic() - begun_at

    def _inject(self, run: FaultRun, kind: str, random: Random) -> None:
        fault: Fault = FAULTS[kind]
        bound = fault.bound_seconds * self.patience
        self._say(f"{kind} ...")
        target = fault.inject(run, random)
        try:
            seconds: float | None = run.recovers_within(bound)
        except AssertionError as error:
            seconds = None
            self.violations.append(f"{run.config.run.id}: {kind} on {target}: not over it within {bound:g} s: {error}")
        self.injected.append(Injected(kind, target, seconds))
        recovered = "NOT RECOVERED" if seconds is None else f"recovered in {seconds:.1f} s"
        self._say(f"{kind:<16}{target:<64}  {recovered} of {bound:g}, {run.state.num_steps} steps")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:7.1f} s  {text}", flush=True)

    def summary(self) -> dict[str, Any]:
        """Return what was done and found, for programs."""
        return {
            "seed": self.seed,
            "minutes": self.minutes,
            "cpus": os.cpu_count(),
            "faults": {kind: self._figures(kind, fault) for kind, fault in FAULTS.items() if kind in self.kinds},
            "num_faults": len(self.injected),
            "num_crash_points_fired": self.num_crash_points,
            "runs": self.runs,
            "violations": self.violations,
        }

    def _figures(self, kind: str, fault: Fault) -> dict[str, Any]:
        of_kind = [one for one in self.injected if one.kind == kind]
        seconds = [one.seconds for one in of_kind if one.seconds is not None]
        return {
            "injected": len(of_kind),
            "recovered": len(seconds),
            "seconds_p50": round(median(seconds), 2) if seconds else None,
            "seconds_max": round(max(seconds), 2) if seconds else None,
            "bound_seconds": fault.bound_seconds * self.patience,
        }


@contextmanager
def far_broker(folder: Path) -> Iterator[tuple[Node, Link]]:
    """Give a broker that a run reaches over a link, and others without it; nobody but a fault starts it again."""
    port, linked_port = choose_ports(2)
    with Link(linked_port) as link, node_behind_link(folder, port=port, linked_port=linked_port, link_port=link.port) as node:
        yield node, link


def finished(run: FaultRun) -> dict[str, Any]:
    """Have the run end some steps further on, at a goal; return the ledger's figures, which must balance, as the disk must be swept."""
    workers = run.worker_processes()
    run.process.send_signal(signal.SIGTERM)
    run.until_ended(run.process, timeout_seconds=60)
    run.until_gone(workers, timeout_seconds=60)
    run.follow_for(1.0)
    num_steps = run.state.num_steps + LAST_STEPS
    process = run.start("run", run.run_file, f"run.num_steps={num_steps}")
    code = run.until_ended(process)
    run.broker.start()  # one that `relax run` had to start is stopped with it
    assert code == 0, f"the run was to end at step {num_steps}, it ended with exit code {code}"
    config = run.config = run.config.model_copy(update={"run": run.config.run.model_copy(update={"num_steps": num_steps})})
    left = sizes(run)
    assert left["weight_versions"] <= 2 * run.plan.num_slots + 2, f"weights of {left['weight_versions']} versions are left"
    assert left["checkpoints"] <= config.trainer.keep_checkpoints + 3, f"{left['checkpoints']} checkpoints are left"
    return assert_books_balance(run)


def standing(ledger: dict[str, Any]) -> str:
    """Return the ledger's figures in a line."""
    outcomes = ", ".join(f"{name} {count}" for name, count in ledger["outcomes"].items())
    return f"{ledger['steps']} steps, {outcomes}, regenerated {ledger['rollouts_regenerated']}, staleness up to {ledger['staleness_max']}"


def sizes(run: FaultRun) -> dict[str, int]:
    """Return what the run left on the disk: it must not grow with the number of steps, but for logs and samples by reference."""
    files = {path: path.stat().st_size for path in run.folder.rglob("*") if path.is_file()}
    return {
        "weight_versions": len(list((run.folder / "objects" / "weights").glob("*"))),
        "checkpoints": len(list((run.folder / "objects" / "checkpoints").glob("*/*"))),
        "log_bytes": sum(size for path, size in files.items() if path.suffix == ".log"),
        "disk_bytes": sum(files.values()),
    }


def forget(run: FaultRun) -> None:
    """Delete a run that ended well: its topics and its files."""
    admin = Admin(run.connection)
    admin.delete([spec.name for spec in run.plan.specs()])
    admin.close()
    shutil.rmtree(run.folder)


def show(summary: dict[str, Any]) -> None:
    """Print the table at the end."""
    columns = ("fault", "injected", "recovered", "p50 s", "max s", "bound s")
    print_table(columns, [(kind, *("" if value is None else value for value in figures.values())) for kind, figures in summary["faults"].items()])
    print(f"{summary['num_faults']} faults, {summary['num_crash_points_fired']} crash points, {len(summary['runs'])} runs, seed {summary['seed']}")
    print(f"violations = {len(summary['violations'])}")
    for violation in summary["violations"]:
        print(f"VIOLATED  {violation}")


def main(words: list[str] | None = None) -> int:
    """Read the command line, soak, say what came of it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults are injected; starting and ending comes on top")
    parser.add_argument("--seed", type=int, default=0, help="decides settings, faults and targets")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies every bound, for a machine that is busy with other things")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="a kind of fault to draw from; may be repeated; default: all")
    parser.add_argument("--summary", type=Path, help="write what was done and found to this file, as JSON")
    parser.add_argument("--folder", type=Path, help="where everything lies; default: a temporary folder, deleted unless something was found")
    arguments = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder: Path = arguments.folder or Path(tempfile.mkdtemp(prefix="relax-soak-"))
    soak = Soak(folder.resolve(), arguments.seed, arguments.minutes, arguments.patience, arguments.fault or sorted(FAULTS))
    try:
        soak.run()
    finally:
        summary = soak.summary()
        show(summary)
        if arguments.summary:
            arguments.summary.parent.mkdir(parents=True, exist_ok=True)
            arguments.summary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    if soak.violations:
        print(f"logs, ledger and the broker's data are kept in {folder}")
        return VIOLATED
    if not arguments.folder:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
