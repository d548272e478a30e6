"""Three Kafka brokers on this machine that replicate each record, for benchmarks of a cluster."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from relax_events.kafka.embedded import process as processes
from relax_events.kafka.embedded.directory import START_SECONDS
from relax_events.kafka.embedded.jars import ensure_jars, locate_cache, read_jar_lock
from relax_events.kafka.embedded.java import build_broker_command, find_java, locate_class_archive
from relax_events.kafka.embedded.ports import HOST, choose_port
from relax_events.kafka.embedded.settings import build_server_properties
from relax_events.kafka.embedded.storage import create_id, ensure_formatted

NUM_BROKERS = 3
REPLICATED = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
}
"""As in `compose/cluster.yml`."""
SESSIONS = {"broker.session.timeout.ms": "9000", "broker.heartbeat.interval.ms": "2000"}
"""Kafka's defaults; the embedded broker's are shorter."""


@dataclass(frozen=True)
class BrokerUse:
    """What a broker takes at a moment."""

    cpu_seconds: float
    rss_bytes: int
    num_threads: int
    num_files: int
    num_connections: int


class ThreeBrokers:
    """Three combined nodes: each is a broker and a voter of the controllers. Enter it to start
    them."""

    def __init__(
        self, directory: Path, *, heap_mib: int, properties: Mapping[str, str] | None = None
    ) -> None:
        ports: list[int] = []
        while len(ports) < 2 * NUM_BROKERS:
            ports.append(choose_port(taken=frozenset(ports)))
        self.ports, controllers = ports[:NUM_BROKERS], ports[NUM_BROKERS:]
        voters = ",".join(f"{i + 1}@{HOST}:{port}" for i, port in enumerate(controllers))
        self._directory, self._heap_mib, cluster_id = directory, heap_mib, create_id()
        self._processes: list[psutil.Process] = []
        for index, (port, controller) in enumerate(zip(self.ports, controllers, strict=True)):
            folder = self._folder(index)
            (folder / "tmp").mkdir(parents=True)
            ensure_formatted(folder / "data", node_id=index + 1, cluster_id=cluster_id)
            text = build_server_properties(
                folder / "data",
                port=port,
                controller_port=controller,
                overrides=REPLICATED | SESSIONS | dict(properties or {}),
                heap_mib=heap_mib,
            )
            node_settings = f"node.id={index + 1}\ncontroller.quorum.voters={voters}\n"
            # the last one of a key counts
            (folder / "server.properties").write_text(text + node_settings)

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect."""
        return ",".join(f"{HOST}:{port}" for port in self.ports)

    def use(self) -> list[BrokerUse]:
        """Return what each broker takes now."""
        connections = _established(self.ports)
        return [
            BrokerUse(
                sum(process.cpu_times()[:2]),
                process.memory_info().rss,
                process.num_threads(),
                process.num_fds(),
                connections[port],
            )
            for process, port in zip(self._processes, self.ports, strict=True)
        ]

    def errors(self, most: int = 3) -> list[str]:
        """Return the last lines that the brokers logged."""
        return [
            line[:300]
            for index in range(NUM_BROKERS)
            for line in (self._folder(index) / "broker.log").read_text().splitlines()[-most:]
        ]

    def _folder(self, index: int) -> Path:
        return self._directory / f"broker-{index + 1}"

    def __enter__(self) -> Self:
        java, lock = find_java(), read_jar_lock()
        jars = ensure_jars(lock, locate_cache(lock))
        archive = locate_class_archive(java, jars, jars[0].parent)
        for index in range(NUM_BROKERS):
            command = build_broker_command(
                java,
                jars,
                self._folder(index) / "server.properties",
                archive=archive,
                archive_at_exit=None,
                heap_mib=self._heap_mib,
            )
            self._processes.append(processes.spawn(command, log=self._folder(index) / "broker.log"))
        deadline = time.monotonic() + START_SECONDS
        for process, port in zip(self._processes, self.ports, strict=True):
            if not processes.wait_until_ready(process, port, deadline_seconds=deadline, client={}):
                raise SystemExit("\n".join(["a broker did not start:", *self.errors(20)]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            processes.terminate(process, timeout_seconds=0)
        shutil.rmtree(self._directory, ignore_errors=True)


def _established(ports: list[int]) -> Counter[int]:
    """Count the open connections that these ports accepted."""
    counts: Counter[int] = Counter()
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            words = line.split()
            if words[3] == "01":
                counts[int(words[1].rpartition(":")[2], 16)] += 1
    return Counter({port: counts[port] for port in ports})
