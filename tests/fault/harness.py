"""Starts whole runs as a shell does, injects faults, and reads what they leave behind.

A run is watched through its control log, as every role does it. Tests wait for conditions and never
sleep.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit
from urllib.request import urlopen

import orjson
import psutil
from link import Link
from node import Node

from relax_events.config import RunConfig
from relax_events.errors import BrokerUnavailable
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Outcome, WorkerState
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import Event, PromptGroupEnded, SampleRolledOut
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.ops.topic_apply import apply_topics
from relax_events.projections.run_state import RunState
from relax_events.runtime.failpoints import VARIABLE, marks_folder, parse_failpoints
from relax_events.session.broker_address import with_address
from relax_events.topics import TopicPlan
from relax_events.topics.names import HEARTBEATS

WATCHED = (
    "control.policy-versions",
    "control.train-steps",
    "control.prompt-group-outcomes",
    "control.commands",
    *HEARTBEATS.values(),
)
READY = (WorkerState.IDLE, WorkerState.WORKING)
PATIENCE_SECONDS = 240.0
"""How long anything is waited for: a hang fails, a busy machine does not."""
# Deadline for a run to continue after a fault, on a machine that does as much as two cores do
# which have nothing else to do: see `slowness`.
WORKER_SECONDS = 35.0
BROKER_SECONDS = 45.0
EVERYTHING_SECONDS = 60.0
LIVING_SECONDS = 20.0
"""Where nothing has to be started again."""
USUAL_START_SECONDS = 15.0
"""From `relax run` to the first step, at most, where the bounds hold as they are."""
NUM_ASKED = 4
"""How often a command is tried whose broker does not answer: a machine that is busy with other
things may keep it from that."""
READ_UP_SECONDS = 0.2
"""What was committed so long ago has been read by then."""


def environment() -> dict[str, str]:
    """Return what a shell without settings of ours would have."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RELAX_")} | {
        "OMP_NUM_THREADS": "1"
    }


def command(*arguments: str | Path) -> list[str]:
    """Return the command line of `relax`."""
    return [sys.executable, "-m", "relax_events.cli", *map(str, arguments)]


class FaultRun:
    """A run in its own folder: `relax run` as a process, watched through the control log. Leaving
    the context ends all its processes."""

    def __init__(
        self, config: RunConfig, broker: EmbeddedBroker | Node, link: Link | None = None
    ) -> None:
        self.config, self.broker, self.link = config, broker, link
        self.folder = config.run_directory
        self.folder.mkdir(parents=True)
        self.run_file = self.folder / "given.json"
        self.run_file.write_bytes(orjson.dumps(config.model_dump(mode="json")))
        self.plan = TopicPlan.from_config(config)
        connection = with_address(config.broker, broker.bootstrap_servers, broker.password_file)
        self.connection = Connection.from_config(connection, client_id=f"{config.run.id}.test")
        apply_topics(config, Admin(self.connection))
        self._reader = LogReader(
            self.connection, start={(self.plan.topic(entity), 0): 0 for entity in WATCHED}
        )
        self._codec = EventCodec()
        self.state = RunState()
        self.failures: dict[str, str] = {}
        """Why prompt groups failed, by id."""
        self._started: list[subprocess.Popen[bytes]] = []
        self.process: subprocess.Popen[bytes]
        self.variables: dict[str, str] = {}
        """Laid over the environment of what is started."""
        self.output = self.folder / "output.log"
        self._began_at = self._first_step_at = 0.0
        self.patience = 1.0
        """Multiplies how long commands and ends may take, for a machine that is busy with other
        things."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait(60)
        for leftover in self.worker_processes():
            leftover.kill()
        self._reader.close()

    def start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """Start a `relax` command, by default `relax run` of this run."""
        process = self.start_program(command(*(arguments or ("run", self.run_file))))
        if not arguments:
            self.process = process
            self._began_at = self._began_at or time.monotonic()
        return process

    def start_program(self, words: list[str]) -> subprocess.Popen[bytes]:
        """Start a program that ends with this run at the latest."""
        with self.output.open("ab") as file:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=environment() | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self._started.append(process)
        return process

    def start_worker(self, role: str, *, index: int) -> subprocess.Popen[bytes]:
        """Start one more worker by hand, from the resolved run file."""
        return self.start("worker", role, self.folder / "run.json", "--index", str(index))

    def worker_processes(self) -> list[psutil.Process]:
        """Return the workers of this run that live."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(self.folder / "run.json") in (process.info["cmdline"] or ())
        ]

    def running_workers(self) -> dict[str, psutil.Process]:
        """Return the workers of this run that live, by id."""
        found = {}
        for process in self.worker_processes():
            words = process.info["cmdline"]
            if "worker" in words:
                role_index = words.index("worker")
                found[f"{words[role_index + 1]}-{words[words.index('--index') + 1]}"] = process
        return found

    def wait_until(
        self, condition: Callable[[], bool], what: str, *, timeout_seconds: float | None = None
    ) -> None:
        """Follow the control log until the condition holds; fail at the timeout, or when `relax
        run` ended meanwhile."""
        timeout_seconds = (
            PATIENCE_SECONDS * self.patience if timeout_seconds is None else timeout_seconds
        )
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"not within {timeout_seconds:g} s: {what}; {self._describe_progress()}"
            )
            assert any(process.poll() is None for process in self._started), (
                f"ended before: {what}; {self._describe_progress()}"
            )
            self._pump()

    def follow_for(self, seconds: float) -> None:
        """Follow the control log for so long, while something is paused."""
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            self._pump()

    def wait_until_ended(
        self, process: subprocess.Popen[bytes], *, timeout_seconds: float | None = None
    ) -> int:
        """Follow the control log until a process of ours has ended, and return its exit code."""
        timeout_seconds = (
            PATIENCE_SECONDS * self.patience if timeout_seconds is None else timeout_seconds
        )
        deadline = time.monotonic() + timeout_seconds
        while (code := process.poll()) is None:
            assert time.monotonic() < deadline, (
                f"did not end within {timeout_seconds:g} s; {self._describe_progress()}"
            )
            self._pump()
        return code

    def wait_until_steps(self, num_steps: int, *, timeout_seconds: float | None = None) -> None:
        """Wait until so many train steps are committed."""
        self.wait_until(
            lambda: self.state.num_steps >= num_steps,
            f"{num_steps} train steps",
            timeout_seconds=timeout_seconds,
        )

    def arm(self, *points: str) -> None:
        """Arm these failpoints for every process started from now on, given as `name[:n]=action`;
        they may fire again."""
        self.variables[VARIABLE] = ",".join(points)
        for point in points:
            (marks_folder(self.folder) / failpoint_marker(point)).unlink(missing_ok=True)

    def fired(self) -> set[str]:
        """Return the crash points that fired, as `name:n`."""
        folder = marks_folder(self.folder)
        return {path.name for path in folder.iterdir()} if folder.exists() else set()

    def slowness(self) -> float:
        """Slowdown factor of this machine: from the time of the run's own start, and from the
        number of processes per core."""
        start_seconds = max(self._first_step_at - self._began_at, 0.0)
        return max(
            1.0, start_seconds / USUAL_START_SECONDS, os.getloadavg()[0] / (os.cpu_count() or 1)
        )

    def recovers_within(self, seconds: float, *, is_stretched: bool = True) -> float:
        """Wait until the run is over what was just done to it, and return how many seconds that
        took; fail if more than this.

        Over it means: a step was committed whose prompt groups were issued since, so that every
            role has worked again. What was on its
        way before may still make `max_staleness` steps and the one at work.

        Args:
            seconds: The bound, on a machine as the bounds were measured on.
            is_stretched: Whether the bound is multiplied on a slower machine, and on one that is
                busy with other things.
        """
        started = time.monotonic()
        self.follow_for(READ_UP_SECONDS)
        goal = self.state.num_steps + self.config.run.max_staleness + 2
        self.wait_until_steps(
            goal, timeout_seconds=max(seconds, PATIENCE_SECONDS) if is_stretched else seconds
        )
        taken, bound = (
            time.monotonic() - started,
            seconds * (self.slowness() if is_stretched else 1.0),
        )
        assert taken <= bound, (
            f"over it after {taken:.1f} s, the bound is {bound:.1f} s; {self._describe_progress()}"
        )
        return taken

    def wait_until_ready_again(
        self, *worker_ids: str, killed: dict[str, int], timeout_seconds: float | None = None
    ) -> None:
        """Wait until other processes than the killed ones have resumed the work of these
        workers."""

        def resumed() -> bool:
            return all(
                self.pid(worker_id) != killed[worker_id]
                and self.state.workers[worker_id].state in READY
                for worker_id in worker_ids
            )

        self.wait_until(
            resumed,
            f"{', '.join(worker_ids)} sent heartbeats again",
            timeout_seconds=timeout_seconds,
        )

    def wait_until_gone(
        self, processes: list[psutil.Process], *, timeout_seconds: float | None = None
    ) -> None:
        """Wait until these processes have ended."""
        timeout_seconds = (
            PATIENCE_SECONDS * self.patience if timeout_seconds is None else timeout_seconds
        )
        _, alive = psutil.wait_procs(processes, timeout=timeout_seconds)
        assert alive == [], f"still there: {[process.cmdline() for process in alive]}"

    @property
    def objects(self) -> Path:
        """The folder of this run's object store."""
        return Path(urlsplit(self.config.objects_uri).path)

    def is_ready(self, worker_id: str) -> bool:
        """Tell whether a worker is past its start."""
        heartbeat = self.state.workers.get(worker_id)
        return heartbeat is not None and heartbeat.state in READY

    def pid(self, worker_id: str) -> int:
        """Return the process id that a worker's newest heartbeat names; -1 before the first."""
        heartbeat = self.state.workers.get(worker_id)
        return heartbeat.pid if heartbeat else -1

    def kill(self, *worker_ids: str) -> dict[str, int]:
        """Kill workers as a crash would; return their process ids."""
        return self.signal(signal.SIGKILL, *worker_ids)

    def signal(self, number: int, *worker_ids: str) -> dict[str, int]:
        """Send a signal to workers; return their process ids."""
        pids = {worker_id: self.pid(worker_id) for worker_id in worker_ids}
        for pid in pids.values():
            self.signal_process(number, pid)
        return pids

    def signal_process(self, number: int, pid: int) -> None:
        """Send a signal to a process that is a worker of this run."""
        assert str(self.folder / "run.json") in psutil.Process(pid).cmdline()
        os.kill(pid, number)

    def num_taken(self, worker_id: str) -> int:
        """Return how many prompt groups or records a worker has finished or holds."""
        heartbeat = self.state.workers[worker_id]
        return heartbeat.num_processed + heartbeat.num_in_flight

    @property
    def worker_ids(self) -> list[str]:
        """Every worker that `relax run` starts for this run."""
        return [
            f"{role}-{index}"
            for role, count in self.config.roles().items()
            for index in range(count)
        ]

    def report(self) -> dict[str, Any]:
        """Read report.json."""
        report: dict[str, Any] = orjson.loads((self.folder / "report.json").read_bytes())
        return report

    def ledger(self) -> dict[str, Any]:
        """Run `relax ledger check` and return its totals; fail when a promise was broken. The
        command is repeated when the broker did not respond in time."""
        for _ in range(NUM_ASKED):
            ended = subprocess.run(
                command("ledger", "check", self.run_file, "--output", "json"),
                cwd=self.folder,
                env=environment(),
                capture_output=True,
                timeout=200 * self.patience,
                check=False,
            )
            if ended.returncode != BrokerUnavailable.exit_code:
                break
        totals: dict[str, Any] = orjson.loads(ended.stdout or b"{}")
        assert (ended.returncode, totals.get("problems")) == (0, []), (
            f"{totals}\n{ended.stderr.decode()}"
        )
        return totals

    def metrics(self, worker_id: str) -> dict[str, float]:
        """Scrape a worker; return values by sample, named as Prometheus's text format writes it."""
        with urlopen(
            f"http://127.0.0.1:{self.state.workers[worker_id].metrics_port}/metrics", timeout=60
        ) as answer:
            lines = [
                line.rsplit(" ", 1)
                for line in answer.read().decode().splitlines()
                if not line.startswith("#")
            ]
        return {sample: float(value) for sample, value in lines}

    def decode(self, record: Record) -> Event:
        """Return the event in a record."""
        return self._codec.decode(record.value)

    def records(self, entity: str, *, num_partitions: int = 1) -> list[Record]:
        """Read a topic to its end."""
        reader = LogReader(self.connection)
        try:
            return reader.read_to_end(
                [(self.plan.topic(entity), partition) for partition in range(num_partitions)]
            )
        finally:
            reader.close()

    def samples(self) -> list[SampleRolledOut]:
        """Read the samples that rollout workers have written."""
        records = self.records("rollout.samples", num_partitions=self.plan.num_sample_partitions)
        return [
            event
            for record in records
            for event in split_samples(self.decode(record))
            if isinstance(event, SampleRolledOut)
        ]

    def log(self, worker_id: str) -> list[dict[str, Any]]:
        """Read the log events of a worker; a line that a full disk cut off is left out."""
        lines = (self.folder / "logs" / f"{worker_id}.log").read_text(errors="replace").splitlines()
        return [orjson.loads(line) for line in lines if line[:1] == "{" and line[-1:] == "}"]

    def logged(self, worker_id: str, event: str) -> list[dict[str, Any]]:
        """Return a worker's log events of one kind."""
        return [line for line in self.log(worker_id) if line["event"] == event]

    def _pump(self) -> None:
        for record in self._reader.fetch(timeout_seconds=0.1):
            event = self._codec.decode(record.value)
            self.state.apply(event)
            if self.state.num_steps and not self._first_step_at:
                self._first_step_at = time.monotonic()
            if isinstance(event, PromptGroupEnded) and event.outcome is Outcome.FAILED:
                self.failures[event.prompt_group_id] = event.reason

    def _describe_progress(self) -> str:
        workers = {
            worker_id: f"{heartbeat.state} {heartbeat.pid}"
            for worker_id, heartbeat in self.state.workers.items()
        }
        output = self.output.read_text(errors="replace") if self.output.exists() else ""
        return f"{self.state.num_steps} steps, {workers}, the output:\n{output[-3000:]}"


def failpoint_marker(point: str) -> str:
    """Return the name of the mark that an armed point leaves, `name:n`."""
    (armed,) = parse_failpoints(point)
    return armed.mark_name


def agents_of(file: Path) -> list[psutil.Process]:
    """Return the running processes of a program."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(file) in (process.info["cmdline"] or ())
    ]


def assert_ledger_balances(run: FaultRun) -> dict[str, Any]:
    """Assert what every fault leaves untouched, by the log and by the report; return the ledger's
    metrics."""
    ledger, report, config = run.ledger(), run.report(), run.config.run
    assert report["succeeded"], report["reason"]
    assert report["ledger_problems"] == []
    outcomes = ledger["outcomes"]
    assert outcomes["trained"] == config.num_steps * config.prompts_per_step
    assert outcomes["issued"] == sum(
        outcomes[name] for name in ("trained", "filtered", "expired", "failed", "in_flight")
    )
    assert ledger["samples_trained"] == outcomes["trained"] * config.samples_per_prompt
    assert (ledger["steps"], ledger["samples_trained_twice"], ledger["samples_lost"]) == (
        config.num_steps,
        0,
        0,
    )
    assert ledger["staleness_max"] <= config.max_staleness
    return ledger


def assert_spent_attempts_are_not_scored(run: FaultRun, reason: str) -> set[str]:
    """Assert that prompts whose attempts are spent became dead letters with a reason, and that none
    of their samples has a reward; return their prompt groups."""
    dead_letters = run.records("rollout.dead-letters")
    assert dead_letters
    for dead_letter in dead_letters:
        assert dead_letter.headers["error-class"] == "EpisodeFailed"
        assert "attempt 2 of 2" in dead_letter.headers["error-text"]
        assert reason in dead_letter.headers["error-text"]
    scored = {
        record.key
        for record in run.records("reward.scores", num_partitions=run.plan.num_sample_partitions)
    }
    spent = {dead_letter.key for dead_letter in dead_letters}
    assert not spent & scored
    return spent
