"""How many rollout workers three brokers carry: `python -m benchmarks.clients`.

The product's Kafka clients of rollout workers against three real brokers on this machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.three_brokers import BrokerUse, ThreeBrokers
from benchmarks.timed_run import show
from relax_events.config import RunConfig, load_run_config
from relax_events.events.codec import EventCodec
from relax_events.events.types import PromptGroupIssued
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.ops.topic_apply import apply_groups
from relax_events.runtime.worker import compute_follow_wait
from relax_events.topics import TopicPlan

ROOT = Path(__file__).parents[1]
RUN_FILE = ROOT / "configs" / "quickstart.toml"
WORKERS_PER_PROCESS = 128
NUM_TOKENS, SAMPLES_PER_PROMPT = 512, 4
GROUPS_PER_SECOND = 25.0
SETTLE_SECONDS, REST_SECONDS, LOAD_SECONDS = 5.0, 30.0, 20.0
PATIENCE_SECONDS = 240.0
LOOK_SECONDS = 0.25
HEAP_MIB = 512


@dataclass(frozen=True)
class Case:
    """A size, and how the workers share the queue."""

    num_workers: int
    prompt_queue: str
    lanes: int

    @property
    def name(self) -> str:
        """For people."""
        queue = self.prompt_queue.replace("_", " ")
        return f"{self.num_workers} workers, {queue}, {self.lanes} lanes"

    def overrides(self, bootstrap_servers: str) -> list[str]:
        """Return the run's settings."""
        partitions = self.num_workers if self.prompt_queue == "consumer_group" else 1
        values = {
            "run.id": "clients",
            "run.samples_per_prompt": SAMPLES_PER_PROMPT,
            "engine.max_prompt_groups": self.lanes,
            "workers.rollout": self.num_workers,
            "broker.bootstrap_servers": bootstrap_servers,
            "broker.replication_factor": 3,
            "broker.partitions_per_version": 8,
            "broker.prompt_queue": self.prompt_queue,
            "broker.queue_partitions": partitions,
        }
        return [f"{key}={value}" for key, value in values.items()]


class FleetProcess:
    """A child that holds some of the workers."""

    def __init__(self, settings: Path, log: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fleet", str(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            text=True,
        )

    def order(self, do: str, **arguments: Any) -> None:
        """Give a command."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Wait for the answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of clients ended with {self._process.wait(10)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.wait(60)


class Fleets:
    """All processes of clients."""

    def __init__(self, processes: Sequence[FleetProcess]) -> None:
        self._processes = processes

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Give all a command at once, and return their answers."""
        for process in self._processes:
            process.order(do, **arguments)
        return [process.answer() for process in self._processes]

    def open(self, num_workers: int) -> None:
        """Start the workers, divided among the processes."""
        first = 0
        for number, process in enumerate(self._processes):
            count = (num_workers - first) // (len(self._processes) - number)
            process.order("open", first=first, count=count)
            first += count
        for process in self._processes:
            process.answer()

    def look(self) -> dict[str, Any]:
        """Return what there is now, over all processes."""
        found = self.ask("look")
        summed = ("num_threads", "num_files", "rss_bytes", "cpu_seconds")
        return {
            "leased": [count for one in found for count in one["leased"]],
            "latencies": sorted(value for one in found for value in one["latencies"]),
            "requests": sum_counts(one["requests"] for one in found),
            "errors": sum_counts(one["errors"] for one in found),
            "processes": found,
            **{key: sum(one[key] for one in found) for key in summed},
        }


def sum_counts(counts: Iterator[dict[str, float]]) -> dict[str, float]:
    """Add up counts by name."""
    total: Counter[str] = Counter()
    for one in counts:
        for name, value in one.items():
            total[name] += value  # type: ignore[assignment]
    return dict(total)


class Prompts:
    """Writes prompt groups in record batches of the prompter's size."""

    def __init__(self, connection: Connection, plan: TopicPlan, *, batch_records: int) -> None:
        self._producer = RecordProducer(connection, max_batch_records=batch_records)
        self._topic, self._codec, self._number = plan.topic("prompt.groups"), EventCodec(), 0
        self._num_partitions = plan.queue_partitions

    def write(self, count: int) -> None:
        """Write so many, the partitions in turn."""
        for _ in range(count):
            group = f"000000-{self._number:06d}-0"
            event = PromptGroupIssued(
                prompt_group_id=group,
                train_step=0,
                group_index=self._number,
                attempt=0,
                row=self._number,
                required_policy_version=0,
                samples_per_prompt=SAMPLES_PER_PROMPT,
                messages=[],
                seed=0,
            )
            partition = self._number % self._num_partitions
            self._number += 1
            value = self._codec.encode(event)
            self._producer.send(ProducerRecord(self._topic, value, key=group, partition=partition))
        self._producer.flush()

    def write_paced(self, per_second: float, seconds: float) -> int:
        """Write at a rate, and return how many."""
        began, count = time.monotonic(), round(per_second * seconds)
        for number in range(count):
            time.sleep(max(0.0, began + number / per_second - time.monotonic()))
            self.write(1)
        return count

    def close(self) -> None:
        """End the client."""
        self._producer.close()


@contextmanager
def open_fleets(case: Case, bootstrap_servers: str, folder: Path) -> Iterator[Fleets]:
    """Start the processes, which open no client yet."""
    settings = folder / "fleet.json"
    settings.write_text(
        json.dumps(
            {
                "run_file": str(RUN_FILE),
                "overrides": case.overrides(bootstrap_servers),
                "num_tokens": NUM_TOKENS,
            }
        )
    )
    number = -(-case.num_workers // WORKERS_PER_PROCESS)
    processes = [FleetProcess(settings, folder / f"fleet-{index}.log") for index in range(number)]
    fleets = Fleets(processes)
    try:
        fleets.ask("look")
        yield fleets
    finally:
        for process in processes:
            process.kill()


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Measure a case on brokers of its own."""
    with ThreeBrokers(folder / "brokers", heap_mib=HEAP_MIB) as brokers:
        config = load_run_config(RUN_FILE, case.overrides(brokers.bootstrap_servers))
        plan = TopicPlan.from_config(config)
        connection = Connection.from_config(config.broker, client_id="clients.prompter-0")
        prepare(config, plan, connection)
        prompts = Prompts(connection, plan, batch_records=config.prompt_groups_per_lease)
        with open_fleets(case, brokers.bootstrap_servers, folder) as fleets:
            wait = compute_follow_wait(sum(config.roles().values()))
            measured = Measurement(case, brokers, fleets, prompts).run()
            measured["follow_wait_ms"] = wait.ms
        prompts.close()
    return measured


def prepare(config: RunConfig, plan: TopicPlan, connection: Connection) -> None:
    """Create the run's topics and groups, as `relax topics apply` does."""
    admin = Admin(connection)
    admin.create(plan.specs())
    apply_groups(config, plan, admin)
    admin.close()


class Measurement:
    """One case from the start of its clients to their loss."""

    def __init__(
        self,
        case: Case,
        brokers: ThreeBrokers,
        fleets: Fleets,
        prompts: Prompts,
    ) -> None:
        self._case, self._brokers, self._fleets, self._prompts = case, brokers, fleets, prompts

    def run(self) -> dict[str, Any]:
        """Return everything that was measured."""
        empty = self._brokers.use()
        found: dict[str, Any] = {"case": self._case.name, **asdict(self._case)}
        found |= self._start()
        self._fleets.ask("settle", holds=False)
        time.sleep(SETTLE_SECONDS)
        found |= {"rest": self._watch(REST_SECONDS, per_second=0.0)}
        found |= self._memory(empty)
        found |= {"load": self._watch(LOAD_SECONDS, per_second=GROUPS_PER_SECOND)}
        found |= self._lose()
        found["broker_log"] = self._brokers.errors()
        return found

    def _start(self) -> dict[str, Any]:
        """Open the clients, give each lane a prompt group, and wait until every worker holds
        one."""
        case, began = self._case, time.monotonic()
        use = self._brokers.use()
        self._fleets.open(case.num_workers)
        opened = time.monotonic()
        self._prompts.write(case.num_workers * case.lanes)
        while True:
            state = self._fleets.look()
            with_work = sum(count > 0 for count in state["leased"])
            seconds = time.monotonic() - began
            if with_work == case.num_workers or time.monotonic() - opened > PATIENCE_SECONDS:
                break
            time.sleep(LOOK_SECONDS)
        return {
            "open_seconds": opened - began,
            "work_seconds": seconds,
            "num_with_work": with_work,
            "num_leased": sum(state["leased"]),
            "start_errors": state["errors"],
            "start_broker_cpu_seconds": spent(use, self._brokers.use()),
        }

    def _watch(self, seconds: float, *, per_second: float) -> dict[str, Any]:
        """Watch brokers and clients for a while, at rest or with a load."""
        self._fleets.ask("settle", holds=False)
        before, use = self._fleets.look(), self._brokers.use()
        began, written = time.monotonic(), 0
        if per_second:
            written = self._prompts.write_paced(per_second, seconds)
            time.sleep(2.0)
        else:
            time.sleep(seconds)
        after, lasted = self._fleets.look(), time.monotonic() - began
        latencies = after["latencies"]
        return {
            "broker_cores": spent(use, self._brokers.use()) / lasted,
            "client_cores": (after["cpu_seconds"] - before["cpu_seconds"]) / lasted,
            "requests": after["requests"],
            "errors": after["errors"],
            "num_written": written,
            "num_answered": len(latencies),
            "p50_ms": statistics.median(latencies) / 1000 if latencies else 0.0,
            "p99_ms": latencies[len(latencies) * 99 // 100] / 1000 if latencies else 0.0,
        }

    def _memory(self, empty: Sequence[BrokerUse]) -> dict[str, Any]:
        use, state = self._brokers.use(), self._fleets.look()
        return {
            "connections": [one.num_connections for one in use],
            "broker_rss_mib": [one.rss_bytes / 2**20 for one in use],
            "empty_broker_rss_mib": [one.rss_bytes / 2**20 for one in empty],
            "broker_files": [one.num_files for one in use],
            "broker_threads": [one.num_threads for one in use],
            "client_rss_mib": state["rss_bytes"] / 2**20,
            "client_threads": state["num_threads"],
            "client_files": state["num_files"],
        }

    def _lose(self) -> dict[str, Any]:
        """Have a tenth of the workers leave, and wait until all prompt groups written then are
        answered by the rest."""
        per_process = max(1, self._case.num_workers // 10 // len(self._fleets.ask("look")))
        self._fleets.ask("settle", holds=False)
        began = time.monotonic()
        self._fleets.ask("stop", count=per_process)
        left = time.monotonic()
        self._prompts.write(self._case.num_workers)
        answered = 0
        while answered < self._case.num_workers and time.monotonic() - left < PATIENCE_SECONDS:
            time.sleep(LOOK_SECONDS)
            answered = len(self._fleets.look()["latencies"])
        return {
            "leave_seconds": left - began,
            "after_leave_seconds": time.monotonic() - left,
            "num_after_leave": answered,
        }


def spent(before: Sequence[BrokerUse], after: Sequence[BrokerUse]) -> float:
    """Return the processor seconds of all brokers between two looks."""
    return sum(b.cpu_seconds - a.cpu_seconds for a, b in zip(before, after, strict=True))


def row_of(one: dict[str, Any]) -> dict[str, str]:
    """Lay out a case: the start, the load, what is open, what is asked for at rest."""
    number, load, rest = one["num_workers"], one["load"], one["rest"]
    requests = sum(rest["requests"].values())
    return {
        "workers": f"{number}",
        "queue": one["prompt_queue"].replace("_", " "),
        "all open, s": f"{one['open_seconds']:.1f}",
        "have work": f"{one['num_with_work']} after {one['work_seconds']:.1f} s",
        "answered under load": f"{load['num_answered']} of {load['num_written']}",
        "p50 ms": f"{load['p50_ms']:.0f}",
        "p99 ms": f"{load['p99_ms']:.0f}",
        "answered when a tenth left": f"{one['num_after_leave']} after "
        f"{one['after_leave_seconds']:.1f} s",
        "connections a worker": f"{sum(one['connections']) / number:.1f}",
        "most at one broker": f"{max(one['connections']):,}",
        "client MiB a worker": f"{one['client_rss_mib'] / number:.1f}",
        "client threads a worker": f"{one['client_threads'] / number:.1f}",
        "client files a worker": f"{one['client_files'] / number:.0f}",
        "requests a worker at rest": f"{requests / number:.1f}",
        "broker cores": f"{rest['broker_cores']:.2f}",
        "client cores": f"{rest['client_cores']:.2f}",
    }


def main(arguments: Sequence[str] = ()) -> None:
    """Measure these sizes and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[64, 256, 512])
    parser.add_argument("--queue", choices=["share_group", "consumer_group"])
    parser.add_argument("--lanes", type=int, default=1)
    options = parser.parse_args(arguments)
    queues: list[str] = [options.queue] if options.queue else ["share_group", "consumer_group"]
    measured = []
    for queue in queues:
        for number in options.workers:
            with tempfile.TemporaryDirectory(prefix="relax-clients-") as name:
                measured.append(measure(Case(number, queue, options.lanes), Path(name)))
            show(measured[-1])
    report.write(
        "clients",
        title="Rollout workers on three brokers",
        command=shlex.join(["python", "-m", "benchmarks.clients", *arguments]),
        rows=[row_of(one) for one in measured],
        data=measured,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
