"""A log event is one line of JSON, whatever its values."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

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
