"""A process that writes into a data plane, or reads from it, on command: `python -m
benchmarks.planes.child <plane>`.

Commands and answers are lines of JSON. A process stays for the whole benchmark, so that what starts
once is not measured.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

from benchmarks.planes.protocol import Cell, Got, Plane, Reader, Writer
from relax_events.events.parts import now_micros

STALL_SECONDS = 60.0
WAIT_SECONDS = 1.0


class Child:
    """Carries out commands; `answer` writes a line to the process that gave them."""

    def __init__(self, plane: Plane, output: TextIO) -> None:
        self._plane, self._output = plane, output
        self._writer: Writer | None = None

    def answer(self, **values: Any) -> None:
        """Say something to the parent."""
        print(json.dumps(values), file=self._output, flush=True)

    def open(self, *, address: str, channel: str, num_tokens: int) -> None:
        """Make a channel."""
        self._writer = self._plane.open_writer(address, channel, num_tokens)
        self.answer(open=True)

    def write(self, *, cell: dict[str, Any], num_samples: int) -> None:
        """Put samples into the open channel; answer with when the first was put (monotonic seconds)
        and how long all took."""
        assert self._writer is not None
        cell_settings = Cell(**cell)
        if (prepare := getattr(self._writer, "prepare", None)) is not None:
            prepare(cell_settings.batch)
        started = time.monotonic()
        if cell_settings.is_streaming:
            self._writer.stream(num_samples)
        else:
            put(self._writer, cell_settings, num_samples)
        self.answer(started=started, seconds=time.monotonic() - started)

    def drop(self) -> None:
        """Delete the channel."""
        assert self._writer is not None
        self._writer.drop()
        self._writer = None
        self.answer(dropped=True)

    def read(
        self, *, address: str, channel: str, consumer: str, cell: dict[str, Any], num_samples: int
    ) -> None:
        """Say when ready, then read so many samples; answer with when the last came and with the
        latencies."""
        reader = self._plane.open_reader(address, channel, consumer)
        self.answer(ready=True)
        got: list[Got] = []
        latencies: list[int] = []
        read(reader, Cell(**cell).read_batch, num_samples, got, latencies)
        ended = time.monotonic()
        reader.close()
        self.answer(
            ended=ended,
            latencies_us=latencies,
            num_distinct=len({one.row for one in got}),
            num_got=len(got),
        )

    def take(self, *, address: str, channel: str, consumer: str, num_samples: int) -> None:
        """Take samples and keep them, undone; the parent kills us next."""
        reader = self._plane.open_reader(address, channel, consumer)
        num_taken = 0
        while num_taken < num_samples:
            num_taken += reader.take(num_samples - num_taken, timeout_seconds=WAIT_SECONDS)
        self.answer(taken=num_taken)

    def rest(
        self, *, address: str, channel: str, consumer: str, num_samples: int, quiet_seconds: float
    ) -> None:
        """Read samples until all rows came or nothing comes for `quiet_seconds`; answer with
        how many distinct rows came."""
        reader = self._plane.open_reader(address, channel, consumer)
        rows: set[int] = set()
        last = time.monotonic()
        failures: list[str] = []
        while len(rows) < num_samples and time.monotonic() - last < quiet_seconds:
            try:
                got = reader.get(1, timeout_seconds=WAIT_SECONDS)
            except (
                Exception
            ) as error:  # whatever a plane raises over lost data is a finding, not our failure
                failures.append(f"{type(error).__name__}: {error}")
                continue
            if got:
                rows.update(one.row for one in got)
                last = time.monotonic()
        reader.close()
        self.answer(
            num_distinct=len(rows),
            num_failures=len(failures),
            failure=failures[0] if failures else "",
        )


def put(writer: Writer, cell: Cell, num_samples: int) -> None:
    """Put batch after batch, each acknowledged before the next; paced if the cell requests it."""
    due = time.monotonic()
    for first in range(0, num_samples, cell.batch):
        if cell.per_second:
            time.sleep(max(0.0, due - time.monotonic()))
            due += cell.batch / cell.per_second
        writer.put(range(first, min(first + cell.batch, num_samples)), now_micros())


def read(
    reader: Reader, batch: int, num_samples: int, got: list[Got], latencies_us: list[int]
) -> None:
    """Read until there are so many samples.

    Raises:
        TimeoutError: Nothing came for a minute.
    """
    progress = time.monotonic()
    while len(got) < num_samples:
        samples = reader.get(min(batch, num_samples - len(got)), timeout_seconds=WAIT_SECONDS)
        now = now_micros()
        latencies_us.extend(now - one.ready_at for one in samples)
        got.extend(samples)
        if samples:
            progress = time.monotonic()
        elif time.monotonic() - progress > STALL_SECONDS:
            raise TimeoutError(
                f"{len(got)} of {num_samples} samples came, then nothing for {STALL_SECONDS:g} s"
            )


def main(plane: str) -> None:
    """Obey until the input ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; the answers' channel is ours alone
    child = Child(importlib.import_module(f"benchmarks.planes.{plane}"), output)
    for line in sys.stdin:
        command = json.loads(line)
        getattr(child, command.pop("do"))(**command)


if __name__ == "__main__":
    main(sys.argv[1])
