"""How many rollout workers three brokers carry: `python -m benchmarks.fleet`.

Each worker has what a rollout worker opens, by the product's own classes: its producer, its reader
of the control topics, its members of the group that shares the prompt queue, and the heartbeats
that it writes. Engine and weights are left out. The brokers are real; they, and all workers in this
process, share the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import queue
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import structlog

from benchmarks import report
from benchmarks.quickstart import CONFIG
from benchmarks.three_brokers import BrokerUse, ThreeBrokers
from relax_events.config import RunConfig, load_run_config
from relax_events.errors import RelaxError
from relax_events.events.codec import EventCodec
from relax_events.events.parts import FinishReason, SampleKey, VersionSegment, WorkerState
from relax_events.events.types import (
    MetricsReported,
    PromptGroupIssued,
    SampleRolledOut,
    WorkerHeartbeat,
)
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.lease_sources import open_lease_source
from relax_events.kafka.leases import Lease
from relax_events.kafka.producer import LINGER_MS, RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.workarounds.silent_members import COORDINATOR
from relax_events.ops.topic_apply import apply_groups
from relax_events.runtime.control_follower import ControlFollower
from relax_events.runtime.heartbeat import Heartbeat
from relax_events.runtime.worker import compute_follow_wait
from relax_events.topics import TopicPlan
from relax_events.topics.names import HEARTBEATS, METRICS

NUM_TOKENS, SAMPLES_PER_PROMPT = 512, 4
GROUPS_PER_SECOND = 25.0
SETTLE_SECONDS, REST_SECONDS, LOAD_SECONDS = 5.0, 30.0, 20.0
PATIENCE_SECONDS = 240.0
LOOK_SECONDS = TICK_SECONDS = 0.25
NUM_OPENERS = NUM_WRITERS = 4
HEAP_MIB = 512
REPORT_SECONDS = 10.0
"""How often each client reports its requests: a share consumer otherwise does every four
minutes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A size, and how the workers share the queue."""

    num_workers: int
    prompt_queue: str
    lanes: int

    def overrides(self, bootstrap_servers: str) -> list[str]:
        """Return the run's settings."""
        partitions = self.num_workers if self.prompt_queue == "consumer_group" else 1
        values = {
            "run.id": "fleet",
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


@dataclasses.dataclass(frozen=True)
class CountingConnection(Connection):
    """A connection whose clients' requests are counted."""

    requests: RequestRates | None = None

    def lasting_settings(
        self,
        *,
        report_seconds: float = REPORT_SECONDS,
        stats_cb: Callable[[str], None] = lambda _: None,
        **more: Any,
    ) -> dict[str, Any]:
        """See `Connection.lasting_settings`."""

        def report(statistics: str) -> None:
            if self.requests is not None:
                self.requests.update(statistics)
            stats_cb(statistics)

        return super().lasting_settings(
            report_seconds=min(report_seconds, REPORT_SECONDS), stats_cb=report, **more
        )


class RequestRates:
    """Requests a second by kind, from the last two reports of each client."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Counter[str]]] = {}
        self._rates: dict[str, dict[str, float]] = {}

    def update(self, statistics: str) -> None:
        """Take a client's report."""
        parsed = orjson.loads(statistics)
        name, now, total = parsed["name"], parsed["ts"] / 1e6, Counter[str]()
        for label, broker in parsed["brokers"].items():
            listed = broker.get("req", {})
            total.update(listed)
            unlisted = broker.get("tx", 0) - sum(listed.values())
            total["heartbeats" if label == COORDINATOR else "share fetches"] += unlisted
        if name in self._last and now - self._last[name][0] > 1.0:
            before, counts = self._last[name]
            self._rates[name] = {
                kind: (count - counts[kind]) / (now - before) for kind, count in total.items()
            }
        self._last[name] = now, total

    def per_second(self) -> Counter[str]:
        """Return the sum over all clients that have reported twice."""
        total_rates: Counter[str] = Counter()
        for rates in self._rates.values():
            for kind, rate in rates.items():
                total_rates[kind] += rate  # type: ignore[assignment]
        return total_rates


def make_pattern(num_tokens: int) -> SampleRolledOut:
    """Return the sample that all written ones are copies of."""
    generator = np.random.default_rng(0)
    key = SampleKey(
        sample_id="",
        prompt_group_id="",
        sample_index=0,
        samples_per_prompt=1,
        train_step=0,
        group_index=0,
        attempt=0,
        row=0,
        policy_version=0,
        min_policy_version=0,
        max_policy_version=0,
    )
    return SampleRolledOut(
        key=key,
        version_segments=[VersionSegment(policy_version=0, num_tokens=num_tokens)],
        tokens=generator.integers(0, 150_000, num_tokens).astype(np.int32),
        loss_mask=np.ones(num_tokens, np.uint8),
        rollout_logprobs=generator.standard_normal(num_tokens).astype(np.float32),
        num_prompt_tokens=0,
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        completion="",
        messages=[],
    )


class SimulatedWorker:
    """The Kafka clients of one rollout worker."""

    def __init__(
        self,
        fleet: Fleet,
        index: int,
    ) -> None:
        config, plan = fleet.config, fleet.plan
        self._plan, self.worker_id = plan, f"rollout-{index}"
        client_id = f"{config.run.id}.{self.worker_id}"
        plain = Connection.from_config(config.broker, client_id=client_id)
        connection = CountingConnection(
            plain.bootstrap_servers,
            plain.request_timeout_seconds,
            plain.client,
            client_id,
            plain.credentials,
            requests=fleet.requests,
        )
        self.codec = EventCodec()
        self.producer = RecordProducer(connection, linger_ms=LINGER_MS)
        wait = compute_follow_wait(sum(config.roles().values()))
        self._control = ControlFollower(connection, plan, self.codec, wait=wait)
        self._control.start(lambda _: None)
        self.heartbeat = Heartbeat(
            self._send,
            worker_id=self.worker_id,
            role="rollout",
            interval_seconds=config.workers.heartbeat_seconds,
        )
        self.num_leased, self.index = 0, index
        lanes = config.plan_lanes(None)
        self._leases = open_lease_source(
            config.broker.prompt_queue,
            connection,
            group=plan.consumer_group("rollout"),
            topic=plan.topic("prompt.groups"),
            max_leases=config.num_lanes,
            first_lanes=lanes.first,
            most_lanes=lanes.most,
            on_lease=lambda lease: fleet.take(self, lease),
        )
        self.failures = connection.auth_failures

    def _send(self, event: WorkerHeartbeat | MetricsReported) -> None:
        topics = HEARTBEATS if isinstance(event, WorkerHeartbeat) else METRICS
        topic = self._plan.topic(topics["rollout"])
        self.producer.send(ProducerRecord(topic, self.codec.encode(event), key=self.worker_id))

    def answer(self, lease: Lease, pattern: SampleRolledOut) -> int:
        """Write the samples of a leased prompt group, settle the lease, and return how long ago the
        prompt group was issued, in microseconds."""
        issued = self.codec.decode(lease.record.value)
        assert isinstance(issued, PromptGroupIssued)
        group = issued.prompt_group_id
        partition = self._plan.partition(group, 0)
        for index in range(issued.samples_per_prompt):
            key = dataclasses.replace(
                pattern.key, sample_id=f"{group}/{index}", prompt_group_id=group, sample_index=index
            )
            value = self.codec.encode(dataclasses.replace(pattern, key=key))
            topic = self._plan.topic("rollout.samples")
            self.producer.send(ProducerRecord(topic, value, key=group, partition=partition))
        self.producer.flush()
        lease.done()
        self.heartbeat.record_processed(1, seconds=0.0)
        return int(time.time() * 1e6) - issued.issued_at

    def stop(self) -> None:
        """Leave the group."""
        self._leases.close()


class Fleet:
    """All workers. `take` is called by the workers' own threads."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.plan, self.requests = TopicPlan.from_config(config), RequestRates()
        self.workers: list[SimulatedWorker] = []
        self.errors: Counter[str] = Counter()
        self._pattern = make_pattern(NUM_TOKENS)
        self._holds, self._held = True, list[tuple[SimulatedWorker, Lease]]()
        self._inboxes: list[queue.SimpleQueue[tuple[SimulatedWorker, Lease]]] = [
            queue.SimpleQueue() for _ in range(NUM_WRITERS)
        ]
        self._lock = threading.Lock()
        self._latencies: list[int] = []
        for inbox in self._inboxes:
            threading.Thread(target=self._write, args=(inbox,), daemon=True).start()
        threading.Thread(target=self._tick, daemon=True).start()

    def take(self, worker: SimulatedWorker, lease: Lease) -> None:
        """Keep a lease, or have its samples written."""
        with self._lock:
            worker.num_leased += 1
            if self._holds:
                self._held.append((worker, lease))
                return
        self._inboxes[worker.index % NUM_WRITERS].put((worker, lease))

    def open(self, count: int) -> None:
        """Start so many workers."""

        def start(index: int) -> SimulatedWorker | None:
            try:
                return SimulatedWorker(self, index)
            except (RelaxError, RuntimeError, OSError) as error:
                self._note(error)
                return None

        with ThreadPoolExecutor(NUM_OPENERS) as pool:
            opened = list(pool.map(start, range(count)))
        self.workers = [worker for worker in opened if worker is not None]

    def answer_all(self) -> None:
        """Answer the held leases, and from now on each as it comes; count latencies from zero."""
        with self._lock:
            self._holds, held = False, self._held
            self._held, self._latencies = [], []
        for worker, lease in held:
            self._inboxes[worker.index % NUM_WRITERS].put((worker, lease))

    def stop(self, count: int) -> None:
        """Have the first workers leave the group."""
        with ThreadPoolExecutor(NUM_OPENERS) as pool:
            list(pool.map(SimulatedWorker.stop, self.workers[:count]))

    def latencies(self) -> list[int]:
        """Return the microseconds from issue to acknowledged samples, sorted."""
        with self._lock:
            return sorted(self._latencies)

    def _note(self, error: Exception) -> None:
        with self._lock:
            self.errors[f"{type(error).__name__}: {error}"[:200]] += 1

    def _write(self, inbox: queue.SimpleQueue[tuple[SimulatedWorker, Lease]]) -> None:
        while True:
            worker, lease = inbox.get()
            try:
                took = worker.answer(lease, self._pattern)
            except RelaxError as error:
                self._note(error)
            else:
                with self._lock:
                    self._latencies.append(took)

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            for worker in self.workers:
                try:
                    worker.heartbeat.tick(WorkerState.IDLE)
                    worker.failures.raise_fatal()
                except RelaxError as error:
                    self._note(error)


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


def prepare(config: RunConfig, plan: TopicPlan, connection: Connection) -> None:
    """Create the run's topics and groups, as `relax topics apply` does."""
    admin = Admin(connection)
    admin.create(plan.specs())
    apply_groups(config, plan, admin)
    admin.close()


class Measurement:
    """One case from the start of its clients to their loss."""

    def __init__(self, brokers: ThreeBrokers, fleet: Fleet, prompts: Prompts) -> None:
        self._brokers, self._fleet, self._prompts = brokers, fleet, prompts
        self._process = psutil.Process()

    def run(self, case: Case) -> dict[str, Any]:
        """Return everything that was measured."""
        measured = dataclasses.asdict(case) | self._start(case)
        self._fleet.answer_all()
        time.sleep(SETTLE_SECONDS)
        measured["rest"] = self._watch(self._rest)
        measured |= self._look()
        measured["load"] = self._watch(self._load)
        measured |= self._lose(case.num_workers)
        return measured | {"errors": self._fleet.errors, "broker_log": self._brokers.errors()}

    def _start(self, case: Case) -> dict[str, Any]:
        """Open the clients, give each lane a prompt group, and wait until every worker holds
        one."""
        began = time.monotonic()
        self._fleet.open(case.num_workers)
        opened = time.monotonic()
        self._prompts.write(case.num_workers * case.lanes)

        def count_working() -> int:
            return sum(worker.num_leased > 0 for worker in self._fleet.workers)

        wait_until(lambda: count_working() == case.num_workers)
        return {
            "open_seconds": opened - began,
            "work_seconds": time.monotonic() - began,
            "num_with_work": count_working(),
        }

    def _load(self) -> int:
        """Write prompt groups at a rate, and return how many."""
        count = self._prompts.write_paced(GROUPS_PER_SECOND, LOAD_SECONDS)
        time.sleep(2.0)
        return count

    def _rest(self) -> int:
        """Write nothing for a while."""
        time.sleep(REST_SECONDS)
        return 0

    def _watch(self, work: Callable[[], int]) -> dict[str, Any]:
        """Watch brokers and clients during some work."""
        self._fleet.answer_all()
        clients, brokers, began = self._cpu_seconds(), self._brokers.use(), time.monotonic()
        num_written = work()
        lasted, latencies = time.monotonic() - began, self._fleet.latencies()
        return {
            "broker_cores": spent(brokers, self._brokers.use()) / lasted,
            "client_cores": (self._cpu_seconds() - clients) / lasted,
            "requests": dict(self._fleet.requests.per_second()),
            "num_written": num_written,
            "num_answered": len(latencies),
            "p50_ms": statistics.median(latencies) / 1000 if latencies else 0.0,
            "p99_ms": latencies[len(latencies) * 99 // 100] / 1000 if latencies else 0.0,
        }

    def _cpu_seconds(self) -> float:
        return float(sum(self._process.cpu_times()[:2]))

    def _look(self) -> dict[str, Any]:
        """Return what is open."""
        return {
            "brokers": [dataclasses.asdict(one) for one in self._brokers.use()],
            "client_rss_bytes": self._process.memory_info().rss,
            "client_threads": self._process.num_threads(),
            "client_files": self._process.num_fds(),
        }

    def _lose(self, num_workers: int) -> dict[str, Any]:
        """Have a tenth of the workers leave, and wait until all prompt groups written then are
        answered by the rest."""
        self._fleet.answer_all()
        self._fleet.stop(max(1, num_workers // 10))
        left = time.monotonic()
        self._prompts.write(num_workers)
        wait_until(lambda: len(self._fleet.latencies()) >= num_workers)
        return {
            "after_leave_seconds": time.monotonic() - left,
            "num_after_leave": len(self._fleet.latencies()),
        }


def wait_until(is_done: Callable[[], bool]) -> None:
    """Wait for a condition, or until patience ends."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_done() and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Measure a case on brokers of its own."""
    with ThreeBrokers(folder / "brokers", heap_mib=HEAP_MIB) as brokers:
        config = load_run_config(CONFIG, case.overrides(brokers.bootstrap_servers))
        fleet = Fleet(config)
        connection = Connection.from_config(config.broker, client_id="fleet.prompter-0")
        prepare(config, fleet.plan, connection)
        prompts = Prompts(connection, fleet.plan, batch_records=config.prompt_groups_per_lease())
        return Measurement(brokers, fleet, prompts).run(case)


def spent(before: Sequence[BrokerUse], after: Sequence[BrokerUse]) -> float:
    """Return the processor seconds of all brokers between two looks."""
    return sum(b.cpu_seconds - a.cpu_seconds for a, b in zip(before, after, strict=True))


def lay_out(one: dict[str, Any]) -> dict[str, str]:
    """Lay out a case: the start, the load, open connections and files, requests at rest."""
    number, load, rest = one["num_workers"], one["load"], one["rest"]
    connections = [broker["num_connections"] for broker in one["brokers"]]
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
        "connections a worker": f"{sum(connections) / number:.1f}",
        "most at one broker": f"{max(connections):,}",
        "client MiB a worker": f"{one['client_rss_bytes'] / 2**20 / number:.1f}",
        "client threads a worker": f"{one['client_threads'] / number:.1f}",
        "client files a worker": f"{one['client_files'] / number:.0f}",
        "requests a worker at rest": f"{sum(rest['requests'].values()) / number:.1f}",
        "broker cores": f"{rest['broker_cores']:.2f}",
        "client cores": f"{rest['client_cores']:.2f}",
    }


def main(arguments: Sequence[str] = ()) -> None:
    """Measure a size and write the page; then end at once, since hundreds of clients take minutes
    to close one by one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--queue", choices=["share_group", "consumer_group"], default="share_group")
    parser.add_argument("--lanes", type=int, default=1)
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    case = Case(options.workers, options.queue, options.lanes)
    with tempfile.TemporaryDirectory(prefix="relax-fleet-") as name:
        measured = measure(case, Path(name))
    report.write(
        f"fleet-{case.num_workers}-{case.prompt_queue.replace('_', '-')}",
        title="Rollout workers on three brokers",
        command=shlex.join(["python", "-m", "benchmarks.fleet", *arguments]),
        rows=[lay_out(measured)],
        data=measured,
    )
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
