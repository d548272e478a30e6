"""Reading the end of a log file, once or as it grows."""

from pathlib import Path

import pytest

from relax_events.kafka.embedded.broker_log import follow_lines, read_last_lines


@pytest.mark.parametrize(
    ("num_lines", "expected"), [(0, []), (2, ["c", "d"]), (9, ["a", "b", "c", "d"])]
)
def test_read_last_lines_returns_the_requested_number_of_lines(
    tmp_path: Path, num_lines: int, expected: list[str]
) -> None:
    (tmp_path / "log").write_text("a\nb\nc\nd\n")
    assert read_last_lines(tmp_path / "log", num_lines=num_lines) == expected


def test_read_last_lines_stays_within_the_byte_range(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a\nb\nc\nd\n")
    assert read_last_lines(tmp_path / "log", num_lines=9, start_byte=2, end_byte=6) == ["b", "c"]


def test_read_last_lines_returns_nothing_when_the_file_is_missing(tmp_path: Path) -> None:
    assert read_last_lines(tmp_path / "log", num_lines=5) == []


def test_read_last_lines_reads_only_the_end_of_a_long_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 99 + "\n" + ("y" * 99 + "\n") * 10_000)
    lines = read_last_lines(tmp_path / "log", num_lines=1_000_000)
    assert len(lines) < 3000
    assert lines[-1] == "y" * 99


def test_follow_lines_yields_appended_lines_until_the_writer_exits(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    additions = iter(["first\nsec", "ond\n", "", "third\nunfinished"])

    def ended_within(timeout_seconds: float) -> bool:
        addition = next(additions)
        with log.open("a") as file:
            file.write(addition)
        return addition.endswith("unfinished")

    assert list(follow_lines(log, start_byte=4, ended_within=ended_within)) == [
        "first",
        "second",
        "third",
        "unfinished",
    ]
