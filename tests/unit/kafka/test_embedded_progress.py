"""Progress on stderr, as log lines and on a terminal."""

import sys
from io import StringIO

import pytest

from relax_events.kafka.embedded.jars import show_progress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_transfer_progress_prints_a_line_per_quarter_when_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with show_progress("things", 4 << 20) as advance:
        for _ in range(40):
            advance((4 << 20) // 40)
        advance((4 << 20) - (4 << 20) // 40 * 40)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fetching things, 4.0 MiB"
    assert lines[-1] == "fetched 100% of things"
    assert len(lines) == 5


def test_transfer_progress_prints_no_duplicates_when_a_part_restarts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with show_progress("things", 100) as advance:
        for num_bytes in (30, -30, 30, 70):
            advance(num_bytes)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "fetched 30% of things",
        "fetched 100% of things",
    ]


def test_transfer_progress_draws_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_progress("things", 100) as advance:
        advance(100)
    assert "fetching things" in terminal.getvalue()
