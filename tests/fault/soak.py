"""Injects faults into runs for a given time, by a seeded schedule, and checks them with the ledger:
`make soak MINUTES=60 SEED=1`.

A soak is a sequence of runs with different settings; every other one has a link between it and its
broker. Faults are injected into each run one after another, and the run must recover from each
within the fault's deadline. The ledger is checked on the running log every minute, and again when
the run has reached its goal.

Exit code 6 means that a promise was broken or a deadline missed: then everything is kept. Otherwise
each run's topics and files are deleted before the next one starts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import orjson
import soak_plugins
from harness import FaultRun, assert_ledger_balances
from link import Link
from node import Node, choose_ports, node_behind_link
from run_setup import default_config, lay_out, make_model, merge_config
from soak_faults import FAULTS, MAX_RESTARTS, SLOW_FACTOR, Fault, delete, files_below

from relax_events.cli.output import print_rows
from relax_events.config import RunConfig
from relax_events.kafka.embedded import EmbeddedBroker

RUN_SECONDS = 300.0
CHECK_SECONDS = 60.0
LINK_REQUEST_SECONDS = 5.0
START_SECONDS = 120.0
LAST_STEPS = 5
SLOW_SECONDS = 120.0
# below that, `workers.heartbeat_timeout_seconds` would be less than workers are paused for
LEAST_SLOW_SECONDS = 30.0
ENDLESS = 1_000_000
MAX_ROLLOUT = 2
VIOLATED = 6
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "async", "max_staleness": 2},
    {"mode": "async", "max_staleness": 1, "weight_update_mode": "in_flight"},
    {"mode": "sync", "max_staleness": 0},
    {"mode": "async", "max_staleness": 4, "weight_update_mode": "recompute"},
    {"mode": "async", "max_staleness": 2, "sample_order": "ready_first"},
)


@dataclass(slots=True)
class Injected:
    """A fault that was injected, and how long the run needed to be over it; None when it was not,
    in time."""

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
    slow_seconds: float = SLOW_SECONDS
    meets_each: bool = False
    kinds: list[str] = field(default_factory=lambda: sorted(FAULTS))
    injected: list[Injected] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    num_crash_points: int = 0
    due: list[str] = field(default_factory=list)
    """Kinds that were chosen and not injected yet."""
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
        with (
            local_broker(self.folder / "broker") as own,
            linked_broker(self.folder / "far") as (far, link),
        ):
            self.started = time.monotonic()
            number = 0
            while self.seconds_left > 0 and not self.violations:
                given = (far, link) if number % 2 else (own, None)
                with FaultRun(self._settings(number, random, given[1]), *given) as run:
                    run.patience = self.patience
                    self._soak_one(run, random)
                if not self.violations:
                    self._forget(run)
                for kind in self._chosen(lambda fault: fault.ends_run):
                    if not self.violations:
                        self._end_one(kind, number, random, far if number % 2 else own, given[1])
                number += 1

    def _chosen(self, condition: Callable[[Fault], bool]) -> list[str]:
        return [kind for kind in self.kinds if condition(FAULTS[kind])]

    def _end_one(
        self,
        kind: str,
        number: int,
        random: Random,
        broker: EmbeddedBroker | Node,
        link: Link | None,
    ) -> None:
        """Inject a fault that ends its run into a separate run."""
        config = self._settings(number, random, link, suffix=f"-{kind}", max_restarts=2)
        begun_at = time.monotonic()
        with FaultRun(config, broker, link) as run:
            run.patience = self.patience
            bound = FAULTS[kind].bound_seconds * self.patience
            target, seconds = "", None
            self._report(f"{kind} ...")
            try:
                run.start()
                run.wait_until_steps(2, timeout_seconds=START_SECONDS * self.patience)
                broken_at = time.monotonic()
                target = FAULTS[kind].inject(run, random)
                seconds = time.monotonic() - broken_at
                assert seconds <= bound, (
                    f"the run ended after {seconds:.1f} s, its bound is {bound:g} s"
                )
            except AssertionError as error:
                self.violations.append(f"{config.run.id}: {kind}: {error}")
                seconds = None
            self.injected.append(Injected(kind, target, seconds))
            self._report(
                f"{kind:<20}{target:<64}  "
                f"{'NOT ENDED AS IT MUST' if seconds is None else f'ended in {seconds:.1f} s of {bound:g}'}"
            )
        if not self.violations:
            self._forget(run)
        self.seconds_left -= time.monotonic() - begun_at

    def _forget(self, run: FaultRun) -> None:
        """Delete a run that ended as it must: its topics, its objects, its files."""
        try:
            delete(run)
        except AssertionError as error:
            self.violations.append(f"{run.config.run.id}: {error}")
            return
        shutil.rmtree(run.folder)

    def _settings(
        self,
        number: int,
        random: Random,
        link: Link | None,
        *,
        suffix: str = "",
        max_restarts: int = MAX_RESTARTS,
    ) -> RunConfig:
        over_link = (
            {"bootstrap_servers": link.address, "request_timeout_seconds": LINK_REQUEST_SECONDS}
            if link
            else {}
        )
        lease = random.choice(["share_group", "share_group", "consumer_group"])
        queue = {
            "prompt_queue": lease,
            "queue_partitions": 1 if lease == "share_group" else MAX_ROLLOUT,
        }  # a worker without a partition gets no prompts
        limits = {
            "max_restarts": max_restarts,
            "heartbeat_timeout_seconds": self.slow_seconds / SLOW_FACTOR,
        }
        tree = merge_config(
            default_config(self.folder, f"soak-{self.seed}-{number}{suffix}"),
            {
                "run": MODES[number % len(MODES)]
                | {
                    "num_steps": ENDLESS,
                    "seed": random.randrange(2**31),
                    "max_failed_prompt_groups": ENDLESS,
                },
                "broker": queue | over_link,
                # All share one store; the arrays of most samples travel by reference.
                "objects": {
                    "uri": (self.folder / "bucket").as_uri(),
                    "claim_check_threshold_bytes": 60,
                },
                "engine": {"name": f"{soak_plugins.__file__}:SoakedEngine"},
                "trainer": {"backend": f"{soak_plugins.__file__}:SoakedTrainer"},
                "reward": {
                    "function": f"{self.folder / 'reward.py'}:as_commanded",
                    "timeout_seconds": 2.0,
                },
                "workers": {
                    "rollout": random.randint(1, MAX_ROLLOUT),
                    "advantage": random.choice([1, 2]),
                }
                | limits,
            },
        )
        return RunConfig.model_validate(tree)

    def _soak_one(self, run: FaultRun, random: Random) -> None:
        config = run.config
        settings = {
            "prompt_queue": config.broker.prompt_queue,
            "rollout": config.workers.rollout,
            "advantage": config.workers.advantage,
            "link": run.link is not None,
        }
        self._report(f"run {config.run.id}: {MODES[len(self.runs) % len(MODES)] | settings}")
        try:
            run.start()
            run.wait_until_steps(2, timeout_seconds=START_SECONDS * self.patience)
            self._break(run, random)
            if self.violations:
                return
            ledger = finished(run)
        except AssertionError as error:
            self.violations.append(f"{config.run.id}: {error}")
            return
        self.num_crash_points += len(run.fired())
        self.runs.append(
            {
                "run_id": config.run.id,
                "settings": run.config.run.model_dump(mode="json") | settings,
                "ledger": ledger,
                **sizes(run),
            }
        )
        self._report(f"run {config.run.id} ended at its goal, {standing(ledger)}; {sizes(run)}")

    def _break(self, run: FaultRun, random: Random) -> None:
        """Inject faults until this run's time is over, or with `meets_each` once each was
        injected."""
        begun_at = checked_at = time.monotonic()
        ends_at = begun_at + min(RUN_SECONDS, self.seconds_left)
        possible = self._chosen(
            lambda fault: not fault.ends_run and (run.link is not None or not fault.needs_link)
        )
        awaited = set(possible if self.meets_each else ())
        while possible and (awaited or time.monotonic() < ends_at) and not self.violations:
            kind = self._next_kind(possible, random)
            awaited.discard(kind)
            run.follow_for(random.uniform(0.2, 3.0))
            self._inject(run, kind, random)
            if time.monotonic() - checked_at > CHECK_SECONDS:
                self._report(f"ledger on the running log: {standing(run.ledger())}")
                checked_at = time.monotonic()
        self.seconds_left -= time.monotonic() - begun_at

    def _next_kind(self, possible: list[str], random: Random) -> str:
        """Choose a kind of fault that this run supports; over all runs, each kind occurs once
        before any repeats."""
        if not any(kind in possible for kind in self.due):
            sampled = [
                kind
                for kind in self._chosen(lambda fault: not fault.ends_run)
                if kind not in self.due
            ]
            self.due += random.sample(sampled, len(sampled))
        kind = next(kind for kind in self.due if kind in possible)
        self.due.remove(kind)
        return kind

    def _inject(self, run: FaultRun, kind: str, random: Random) -> None:
        fault: Fault = FAULTS[kind]
        bound = fault.bound_seconds * self.patience
        self._report(f"{kind} ...")
        target = fault.inject(run, random)
        try:
            seconds: float | None = run.recovers_within(bound, is_stretched=False)
        except AssertionError as error:
            seconds = None
            self.violations.append(
                f"{run.config.run.id}: {kind} on {target}: not over it within {bound:g} s: {error}"
            )
        self.injected.append(Injected(kind, target, seconds))
        recovered = "NOT RECOVERED" if seconds is None else f"recovered in {seconds:.1f} s"
        self._report(
            f"{kind:<20}{target:<64}  {recovered} of {bound:g}, {run.state.num_steps} steps"
        )

    def _report(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:7.1f} s  {text}", flush=True)

    def summary(self) -> dict[str, Any]:
        """Return what was done and found, for programs."""
        return {
            "seed": self.seed,
            "minutes": self.minutes,
            "cpus": os.cpu_count(),
            "faults": {
                kind: self._metrics(kind, fault)
                for kind, fault in FAULTS.items()
                if kind in self.kinds
            },
            "num_faults": len(self.injected),
            "num_crash_points_fired": self.num_crash_points,
            "runs": self.runs,
            "violations": self.violations,
        }

    def _metrics(self, kind: str, fault: Fault) -> dict[str, Any]:
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
def local_broker(folder: Path) -> Iterator[EmbeddedBroker]:
    """Yield a broker that runs restart themselves, and end it, whichever process started it last."""
    with EmbeddedBroker(folder) as broker:
        try:
            yield broker
        finally:
            broker.stop()


@contextmanager
def linked_broker(folder: Path) -> Iterator[tuple[Node, Link]]:
    """Yield a broker that a run reaches over a link, and other clients directly; only a fault
    restarts it."""
    port, linked_port = choose_ports(2)
    with (
        Link(linked_port) as link,
        node_behind_link(folder, port=port, linked_port=linked_port, link_port=link.port) as node,
    ):
        yield node, link


def finished(run: FaultRun) -> dict[str, Any]:
    """Have the run end some steps further on, at a goal; return the ledger's metrics, which must
    balance, as the disk must be swept."""
    workers = run.worker_processes()
    run.process.send_signal(signal.SIGTERM)
    run.wait_until_ended(run.process, timeout_seconds=60 * run.patience)
    run.wait_until_gone(workers, timeout_seconds=60 * run.patience)
    run.follow_for(1.0)
    num_steps = run.state.num_steps + LAST_STEPS
    process = run.start("run", run.run_file, f"run.num_steps={num_steps}", "--accept-changes")
    code = run.wait_until_ended(process)
    assert code == 0, f"the run was to end at step {num_steps}, it ended with exit code {code}"
    config = run.config = run.config.model_copy(
        update={"run": run.config.run.model_copy(update={"num_steps": num_steps})}
    )
    left = sizes(run)
    assert left["weight_versions"] <= 2 * run.plan.num_slots + 2, (
        f"weights of {left['weight_versions']} versions are left"
    )
    assert left["checkpoints"] <= config.trainer.keep_checkpoints + 3, (
        f"{left['checkpoints']} checkpoints are left"
    )
    return assert_ledger_balances(run)


def standing(ledger: dict[str, Any]) -> str:
    """Return the ledger's metrics in a line."""
    outcomes = ", ".join(f"{name} {count}" for name, count in ledger["outcomes"].items())
    return (
        f"{ledger['steps']} steps, {outcomes}, regenerated {ledger['rollouts_regenerated']}, "
        f"staleness up to {ledger['staleness_max']}"
    )


def sizes(run: FaultRun) -> dict[str, int]:
    """Return what the run left on the disk: it must not grow with the number of steps, but for logs
    and samples by reference."""
    files = {
        path: path.stat().st_size
        for folder in (run.folder, run.objects)
        for path in files_below(folder)
    }
    return {
        "weight_versions": len(list((run.objects / "weights").glob("*"))),
        "checkpoints": len(list((run.objects / "checkpoints").glob("*/*"))),
        "log_bytes": sum(size for path, size in files.items() if path.suffix == ".log"),
        "disk_bytes": sum(files.values()),
    }


def show(summary: dict[str, Any]) -> None:
    """Print the table at the end."""
    columns = ("fault", "injected", "recovered", "p50 s", "max s", "bound s")
    print_rows(
        columns,
        [
            (kind, *("" if value is None else value for value in metrics.values()))
            for kind, metrics in summary["faults"].items()
        ],
    )
    print(
        f"{summary['num_faults']} faults, {summary['num_crash_points_fired']} crash points, "
        f"{len(summary['runs'])} runs, seed {summary['seed']}"
    )
    print(f"violations = {len(summary['violations'])}")
    for violation in summary["violations"]:
        print(f"VIOLATED  {violation}")


def main(words: list[str] | None = None) -> int:
    """Read the command line, soak, report the results, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--minutes",
        type=float,
        default=5.0,
        help="how long faults are injected; starting and ending comes on top",
    )
    parser.add_argument("--seed", type=int, default=0, help="decides settings, faults and targets")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="multiplies every bound, for a machine that is busy with other things",
    )
    parser.add_argument(
        "--slow-seconds",
        type=float,
        default=SLOW_SECONDS,
        help=f"how long a slow step takes, at least {LEAST_SLOW_SECONDS:g}",
    )
    parser.add_argument(
        "--each",
        action="store_true",
        help="continue in each run until every kind of fault was injected, however long that takes",
    )
    parser.add_argument(
        "--fault",
        action="append",
        choices=sorted(FAULTS),
        help="a kind of fault to choose from; may be repeated; default: all",
    )
    parser.add_argument(
        "--summary", type=Path, help="write what was done and found to this file, as JSON"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help=(
            "where everything lies; default: a temporary folder, deleted unless something was found"
        ),
    )
    arguments = parser.parse_args(words)
    if arguments.slow_seconds < LEAST_SLOW_SECONDS:
        parser.error(
            f"--slow-seconds must be >= {LEAST_SLOW_SECONDS:g}, got "
            f"{arguments.slow_seconds:g}: others are paused for a quarter of that"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder: Path = arguments.folder or Path(tempfile.mkdtemp(prefix="relax-soak-"))
    soak = Soak(
        folder.resolve(),
        arguments.seed,
        arguments.minutes,
        arguments.patience,
        arguments.slow_seconds,
        arguments.each,
        arguments.fault or sorted(FAULTS),
    )
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
