"""A run over five hosts: one with the broker, the object store and the light roles, two with a rank
of the trainer each, two with an engine each. The hosts share no folder.

`OneCommandRun` is over two of them, started by `relax run --hosts`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import Any, TypeVar

import orjson
from host_network import Network

from relax_events.kafka.embedded.jars import ensure_jars, locate_cache, read_jar_lock
from relax_events.kafka.embedded.java import build_broker_command, find_java, locate_class_archive
from relax_events.kafka.embedded.settings import build_server_properties
from relax_events.kafka.embedded.storage import ensure_formatted
from tests.s3_server import environment as store_environment

REPOSITORY = Path(__file__).parents[2]
HOSTS = ("broker", "trainer-0", "trainer-1", "engine-0", "engine-1")
BROKER_PORT, CONTROLLER_PORT, STORE_PORT, RENDEZVOUS_PORT = 9092, 9093, 9000, 29500
LIGHT_ROLES = ("controller", "metrics", "prompter", "reward", "advantage")
COMMAND_SECONDS = 900.0
PAUSE_SECONDS = 0.5
END_SECONDS = 20.0
REWARD = """
import time
import zlib


def spread(completion, *, answer, metadata, prompt):
    time.sleep(0.2)  # a step takes a second or more, so the faults come within the run
    return zlib.crc32(completion.encode()) % 1000 / 1000
"""


AnyRun = TypeVar("AnyRun", bound="HostsRun")


@dataclass
class Unit:
    """A process of a host that is started again when it fails, as an init system would."""

    host: str
    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    is_wanted: bool = True
    codes: list[int] = field(default_factory=list)


class HostsRun:
    """The processes of a run over hosts; see the module's docstring."""

    ENDS = "broker/controller"
    """The process that ends with the run."""

    def __init__(self, network: Network, folder: Path, *, run_id: str, num_steps: int) -> None:
        self._network, self._folder, self.run_id = network, folder, run_id
        self._units: dict[str, Unit] = {}
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RELAX_")
        }
        self._environment |= store_environment(network.address("broker"), STORE_PORT)
        self._environment |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
        }
        tree = self._tree(num_steps)
        for host in HOSTS:
            (folder / host / "logs").mkdir(parents=True)
            (folder / host / "run.json").write_bytes(orjson.dumps(tree))
            (folder / host / "reward.py").write_text(REWARD)
            rows = [{"prompt": f"spell {number} backwards", "answer": ""} for number in range(24)]
            (folder / host / "prompts.jsonl").write_bytes(
                b"".join(orjson.dumps(row) + b"\n" for row in rows)
            )

    def _tree(self, num_steps: int) -> dict[str, Any]:
        return {
            "run": {
                "id": self.run_id,
                "directory": ".relax",
                "num_steps": num_steps,
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "max_staleness": 2,
            },
            "model": {
                "path": "model",
                "device": "cpu",
                "tiny": {"hidden_size": 32, "num_layers": 1, "corpus_rows": 24},
            },
            "data": {"source": "jsonl:prompts.jsonl"},
            "broker": {
                "bootstrap_servers": f"{self._network.address('broker')}:{BROKER_PORT}",
                "session_timeout_seconds": 6.0,
                "request_timeout_seconds": 10.0,
                "partitions_per_version": 2,
                # a lost host closes no connection: its leases end by this alone
                "lease_seconds": 20.0,
            },
            "objects": {"uri": f"s3://bucket/{self.run_id}"},
            "engine": {"max_context_tokens": 96, "threads": 1, "sampling": {"max_new_tokens": 8}},
            "reward": {"function": "reward.py:spread"},
            "algorithm": {"normalise_std": False},
            "trainer": {
                "ranks": 2,
                "learning_rate": 1e-3,
                "threads": 1,
                "checkpoint_every": 3,
                "collective_timeout_seconds": 20.0,
            },
            "workers": {"rollout": 2, "drain_seconds": 20.0},
            "scaling": {"api": "off"},
        }

    def prepare(self) -> None:
        """Start broker and store, create topics and the model, and copy that to all hosts."""
        self._start_broker()
        self._add("broker", "store", [sys.executable, "-m", "tests.s3_server",
                                      self._network.address("broker"), str(STORE_PORT)])  # fmt: skip
        deadline = time.monotonic() + COMMAND_SECONDS
        while self.relax("topics", "apply", "run.json", "--yes", check=False) != 0:
            if time.monotonic() > deadline:
                raise AssertionError(self.log("broker", "command"))
        self.relax("models", "prepare", "run.json")
        for host in HOSTS[1:]:
            copytree(self._folder / "broker" / "model", self._folder / host / "model")

    def start(self) -> None:
        """Start the workers of all hosts."""
        for role in LIGHT_ROLES:
            self._add("broker", role, self._worker(role))
        for index in range(2):
            self._add(f"engine-{index}", "rollout", self._worker("rollout", "--index", str(index)))
            self._add(f"trainer-{index}", "trainer", self._launcher(index))

    def watch(self, condition: Callable[[], bool], *, what: str, seconds: float) -> None:
        """Start failed processes again until a condition holds.

        Raises:
            AssertionError: It does not hold in time, or the controller has ended before.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {seconds:g} s\n{self.describe()}")
            self._restart_failed()
            time.sleep(PAUSE_SECONDS)

    @property
    def policy_version(self) -> int:
        """The newest version that rank 0 has committed, by its log."""
        lines = self.trainer_log.splitlines()
        steps = [
            orjson.loads(line)["train_step"] for line in lines if '"train_step.committed"' in line
        ]
        return max(steps, default=-1) + 1

    @property
    def trainer_log(self) -> str:
        """The log of rank 0."""
        return self.log("trainer-0", "trainer")

    @property
    def has_ended(self) -> bool:
        """Whether the controller has ended the run."""
        unit = self._units[self.ENDS]
        return bool(unit.codes) and unit.codes[-1] == 0

    def num_starts(self, host: str, name: str) -> int:
        """Return how often a process was started."""
        return self._units[f"{host}/{name}"].num_starts

    def relax(self, *words: str, check: bool = True) -> int:
        """Run a command on the broker's host; return its exit code."""
        with (self._folder / "broker" / "logs" / "command.log").open("ab") as log:
            process = self._network.spawn(
                "broker", [sys.executable, "-m", "relax_events.cli", *words],
                folder=self._folder / "broker", log=log, environment=self._environment,
            )  # fmt: skip
            code = process.wait(timeout=COMMAND_SECONDS)
        if check and code != 0:
            raise AssertionError(
                f"relax {' '.join(words)}: {code}\n{self.log('broker', 'command')}"
            )
        return code

    def log(self, host: str, name: str) -> str:
        """Return the log of a process, over all its starts."""
        path = self._folder / host / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def describe(self) -> str:
        """Return the state of all processes, with the end of the logs of those that failed."""
        lines = []
        for name, unit in self._units.items():
            lines.append(f"{name}: {unit.num_starts} starts, exit codes {unit.codes}")
            if unit.num_starts > 1 or unit.codes:
                lines.append(self.log(unit.host, unit.name)[-1500:])
        return "\n".join(lines)

    def close(self) -> None:
        """End all processes."""
        for unit in self._units.values():
            unit.is_wanted = False
            _end(unit, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        for unit in self._units.values():
            if unit.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    unit.process.wait(timeout=max(deadline - time.monotonic(), 0.1))
                _end(unit, signal.SIGKILL)
                unit.process.wait(timeout=END_SECONDS)

    def _worker(self, role: str, *words: str) -> list[str]:
        return [sys.executable, "-m", "relax_events.cli", "worker", role, "run.json", *words,
                "telemetry.log_format=json"]  # fmt: skip

    def _launcher(self, index: int) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "2", "--node-rank", str(index), "--nproc-per-node", "1",
            "--master-addr", self._network.address("trainer-0"),
            "--master-port", str(RENDEZVOUS_PORT), "--max-restarts", "0",
            "--module", "relax_events.cli", *self._worker("trainer")[3:],
        ]  # fmt: skip

    def _start_broker(self) -> None:
        folder = self._folder / "broker" / "kafka"
        (folder / "tmp").mkdir(parents=True)
        ensure_formatted(folder / "data")
        address = self._network.address("broker")
        text = build_server_properties(
            folder / "data", port=BROKER_PORT, controller_port=CONTROLLER_PORT, overrides={}
        )
        text += (
            f"listeners=PLAINTEXT://{address}:{BROKER_PORT},CONTROLLER://127.0.0.1:{CONTROLLER_PORT}\n"
            f"advertised.listeners=PLAINTEXT://{address}:{BROKER_PORT}\n"
        )  # the last one of a key counts
        properties = folder / "server.properties"
        properties.write_text(text)
        java, lock = find_java(), read_jar_lock()
        jars = ensure_jars(lock, locate_cache(lock))
        archive = locate_class_archive(java, jars, jars[0].parent)
        words = build_broker_command(java, jars, properties, archive=archive, archive_at_exit=None)
        self._add("broker", "kafka", [str(word) for word in words])

    def _add(self, host: str, name: str, command: Sequence[str]) -> None:
        self._units[f"{host}/{name}"] = unit = Unit(host, name, command)
        self._spawn(unit)

    def _spawn(self, unit: Unit) -> None:
        folder = self._folder / unit.host
        with (folder / "logs" / f"{unit.name}.log").open("ab") as log:
            unit.process = self._network.spawn(
                unit.host, unit.command, folder=folder, log=log, environment=self._environment
            )
        unit.num_starts += 1

    def _restart_failed(self) -> None:
        for unit in self._units.values():
            if unit.process is None or (code := unit.process.poll()) is None:
                continue
            unit.process = None
            unit.codes.append(code)
            if code != 0 and unit.is_wanted:
                self._spawn(unit)


class OneCommandRun(HostsRun):
    """The same run by one command, on the hosts `broker` and `engine-0`, which share a folder as
    the hosts of a cluster do. A program that enters the other's namespace stands for ssh.
    """

    ENDS = "broker/run"

    def start(self) -> None:
        """Start the command on the first host."""
        first, other = "broker", "engine-0"
        addresses = [self._network.address(name) for name in (first, other)]
        enter = self._folder / "enter-host"
        enter.write_text(
            f'#!/bin/sh\n[ "$1" = {addresses[1]} ] || exit 255\n'
            f'exec ip netns exec {self._network.namespace(other)} sh -c "$2"\n'
        )
        enter.chmod(0o755)
        command = orjson.dumps([str(enter), "{host}"]).decode()
        self._add(first, "run", [
            sys.executable, "-m", "relax_events.cli", "run", "run.json",
            "--hosts", ",".join(addresses), f"hosts.command={command}",
            "telemetry.log_format=json", "telemetry.dashboard=false",
        ])  # fmt: skip

    def interrupt(self) -> int:
        """Interrupt the command, and return its exit code."""
        process = self._units[self.ENDS].process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout=COMMAND_SECONDS)

    @property
    def trainer_log(self) -> str:
        """The log of rank 0."""
        logs = self._folder / "broker" / ".relax" / "runs" / self.run_id / "logs"
        path = logs / "trainer-0.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def describe(self) -> str:
        """Return the state of all processes, with the end of the command's output."""
        return f"{super().describe()}\n{self.log('broker', 'run')[-6000:]}"


def _end(unit: Unit, number: signal.Signals) -> None:
    if unit.process is not None and unit.process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(unit.process.pid, number)


@contextmanager
def hosts_run(
    folder: Path, *, run_id: str, num_steps: int, kind: type[AnyRun]
) -> Iterator[tuple[Network, AnyRun]]:
    """Yield a prepared run over fresh hosts, and end both.

    Raises:
        NotPermitted: This user can't make network namespaces here.
    """
    with ExitStack() as stack:
        network = stack.enter_context(Network(HOSTS))
        run = kind(network, folder, run_id=run_id, num_steps=num_steps)
        stack.callback(run.close)
        run.prepare()
        yield network, run
