"""`relax broker` without a running broker: its message and exit code."""

import json
from pathlib import Path

import pytest

from relax_events.cli.broker import app
from relax_events.kafka.embedded.status import BrokerStatus, read_broker_status

REPORT = BrokerStatus(
    "/node",
    True,
    "127.0.0.1:20001",
    77,
    "relax run",
    [81, 92],
    "no",
    "4.3.1",
    61.7,
    3 << 19,
    5 << 20,
)


def test_report_describes_each_field() -> None:
    assert [f"{name:<18}  {value}" for name, value in REPORT.describe().items()] == [
        "state               running",
        "bootstrap servers   127.0.0.1:20001",
        "clients log in      no",
        "pid                 77",
        "Kafka version       4.3.1",
        "uptime              62 s",
        "started by          relax run",
        "runs until          its last user leaves",
        "used by             process 81, process 92",
        "records on disk     5.00 MiB",
        "size of broker.log  1.50 MiB",
        "directory           /node",
    ]


def test_broker_report_is_down_and_empty_when_nothing_was_started(tmp_path: Path) -> None:
    report = read_broker_status(tmp_path / "node")
    assert report == BrokerStatus(
        str(tmp_path / "node"), False, None, None, None, [], None, None, None, 0, 0
    )
    assert (report.describe()["state"], report.describe()["bootstrap servers"]) == ("down", "-")


def test_broker_report_counts_allocated_blocks_of_sparse_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "sparse.index").open("wb") as file:
        file.truncate(10 << 20)
    (tmp_path / "data" / "real.log").write_bytes(b"x" * 100_000)
    (tmp_path / "broker.log").write_bytes(b"y" * 12)
    report = read_broker_status(tmp_path)
    assert 100_000 <= report.disk_bytes < 1 << 20
    assert report.log_bytes == 12


def test_status_exits_with_3_when_the_broker_is_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = app(
        ["status", "--directory", str(tmp_path), "--output", "json"], result_action="return_value"
    )
    assert answer == 3
    assert json.loads(capsys.readouterr().out)["running"] is False


def test_logs_print_the_end_of_the_log_when_the_broker_is_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broker.log").write_text("one\ntwo\nthree\n")
    app(
        ["status", "--directory", str(tmp_path), "--lines", "2", "--follow"],
        result_action="return_value",
    )
    assert capsys.readouterr().out == "two\nthree\n"


def test_stop_command_prints_nothing_when_the_broker_is_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["stop", "--directory", str(tmp_path)], result_action="return_value")
    assert capsys.readouterr().out == ""
