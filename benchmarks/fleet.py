"""A process that holds the Kafka clients of many rollout workers: `python -m benchmarks.fleet
SETTINGS`, where SETTINGS is a file of JSON.

Each worker has what a rollout worker opens: its producer, its reader of the control topics, its
members of the group that shares the prompt queue, and the heartbeats that it writes. Engine and
weights are left out. Commands and answers are lines of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil

from relax_events.config import load_run_config
from relax_events.errors import RelaxError
from relax_events.events.codec import EventCodec
from relax_events.events.parts import FinishReason, SampleKey, VersionSegment, WorkerState
from relax_events.events.types import (
    MetricsReported,
    PromptGroupIssued,
    SampleRolledOut,
    WorkerHeartbeat,
)
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import COORDINATOR
from relax_events.kafka.lease_sources import open_lease_source
from relax_events.kafka.leases import Lease
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.runtime.control_follower import ControlFollower
from relax_events.runtime.heartbeat import Heartbeat
from relax_events.runtime.worker import compute_follow_wait
from relax_events.topics import TopicPlan
from relax_events.topics.plan import HEARTBEATS, METRICS

NUM_OPENERS = 4
NUM_WRITERS = 4
TICK_SECONDS = 0.25
REPORT_SECONDS = 10.0
"""How often each client reports its requests: a share consumer otherwise does every four
minutes."""


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
        found: Counter[str] = Counter()
        for rates in self._rates.values():
            for kind, rate in rates.items():
                found[kind] += rate  # type: ignore[assignment]
        return found


def pattern_of(num_tokens: int) -> SampleRolledOut:
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
        self.producer = RecordProducer(connection, linger_ms=config.broker.linger_ms)
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
        self._leases = open_lease_source(
            config.broker.prompt_queue,
            connection,
            group=plan.consumer_group("rollout"),
            topic=plan.topic("prompt.groups"),
            max_leases=config.num_lanes,
            records_per_batch=config.prompt_groups_per_lease,
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

    def close(self) -> None:
        """End all clients."""
        self._leases.close()
        self._control.close()
        self.producer.close()


class Fleet:
    """The workers of this process. `take` is called by the workers' own threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.config = load_run_config(Path(settings["run_file"]), settings["overrides"])
        self.plan, self.requests = TopicPlan.from_config(self.config), RequestRates()
        self._pattern = pattern_of(settings["num_tokens"])
        self.workers: list[SimulatedWorker] = []
        self._errors: Counter[str] = Counter()
        self._holds, self._held = True, list[tuple[SimulatedWorker, Lease]]()
        self._work: list[queue.SimpleQueue[tuple[SimulatedWorker, Lease]]] = [
            queue.SimpleQueue() for _ in range(NUM_WRITERS)
        ]
        self._lock = threading.Lock()
        self._latencies: list[int] = []
        for inbox in self._work:
            threading.Thread(target=self._write, args=(inbox,), daemon=True).start()
        threading.Thread(target=self._tick, daemon=True).start()

    def take(self, worker: SimulatedWorker, lease: Lease) -> None:
        """Keep a lease, or have its samples written."""
        with self._lock:
            worker.num_leased += 1
            if self._holds:
                self._held.append((worker, lease))
                return
        self._work[worker.index % NUM_WRITERS].put((worker, lease))

    def open(self, *, first: int, count: int) -> dict[str, Any]:
        """Start so many workers."""

        def start(index: int) -> SimulatedWorker | None:
            try:
                return SimulatedWorker(self, index)
            except (RelaxError, RuntimeError, OSError) as error:
                with self._lock:
                    self._errors[f"{type(error).__name__}: {error}"[:200]] += 1
                return None

        with ThreadPoolExecutor(NUM_OPENERS) as pool:
            found = list(pool.map(start, range(first, first + count)))
        self.workers = [worker for worker in found if worker is not None]
        return {"num_opened": len(self.workers)}

    def settle(self, *, holds: bool) -> dict[str, Any]:
        """Answer what is held, and answer or hold what comes."""
        with self._lock:
            self._holds, held = holds, self._held
            self._held, self._latencies = [], []
            for worker in self.workers:
                worker.num_leased = 0
        for worker, lease in held:
            self._work[worker.index % NUM_WRITERS].put((worker, lease))
        return {}

    def stop(self, *, count: int) -> dict[str, Any]:
        """Have the first workers leave the group."""
        with ThreadPoolExecutor(NUM_OPENERS) as pool:
            list(pool.map(lambda worker: worker.stop(), self.workers[:count]))
        return {}

    def look(self) -> dict[str, Any]:
        """Return what there is now."""
        process = psutil.Process()
        with self._lock:
            errors = Counter(self._errors)
            latencies = list(self._latencies)
        for worker in self.workers:
            try:
                worker.failures.raise_fatal()
            except RelaxError as error:
                errors[f"{type(error).__name__}: {error}"[:200]] += 1
        return {
            "leased": [worker.num_leased for worker in self.workers],
            "requests": dict(self.requests.per_second()),
            "errors": dict(errors),
            "num_threads": process.num_threads(),
            "num_files": process.num_fds(),
            "rss_bytes": process.memory_info().rss,
            "cpu_seconds": sum(process.cpu_times()[:2]),
            "latencies": latencies,
        }

    def _write(self, inbox: queue.SimpleQueue[tuple[SimulatedWorker, Lease]]) -> None:
        while True:
            worker, lease = inbox.get()
            try:
                took = worker.answer(lease, self._pattern)
            except RelaxError as error:
                with self._lock:
                    self._errors[f"{type(error).__name__}: {error}"[:200]] += 1
            else:
                with self._lock:
                    self._latencies.append(took)

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            for worker in self.workers:
                try:
                    worker.heartbeat.tick(WorkerState.IDLE)
                except RelaxError as error:
                    with self._lock:
                        self._errors[f"{type(error).__name__}: {error}"[:200]] += 1


def main() -> None:
    """Carry out commands until there are no more."""
    fleet = Fleet(json.loads(Path(sys.argv[1]).read_text()))
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "open": fleet.open,
        "settle": fleet.settle,
        "stop": fleet.stop,
        "look": fleet.look,
    }
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # logs don't mix with answers
    for line in sys.stdin:
        order = json.loads(line)
        answer = commands[order.pop("do")](**order)
        print(json.dumps(answer), file=output, flush=True)
    os._exit(0)  # thousands of clients take minutes to close one by one


if __name__ == "__main__":
    main()
