"""A reader that gives way to its run: older samples come in turn with new ones, and nothing is
read while no page asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from event_samples import rolled_out
from small_settings import small_run
from written_run import WrittenRun

from relax_events.kafka.log_reader import LogReader
from relax_events.packages.dashboard import run_reader
from relax_events.packages.dashboard.run_reader import RunReader

NUM_OLD = 24
SECONDS = 120.0


@pytest.fixture
def written(bootstrap_servers: str, run_id: str, tmp_path: Path) -> Iterator[WrittenRun]:
    """Write a run of one version, with some samples."""
    config = small_run(
        {
            "run": {"id": run_id, "directory": str(tmp_path)},
            "model": {"path": str(tmp_path / "model")},
            "data": {"source": "jsonl:unused"},
            "broker": {"bootstrap_servers": bootstrap_servers, "partitions_per_version": 1},
        }
    )
    run = WrittenRun(config)
    run.describe()
    run.publish(0)
    for number in range(NUM_OLD):
        write(run, number)
    yield run
    run.close()


def write(run: WrittenRun, number: int) -> None:
    """Write a sample."""
    run.write_sample("rollout.samples", rolled_out(f"000000-{number:04d}-0", 0))


def has_read(reader: RunReader, num_samples: int) -> bool:
    """Ask as a page does, and return whether so many samples are read."""
    reader.keep_reading()
    return len(reader.table) == num_samples


def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    stop = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < stop, "not in time"
        time.sleep(0.05)


def test_older_samples_are_read_while_new_ones_never_cease(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, num_new = LogReader.fetch, [0]

    def fetch_something(
        self: LogReader, max_records: int = 500, *, timeout_seconds: float
    ) -> list[object]:
        """Write a record where none is there: each turn has a new one."""
        del timeout_seconds
        found: list[object] = []
        while not found:
            write(written, NUM_OLD + num_new[0])
            num_new[0] += 1
            found = list(fetch(self, max_records, timeout_seconds=1.0))
        return found

    monkeypatch.setattr(LogReader, "fetch", fetch_something)
    reader = RunReader(written.config, gives_way=True).start()
    try:
        until(lambda: reader.status.is_caught_up)
        assert len(reader.table) >= NUM_OLD
    finally:
        reader.close()


def test_reader_rests_while_no_page_asks_and_then_reads_on_where_it_was(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, pause = threading.Event(), LogReader.pause

    def note_pause(self: LogReader) -> None:
        pause(self)
        paused.set()

    monkeypatch.setattr(LogReader, "pause", note_pause)
    monkeypatch.setattr(run_reader, "WATCHED_SECONDS", 2.0)
    reader = RunReader(written.config, gives_way=True).start()
    heard = threading.Event()
    reader.on_news = heard.set
    try:
        until(lambda: has_read(reader, NUM_OLD))
        paused.clear()
        assert paused.wait(SECONDS)
        heard.clear()
        write(written, NUM_OLD)
        assert not heard.wait(3.0), "it read although no page asked"
        until(lambda: has_read(reader, NUM_OLD + 1))
        texts = reader.texts.find([NUM_OLD])
        assert texts[NUM_OLD]["completion"] == rolled_out("000000-0000-0", 0).completion
    finally:
        reader.close()
