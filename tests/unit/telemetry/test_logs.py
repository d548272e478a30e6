"""A log event is one line of JSON, whatever its values."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from relax_events.config import TelemetryConfig
from relax_events.telemetry.logs import configure_logs


@pytest.fixture
def written_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logs(TelemetryConfig(log_format="json"), role="trainer")
    yield stream
    structlog.reset_defaults()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({0: "torn", 1: "gone"}, {"0": "torn", "1": "gone"}),
        ("half a pair: \ud800", "half a pair: \ud800"),
        (2**70, 2**70),
        ({(1, 2): "a pair"}, "{(1, 2): 'a pair'}"),
        ({1}, "{1}"),
        (b"\xff", "b'\\xff'"),
    ],
    ids=["numbers as keys", "surrogate", "large number", "pairs as keys", "set", "bytes"],
)
def test_log_event_is_written_with_any_value(
    written_log: io.StringIO, value: object, written: object
) -> None:
    structlog.get_logger().error("checkpoint.read_failed", errors=value)
    line = json.loads(written_log.getvalue())
    assert (line["event"], line["errors"], line["role"]) == (
        "checkpoint.read_failed",
        written,
        "trainer",
    )


@pytest.fixture
def log_path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run.log"
    structlog.reset_defaults()


def test_log_line_ends_no_process_when_the_disk_is_full() -> None:
    try:
        configure_logs(TelemetryConfig(log_format="json"), path=Path("/dev/full"))
        structlog.get_logger().info("sample.scored")
    finally:
        structlog.reset_defaults()


def test_first_line_after_a_full_disk_counts_the_lost_ones(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logs(TelemetryConfig(log_format="json"), path=log_path)
    log, write, room = structlog.get_logger(), os.write, [40]

    def write_to_a_small_disk(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = write(fd, data[: room[0]])
        room[0] -= size
        return size

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_to_a_small_disk)
        log.info("cut.off")
        log.info("not.written")
    log.info("written.again")
    log.info("as.ever")
    cut, again, after = log_path.read_text().splitlines()
    assert len(cut) == 40
    assert json.loads(again)["num_lines_lost"] == 2
    assert "num_lines_lost" not in json.loads(after)
