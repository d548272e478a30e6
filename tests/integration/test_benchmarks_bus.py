"""The bus benchmark: our side runs on a real broker and loses nothing, and the page follows from
the metrics.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks import bus
from benchmarks.planes import losses
from benchmarks.planes.losses import Losses
from benchmarks.planes.protocol import Cell
from benchmarks.planes.side import Result, Side


class SessionBroker:
    """The broker of the test session, instead of one that the benchmark starts itself."""

    environment: Mapping[str, str] = {}

    def __init__(self, address: str) -> None:
        self.address = address

    def start(self) -> None:
        """It runs."""

    def stop(self) -> None:
        """It stays."""

    def pids(self) -> list[int]:
        """Leave it out of the processor time."""
        return []

    def kill_storage(self) -> None:
        raise AssertionError("the session's broker must live")


@pytest.fixture
def side(bootstrap_servers: str) -> Iterator[Side]:
    with Side(
        bus.OURS,
        plane="kafka",
        python=Path(sys.executable),
        server=SessionBroker(bootstrap_servers),
    ) as running:
        yield running


def result(rate: float, *, p99_ms: float = 5.0, num_lost: int = 0) -> Result:
    return Result(100, rate, 1.0, p99_ms, 0.5, num_lost)


def measured(
    ours: list[Result], theirs: list[Result], *, cell: str = bus.ONE_BY_ONE, lost: int = 0
) -> bus.Measured:
    results = {bus.OURS: ours, bus.TRANSFER_QUEUE: theirs}
    return bus.Measured(
        {"7 KB": {cell: results}},
        {bus.OURS: Losses(40, 10, 0, lost, ""), bus.TRANSFER_QUEUE: Losses(40, 10, 10, 20, "gone")},
    )


def test_kafka_side_delivers_every_sample_to_every_reader_in_each_write_mode(side: Side) -> None:
    cells = [
        Cell("streamed", 512, is_streaming=True),
        Cell("to two", 4096, batch=64, num_readers=2),
        Cell("paced", 512, per_second=100),
    ]
    results = [side.run(cell, 128) for cell in cells]
    assert [one.num_lost for one in results] == [0, 0, 0]
    assert results[2].samples_per_second < 128 / (
        127 / 100
    )  # the last is put 1.27 s after the first, at the earliest
    assert all(0 < one.p50_ms <= one.p99_ms for one in results)
    assert all(one.samples_per_second > 0 and one.cpu_seconds_per_1000 >= 0 for one in results)


@pytest.mark.long
def test_kafka_side_loses_no_sample_when_a_consumer_is_killed(side: Side) -> None:
    assert losses.kill_consumer(side) == 0


@pytest.mark.parametrize(
    ("cell", "per_second", "expected"),
    [
        (Cell("one", 512), 1000, 800),
        (Cell("one", 512), 1, 2),
        (Cell("batches", 512, batch=64), 1000, 768),
        (Cell("batches", 40_960, batch=512), 1000, 1024),
        (Cell("streamed", 512, is_streaming=True), 1000, 768),
        (
            Cell("paced", 512, per_second=40),
            1000,
            240,
        ),  # 6 s of them whatever the time given, so that a p99 rests on enough
    ],
)
def test_sample_count_is_whole_batches_that_fill_the_time(
    cell: Cell, per_second: float, expected: int
) -> None:
    assert bus.num_samples(cell, per_second=per_second, seconds=0.8) == expected


def test_rate_ratio_is_computed_within_each_round(tmp_path: Path) -> None:
    found = bus.tables(
        measured([result(100), result(300), result(900)], [result(10), result(10), result(100)])
    )
    assert [row["our rate is"] for row in found["Samples of 7 KB"]] == [
        "",
        "10.00x (9.00 to 30.00)",
    ]
    assert [row["samples/s"] for row in found["Samples of 7 KB"]] == ["300", "10"]
    assert list(found["Acknowledged samples lost when something is killed"][1].values()) == [
        bus.TRANSFER_QUEUE,
        "10",
        "20",
    ]


def test_publish_writes_benchmark_page_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bus.publish(measured([result(210)], [result(10)]), folder=tmp_path)
    page, data = (tmp_path / "bus.md").read_text(), json.loads((tmp_path / "bus.json").read_text())
    assert page.startswith("# The bus compared with")
    assert "| one by one | TransferQueue | 10 |" in page
    assert "## Samples of 7 KB" in page
    assert capsys.readouterr().out.strip() == page.strip()
    assert data["data"]["cells"]["7 KB"]["one by one"][bus.OURS][0]["samples_per_second"] == 210
