"""Our bus next to TransferQueue and Redis streams, on the same samples: rates, latencies, processor
time, and what a kill loses.

The sides take turns within each round, so that whatever else the machine does falls on all of them;
ratios are of one round.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import environment, report
from benchmarks.planes import losses
from benchmarks.planes.kafka import KafkaServer
from benchmarks.planes.losses import Losses
from benchmarks.planes.protocol import UNDER_WAY, Cell
from benchmarks.planes.redis_server import RedisServer
from benchmarks.planes.samples import BYTES_PER_TOKEN
from benchmarks.planes.side import READERS, Result, Side
from benchmarks.planes.transfer_queue import TransferQueueServer

OURS, TRANSFER_QUEUE = "Relax Events", "TransferQueue"
SIZES = {"7 KB": 512, "53 KB": 4096, "0.5 MB": 40_960}
ONE_BY_ONE = "one by one"
CELL_BYTES = (
    256 * 1024 * 1024
)  # what one measurement moves at the most, unless its two batches are more
PACED_PER_SECOND, PACED_SECONDS = (
    50.0,
    6.0,
)  # so many that its p99 is not the very first one, whose topic no one has met yet

Results = dict[str, list[Result]]


@dataclass(frozen=True)
class Effort:
    """How long it may take."""

    num_rounds: int
    seconds: float
    warm_seconds: float
    sizes: tuple[str, ...] = tuple(SIZES)


FULL = Effort(num_rounds=3, seconds=0.8, warm_seconds=3.0)
QUICK = Effort(num_rounds=1, seconds=0.3, warm_seconds=0.5, sizes=("7 KB",))


@dataclass
class Measured:
    """Everything that came out: per size and cell the results of each side by round, and what each
    side lost."""

    cells: dict[str, dict[str, Results]] = field(default_factory=dict)
    losses: dict[str, Losses] = field(default_factory=dict)


def cells(size: str) -> list[Cell]:
    """Return what is measured at a size."""
    num_tokens = SIZES[size]
    batches = [Cell(f"batches of {batch}", num_tokens, batch=batch) for batch in (64, 512)]
    rest = [
        Cell(f"streamed, at most {UNDER_WAY} unacknowledged", num_tokens, is_streaming=True),
        Cell(f"batches of 64 to {READERS} consumers", num_tokens, batch=64, num_readers=READERS),
        Cell(f"one by one, {PACED_PER_SECOND:g} a second", num_tokens, per_second=PACED_PER_SECOND),
    ]
    return [Cell(ONE_BY_ONE, num_tokens), *batches, *(rest if num_tokens < SIZES["0.5 MB"] else [])]


def sides(folder: Path) -> Iterator[Side]:
    """Make the sides; none runs yet."""
    bench = environment.python()
    if shutil.which("redis-server") is None:
        raise SystemExit(
            "redis-server is not on PATH; install it (Debian: redis-server) and run again"
        )
    yield Side(
        OURS, plane="kafka", python=Path(sys.executable), server=KafkaServer(folder / "broker")
    )
    yield Side(
        TRANSFER_QUEUE,
        plane="transfer_queue",
        python=bench,
        server=TransferQueueServer(bench, folder / "ray"),
    )
    for name, is_durable in {
        "Redis, log synced every second": True,
        "Redis, memory only": False,
    }.items():
        yield Side(
            name,
            plane="redis",
            python=bench,
            server=RedisServer(folder / f"redis-{is_durable}", is_durable=is_durable),
        )


def num_samples(cell: Cell, *, per_second: float, seconds: float) -> int:
    """Return how many samples fill the time at this rate: whole batches, two at the least, and not
    more bytes than allowed."""
    if cell.per_second:
        return int(cell.per_second * PACED_SECONDS)
    most = CELL_BYTES // (cell.num_tokens * BYTES_PER_TOKEN)
    unit = cell.read_batch
    return max(2, int(min(per_second * seconds, most) / unit)) * unit


def measure_cell(running: Sequence[Side], cell: Cell, effort: Effort) -> Results:
    """Run a cell on all sides, round by round, each round beginning with another side; a first,
    short round warms and sets the counts."""
    results: Results = {side.name: [] for side in running}
    warm = 20 if cell.per_second else max(cell.read_batch, 32)
    rates = {side.name: side.run(cell, warm).samples_per_second for side in running}
    for turn in range(effort.num_rounds):
        first = turn % len(running)
        for side in (*running[first:], *running[:first]):
            count = num_samples(cell, per_second=rates[side.name], seconds=effort.seconds)
            result = side.run(cell, count)
            rates[side.name] = result.samples_per_second
            results[side.name].append(result)
            print(
                (
                    f"{cell.name}: {side.name}: {result.samples_per_second:.0f} samples/s, p99 "
                    f"{result.p99_ms:.1f} ms"
                ),
                file=sys.stderr,
                flush=True,
            )
    return results


def warm(running: Sequence[Side], seconds: float) -> None:
    """Use each side for a while: a broker's first thousands of requests run code that isn't
    compiled yet, three times as slow."""
    for cell in cells("7 KB")[:2]:
        for side in running:
            rate = side.run(cell, 64).samples_per_second
            side.run(cell, num_samples(cell, per_second=rate, seconds=seconds))


def measure(running: Sequence[Side], effort: Effort) -> Measured:
    """Measure all cells, then kill."""
    measured = Measured()
    warm(running, effort.warm_seconds)
    for size in effort.sizes:
        measured.cells[size] = {
            cell.name: measure_cell(running, cell, effort) for cell in cells(size)
        }
    for side in running:
        measured.losses[side.name] = losses.measure(side)
    return measured


def ratios(ours: Sequence[Result], theirs: Sequence[Result]) -> list[float]:
    """Return how many times our rate was theirs, round by round."""
    return [
        mine.samples_per_second / other.samples_per_second
        for mine, other in zip(ours, theirs, strict=True)
    ]


def lay_out_row(cell: str, side: str, results: Results, num_bytes: int) -> dict[str, str]:
    """Sum up a side's rounds of a cell."""
    rounds = results[side]
    rate = statistics.median(one.samples_per_second for one in rounds)
    times = ratios(results[OURS], rounds)
    return {
        "samples are put": cell,
        "side": side,
        "samples/s": f"{rate:,.0f}",
        "MB/s": f"{rate * num_bytes / 1e6:,.1f}",
        "p50 ms": f"{statistics.median(one.p50_ms for one in rounds):,.1f}",
        "p99 ms": f"{statistics.median(one.p99_ms for one in rounds):,.1f}",
        "CPU s per 1,000": f"{statistics.median(one.cpu_seconds_per_1000 for one in rounds):.2f}",
        "our rate is": ""
        if side == OURS
        else f"{statistics.median(times):.2f}x ({min(times):.2f} to {max(times):.2f})",
    }


def tables(measured: Measured) -> dict[str, list[dict[str, str]]]:
    """Lay out the results, a table for each size and one for the losses."""
    tables_by_title = {}
    for size, by_cell in measured.cells.items():
        num_bytes = SIZES[size] * BYTES_PER_TOKEN
        tables_by_title[f"Samples of {size}"] = [
            lay_out_row(cell, side, results, num_bytes)
            for cell, results in by_cell.items()
            for side in results
        ]
    tables_by_title["Acknowledged samples lost when something is killed"] = [
        {
            "side": side,
            f"consumer killed holding {lost.num_taken} of {lost.num_samples}": str(
                lost.consumer_killed
            ),
            f"storage killed holding {lost.num_samples}": str(lost.storage_killed),
        }
        for side, lost in measured.losses.items()
    ]
    return tables_by_title


def main(arguments: Sequence[str] = ()) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    quick = (
        "one short round of the smallest samples, about a minute; the page goes to a new "
        "temporary folder"
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else FULL
    started = time.monotonic()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the servers end with us
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        running = [stack.enter_context(side) for side in sides(Path(scratch))]
        measured = measure(running, effort)
    folder = Path(tempfile.mkdtemp()) if options.quick else report.FOLDER
    publish(measured, folder=folder)
    print(f"took {time.monotonic() - started:.0f} s; wrote {folder}", file=sys.stderr)


def publish(measured: Measured, *, folder: Path) -> None:
    """Write the page."""
    report.write(
        "bus",
        title="The bus compared with TransferQueue and Redis streams",
        command="python -m benchmarks.bus",
        tables=tables(measured),
        data=asdict(measured),
        folder=folder,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
