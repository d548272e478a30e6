"""Worker logs as readable lines: parsed, sorted by time, filtered by level, and followed while they
are written.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import orjson
import pytest

from relax_events.cli.logs import logs
from relax_events.errors import ConfigError
from relax_events.history.worker_logs import (
    LogParser,
    LogTail,
    filter_by_level,
    log_files,
    read_lines,
)

SECONDS = 60.0


def event(at: int, name: str, level: str = "info", **more: object) -> bytes:
    """Return a line of a log, written in a second of a minute."""
    return (
        orjson.dumps(
            {
                "role": "reward",
                "event": name,
                "level": level,
                "timestamp": f"2026-01-01T00:00:{at:02}Z",
                **more,
            }
        )
        + b"\n"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run with logs of two workers and of `relax run`."""
    logs = tmp_path / "runs" / "demo" / "logs"
    logs.mkdir(parents=True)
    failed = b"Traceback (most recent call last):\n\n" + event(
        5, "worker.failed", "error", text="no room"
    )
    (logs / "trainer-0.log").write_bytes(event(1, "worker.started", metrics_port=9100) + failed)
    (logs / "trainer-1.log").write_bytes(event(2, "worker.started"))
    (logs / "run.log").write_bytes(event(3, "worker.died", "warning", worker="trainer-0"))
    return logs


def test_log_line_that_is_no_event_takes_the_time_of_the_previous_line() -> None:
    parser = LogParser("reward-0")
    lines = [
        parser.parse_line(raw)
        for raw in (
            event(7, "x.done", count=3, why="a b"),
            b"printed\n",
            b"\n",
            b'{"other": 1}\n',
            b"\xff" * 100_000,
        )
    ]
    assert (
        str(lines[0]) == '2026-01-01 00:00:07  reward-0         info      x.done count=3 why="a b"'
    )
    assert str(lines[1]) == "2026-01-01 00:00:07  reward-0                   printed"
    assert lines[2] is None
    assert [line.text[:12] if line else "" for line in lines[3:]] == ['{"other": 1}', "\ufffd" * 12]
    assert lines[4] is not None
    assert len(lines[4].text) == 10_000


def test_logs_are_sorted_by_time_and_can_be_filtered_by_role_or_worker(folder: Path) -> None:
    assert [line.text.split()[0] for line in read_lines(log_files(folder))] == [
        "worker.started",
        "Traceback",
        "worker.started",
        "worker.died",
        "worker.failed",
    ]
    assert [*log_files(folder, ["trainer"])] == ["trainer-0", "trainer-1"]
    assert [
        line.text
        for line in filter_by_level(read_lines(log_files(folder, ["trainer-0", "run"])), "error")
    ] == [
        "Traceback (most recent call last):",
        'worker.failed text="no room"',
    ]
    with pytest.raises(
        ConfigError, match=r"there is no log of reward in .*; there are run, trainer-0, trainer-1"
    ):
        log_files(folder, ["reward"])
    with pytest.raises(ConfigError, match=r"there are no logs in .*nowhere"):
        log_files(folder / "nowhere")


def test_tail_yields_complete_lines_of_existing_and_new_logs(
    folder: Path,
) -> None:
    with (folder / "trainer-1.log").open("ab") as file:
        file.write(b'{"event":"half')
    tail, heard = LogTail(folder), SimpleQueue[str]()
    known = [line.text for line in read_lines(log_files(folder), ends=tail.ends)]
    assert "half" not in "".join(known)
    assert len(known) == 5

    def follow() -> None:
        for line in tail.lines():
            heard.put(f"{line.worker} {line.text}")
            if line.text == "the end":
                return

    thread = threading.Thread(target=follow)
    thread.start()
    with (folder / "trainer-1.log").open("ab") as file:
        file.write(b'-line"}\n')
    assert heard.get(timeout=SECONDS) == "trainer-1 half-line"
    (folder / "reward-0.log").write_bytes(event(9, "worker.started"))
    assert heard.get(timeout=SECONDS) == "reward-0 worker.started"
    with (folder / "run.log").open("ab") as file:
        file.write(event(10, "the end"))
    assert heard.get(timeout=SECONDS) == "run the end"
    thread.join(SECONDS)
    tail.close()


def test_command_shows_the_last_lines_of_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs("demo", "trainer", lines=2, level="warning", directory=folder.parents[2])
    logs("demo", "trainer", lines=2, level="warning", directory=folder.parents[2], output="json")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=3)[3] for line in shown[:2]] == [
        "Traceback (most recent call last):",
        'error     worker.failed text="no room"',
    ]
    assert orjson.loads(shown[3])["worker"] == "trainer-0"


def test_process_that_can_write_no_error_keeps_its_exit_code(tmp_path: Path) -> None:
    """The code decides whether a worker is restarted; its texts went to a full disk."""
    with open("/dev/full", "wb") as full:
        for words in (["worker", "reward", "absent.json"], ["run", "absent.toml"]):
            ended = subprocess.run(
                [sys.executable, "-m", "relax_events.cli", *words],
                cwd=tmp_path,
                stderr=full,
                timeout=120,
                check=False,
            )
            assert ended.returncode == ConfigError.exit_code, words
