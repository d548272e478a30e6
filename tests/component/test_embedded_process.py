"""Processes that outlive their parent: started, found again, ended."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_events.errors import EnvironmentProblem
from relax_events.kafka.embedded.process import find_process, spawn, terminate, wait_for_end


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Name the file by which the sleeper is found."""
    return tmp_path / "file"


@pytest.fixture
def sleeper(tmp_path: Path, file: Path) -> Iterator[psutil.Process]:
    command = [sys.executable, "-c", "import time; time.sleep(60)", str(file)]
    running = spawn(command, log=tmp_path / "log")
    yield running
    if not wait_for_end(running, 0):
        terminate(running, timeout_seconds=0)


def test_spawn_starts_the_process_in_its_own_session(sleeper: psutil.Process) -> None:
    assert os.getsid(sleeper.pid) == sleeper.pid != os.getsid(0)


def test_spawn_appends_both_streams_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    running = spawn(["/bin/sh", "-c", "echo out; echo err >&2; cat"], log=log)
    assert wait_for_end(running, 60)
    assert log.read_text() == "before\nout\nerr\n"


def test_spawn_names_the_program_when_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="could not run /nowhere/java"):
        spawn(["/nowhere/java"], log=tmp_path / "log")


def test_find_returns_the_process_when_id_and_file_agree(
    sleeper: psutil.Process, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (file, tmp_path / "link" / "file"):
        found = find_process(sleeper.pid, path)
        assert found is not None
        assert found.pid == sleeper.pid


def test_find_returns_none_when_the_id_belongs_to_another(
    sleeper: psutil.Process, tmp_path: Path
) -> None:
    assert find_process(sleeper.pid, tmp_path / "another") is None


def test_find_returns_none_when_the_id_belongs_to_a_thread(file: Path) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert find_process(thread.native_id, file) is None
    finally:
        ended.set()
        thread.join()


def test_find_returns_none_when_nothing_was_recorded(file: Path) -> None:
    assert find_process(None, file) is None


def test_find_returns_none_when_the_process_ended(sleeper: psutil.Process, file: Path) -> None:
    assert terminate(sleeper, timeout_seconds=60)
    assert find_process(sleeper.pid, file) is None


def test_wait_for_end_is_true_when_the_process_is_a_zombie_of_another_parent(
    tmp_path: Path,
) -> None:
    parent_code = (
        "import os; pid = os.posix_spawn('/bin/true', ['true'], os.environ); print(pid, "
        "flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent_code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        zombie = psutil.Process(int(parent.stdout.readline()))
        assert wait_for_end(zombie, 60)
        assert zombie.status() == psutil.STATUS_ZOMBIE
        parent.communicate("\n", timeout=60)


def test_wait_for_end_is_false_when_the_process_keeps_running(sleeper: psutil.Process) -> None:
    assert not wait_for_end(sleeper, 0.01)


def test_wait_for_end_falls_back_to_polling_when_the_system_has_no_pidfd(
    sleeper: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not wait_for_end(sleeper, 0.01)
    sleeper.kill()
    assert wait_for_end(sleeper, 60)


def test_terminate_kills_a_process_that_ignores_sigterm(tmp_path: Path) -> None:
    log = tmp_path / "log"
    running = spawn(
        ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"], log=log
    )
    while not log.exists() or "ready" not in log.read_text():
        assert not wait_for_end(running, 0.01)
    assert not terminate(running, timeout_seconds=0.1)
    assert wait_for_end(running, 0)


def test_terminate_returns_at_once_when_the_process_has_ended(sleeper: psutil.Process) -> None:
    os.kill(sleeper.pid, signal.SIGKILL)
    assert wait_for_end(sleeper, 60)
    assert not terminate(sleeper, timeout_seconds=5)
