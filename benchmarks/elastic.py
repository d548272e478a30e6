"""How fast rollout workers come and go while a run trains, and what it costs: `python -m
benchmarks.elastic`.

The quickstart, with one rollout worker; another is called for, serves for a while, and is sent away
again, several times over.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson

from benchmarks import quickstart, report
from benchmarks.timed_run import Stage, open_stage
from relax_events.config import BrokerConfig, load_run_config
from relax_events.events.codec import EventCodec
from relax_events.events.parts import WorkerState
from relax_events.events.types import Event, WorkerHeartbeat
from relax_events.kafka.connection import Connection
from relax_events.projections.scale_requests import Status, find_stage
from relax_events.projections.scaling import ScaleState
from relax_events.runtime.control_follower import ControlFollower
from relax_events.topics import TopicPlan

ROUNDS = 5
SERVES_SECONDS = 5.0
BEAT_SECONDS = 0.2
BOUND_SECONDS = 180.0
RUN_ID = "elastic"
QUESTION = f"""The quickstart with one rollout worker, which keeps the machine busy. Another is called for by `relax scale out`, works for
{SERVES_SECONDS:g} s, and is sent away by `relax scale in`, several times over. *Heard of* is its first heartbeat: from there on it loads the
model. *Serves*: it has the newest weights and takes work. *First samples*: those of its first prompt group are on the log, seen by its heartbeats,
{BEAT_SECONDS:g} s apart. *Drained*: it has finished what it had and said goodbye; *gone*: so has its process. All in seconds since the call.
Also listed: the train steps a second while it was called for, and while it worked."""
OUT = {"heard of": Status.HEALTH_CHECKING, "serves": Status.READY}
IN = {"drained": Status.REMOVING, "gone": Status.COMPLETED}


class Watched:
    """A run whose workers are added and removed, and its control log."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        defaults = {
            "run.id": RUN_ID,
            "run.directory": stage.folder,
            "model.path": stage.folder / "quickstart-model",
            "run.num_steps": 1_000_000,
        }
        settings = {
            "broker.bootstrap_servers": stage.bootstrap_servers,
            "workers.heartbeat_seconds": BEAT_SECONDS,
            "scaling.api": "on",
        }
        self._settings = [f"{key}={value}" for key, value in (defaults | settings).items()]
        self.run_file = stage.folder / "runs" / RUN_ID / "run.json"
        self.scaling, self.heartbeats = ScaleState(), dict[str, WorkerHeartbeat]()
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()

    @contextmanager
    def started(self) -> Iterator[None]:
        """Have the run continue, and end it in peace."""
        command = [
            sys.executable,
            "-m",
            "relax_events.cli",
            "run",
            str(quickstart.CONFIG),
            *self._settings,
        ]
        process = subprocess.Popen(
            command, cwd=quickstart.CONFIG.parent.parent, stdout=subprocess.DEVNULL
        )
        try:
            while (
                not self.run_file.exists()
                or not (self.run_file.parent / "logs" / "trainer-0.log").exists()
            ):
                if process.poll() is not None:
                    raise SystemExit("the run did not start; its output is above")
                time.sleep(1.0)
            config = load_run_config(self.run_file)
            connection = Connection.from_config(
                BrokerConfig(bootstrap_servers=self._stage.bootstrap_servers),
                client_id=f"{RUN_ID}.watch",
            )
            follower = ControlFollower(
                connection,
                TopicPlan.from_config(config),
                EventCodec(),
                also=("control.heartbeats.rollout",),
            )
            follower.start(self._inbox.put)
            yield
            follower.close()
        finally:
            process.terminate()
            process.wait(BOUND_SECONDS)

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Follow the control log until something holds; return when that was, in seconds since the
        epoch."""
        deadline = time.monotonic() + BOUND_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"{what}: not within {BOUND_SECONDS:g} s")
            with suppress(queue.Empty):
                event = self._inbox.get(timeout=1.0)
                self.scaling.apply(event)
                if isinstance(event, WorkerHeartbeat):
                    self.heartbeats[event.worker_id] = event
        return time.time()

    def call(self, *words: str) -> tuple[float, str, str]:
        """Call `relax scale`; return when, the request, and the worker that comes or goes."""
        called = time.time()
        line = [
            sys.executable,
            "-m",
            "relax_events.cli",
            "scale",
            words[0],
            str(self.run_file),
            *words[1:],
            "--output",
            "json",
        ]
        answer = orjson.loads(
            subprocess.run(line, check=True, capture_output=True, timeout=BOUND_SECONDS).stdout
        )
        (worker_id,) = answer["selected_engines"]
        return called, answer["request_id"], worker_id

    def reaches(self, request_id: str, status: Status) -> float:
        """Wait until a request has reached this status; return its time."""

        def has_come() -> bool:
            request = self.scaling.requests.get(request_id)
            return request is not None and (
                request.status is status or request.stage > find_stage(request.kind, status)
            )

        return self.until(has_come, f"{request_id} is {status}")

    @property
    def num_versions(self) -> int:
        """Train steps that were published."""
        return self.scaling.policy_version

    def ledger(self) -> dict[str, Any]:
        """Check the run's ledger."""
        line = [
            sys.executable,
            "-m",
            "relax_events.cli",
            "ledger",
            "check",
            str(self.run_file),
            "--output",
            "json",
        ]
        found: dict[str, Any] = orjson.loads(
            subprocess.run(line, check=True, capture_output=True, timeout=BOUND_SECONDS).stdout
        )
        return found


def measure_round(run: Watched) -> dict[str, float]:
    """Have a worker come and go; return the seconds."""
    before, first_version = time.time(), run.num_versions
    called, request_id, worker_id = run.call("out", "--replicas", "2")
    times = {name: run.reaches(request_id, status) - called for name, status in OUT.items()}
    serving, serving_version = time.time(), run.num_versions
    has_written = run.until(
        lambda: worker_id in run.heartbeats and run.heartbeats[worker_id].num_processed > 0,
        f"{worker_id} has written samples",
    )
    times["first samples"] = has_written - called
    ends = time.monotonic() + SERVES_SECONDS
    run.until(lambda: time.monotonic() > ends, "it works for a while")
    called, worked, last_version = time.time(), time.time() - serving, run.num_versions
    called, request_id, worker_id = run.call("in", "--replicas", "1", "--yes")
    times |= {name: run.reaches(request_id, status) - called for name, status in IN.items()}
    assert run.heartbeats[worker_id].state is WorkerState.STOPPED
    return times | {
        "steps/s while it comes": (serving_version - first_version) / (serving - before),
        "steps/s with it": (last_version - serving_version) / worked,
    }


def main(rounds: int = ROUNDS) -> None:
    """Measure the rounds, check the ledger, and write the page."""
    load = os.getloadavg()[0]
    with open_stage(None) as stage:
        run = Watched(stage)
        with run.started():
            run.until(lambda: run.num_versions >= 5, "the first train steps")
            measured = [measure_round(run) for _ in range(rounds)]
        ledger = run.ledger()
    rows = [
        {
            "": name,
            "median": f"{statistics.median(values):.2f}",
            "least": f"{min(values):.2f}",
            "most": f"{max(values):.2f}",
        }
        for name in measured[0]
        if (values := [one[name] for one in measured])
    ]
    regenerated, lost = ledger["rollouts_regenerated"], ledger["samples_lost"]
    report.write(
        "elastic",
        title="Rollout workers that come and go",
        question=QUESTION,
        command=shown_command(rounds),
        rows=rows,
        conclusion=f"{rounds} workers came and went in {ledger['steps']} train steps: {lost} samples "
        f"were lost, {regenerated} generated again "
        f"(aim: 0 both). The machine's load average before was {load:.1f}.",
        data={"rounds": measured, "ledger": ledger},
    )


def shown_command(rounds: int) -> str:
    """Return what measures it again."""
    return "python -m benchmarks.elastic" + ("" if rounds == ROUNDS else f" --rounds {rounds}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    main(parser.parse_args().rounds)
