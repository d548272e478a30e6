"""One side of the comparison: a server, a writing process and reading processes, driven from
here."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.planes.protocol import Cell, Server

ROOT = Path(__file__).parents[2]
READERS = 3


@dataclass(frozen=True)
class Result:
    """What one run of one cell gave."""

    num_samples: int
    samples_per_second: float
    p50_ms: float
    p99_ms: float
    cpu_seconds_per_1000: float
    num_lost: int


class Process:
    """A child that takes commands."""

    def __init__(self, python: Path, plane: str, environment: Mapping[str, str]) -> None:
        command = [str(python), "-m", "benchmarks.planes.child", plane]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            command, **pipes, cwd=ROOT, env=os.environ | environment, text=True
        )
        self.pid = self._process.pid

    def send_command(self, do: str, **arguments: Any) -> None:
        """Give a command."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        """Wait for an answer; the child itself gives up on what takes too long.

        Raises:
            RuntimeError: The child ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"a process of the benchmark ended with {self._process.wait(10)}; see the "
                "lines above"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Side:
    """A data plane under measurement. As a context manager it starts its processes on entry and
    ends them on exit."""

    def __init__(self, name: str, *, plane: str, python: Path, server: Server) -> None:
        self.name, self.server, self._plane, self._python = name, server, plane, python
        self._writer: Process | None = None
        self._readers: list[Process] = []

    def __enter__(self) -> Self:
        self.server.start()
        self._writer = self.process()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in (*self._readers, *([self._writer] if self._writer else [])):
            # they hold nothing of worth, and a client whose server is dead may not end by itself
            process.kill()
        self.server.stop()

    def process(self) -> Process:
        """Start one more process that knows the plane."""
        return Process(self._python, self._plane, self.server.environment)

    @property
    def writer(self) -> Process:
        """The process that puts."""
        assert self._writer is not None
        return self._writer

    def readers(self, count: int) -> list[Process]:
        """Return so many reading processes, starting the missing ones."""
        while len(self._readers) < count:
            self._readers.append(self.process())
        return self._readers[:count]

    def open_channel(self, num_tokens: int) -> str:
        """Make a channel of a new name."""
        channel = f"b-{uuid.uuid4().hex[:8]}"
        self.writer.send_command(
            "open", address=self.server.address, channel=channel, num_tokens=num_tokens
        )
        self.writer.receive()
        return channel

    def fill(self, cell: Cell, num_samples: int) -> dict[str, Any]:
        """Put samples into the open channel."""
        self.writer.send_command("write", cell=dataclasses.asdict(cell), num_samples=num_samples)
        return self.writer.receive()

    def drop_channel(self) -> None:
        """Delete the open channel."""
        self.writer.send_command("drop")
        self.writer.receive()

    def notify_reader(
        self, process: Process, do: str, *, channel: str, consumer: str, **arguments: Any
    ) -> None:
        """Give a reading process a command about a channel."""
        process.send_command(
            do, address=self.server.address, channel=channel, consumer=consumer, **arguments
        )

    def run(self, cell: Cell, num_samples: int) -> Result:
        """Measure one cell once: readers wait, the writer puts, all read to the last sample."""
        channel, readers = self.open_channel(cell.num_tokens), self.readers(cell.num_readers)
        for index, reader in enumerate(readers):
            self.notify_reader(
                reader,
                "read",
                channel=channel,
                consumer=f"reader-{index}",
                cell=dataclasses.asdict(cell),
                num_samples=num_samples,
            )
        for reader in readers:
            reader.receive()
        cpu_before = self._cpu_seconds()
        written = self.fill(cell, num_samples)
        read = [reader.receive() for reader in readers]
        cpu_seconds = self._cpu_seconds() - cpu_before
        self.drop_channel()
        seconds = max(one["ended"] for one in read) - written["started"]
        latencies = sorted(latency / 1000 for one in read for latency in one["latencies_us"])
        return Result(
            num_samples,
            num_samples / seconds,
            statistics.median(latencies),
            latencies[int(len(latencies) * 0.99)],
            cpu_seconds / num_samples * 1000,
            num_samples * len(readers) - sum(one["num_distinct"] for one in read),
        )

    def _cpu_seconds(self) -> float:
        pids = {*self.server.pids(), self.writer.pid, *(reader.pid for reader in self._readers)}
        times = [psutil.Process(pid).cpu_times() for pid in pids if psutil.pid_exists(pid)]
        return float(sum(one.user + one.system for one in times))
