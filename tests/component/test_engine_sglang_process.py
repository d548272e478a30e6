"""A killed SGLang server leaves no process, no shared memory and no temporary file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_events.deadline import Deadline
from relax_events.engines.sglang import launch

SECONDS = 60.0
# As a server: it shares a semaphore and memory by way of multiprocessing, and by way of a file that
# it has mapped, as a process of its own does.
SERVER = """
import mmap, multiprocessing, os, subprocess, sys, threading, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from relax_events.engines.sglang import launch

folder, temporary, loads = sys.argv[1:]
threading.Thread(target=launch._end_with_parent, args=(folder, temporary), daemon=True).start()
lock, shared = multiprocessing.get_context("spawn").Lock(), SharedMemory(create=True, size=100)
with open(loads, "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(f"/dev/shm/sem.{lock._semlock.name[1:]}", f"/dev/shm/{shared.name}", flush=True)
time.sleep(1000)
"""
pytestmark = pytest.mark.skipif(
    not launch.SHARED_MEMORY.is_dir(), reason="shared memory has no folder here"
)


class Server:
    """Such a process, and what it has made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder / "weights", folder / "temporary"
        for made in (self.folder, self.temporary):
            made.mkdir()
        self.loads = (
            launch.SHARED_MEMORY / f"{launch.SHARED_PREFIX}loads_{os.getpid()}_{folder.name}.shm"
        )
        words = [
            sys.executable,
            "-c",
            SERVER,
            str(self.folder),
            str(self.temporary),
            str(self.loads),
        ]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.shared = [Path(name) for name in self.process.stdout.readline().split()]
        self.members = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]

    def until_gone(self, *files: Path) -> None:
        """Wait until the processes have ended and these files are gone."""
        _, alive = psutil.wait_procs(self.members, timeout=SECONDS)
        assert alive == []
        deadline, pause = Deadline(SECONDS), threading.Event()
        while left := [file for file in files if file.exists()]:
            assert not deadline.passed, left
            pause.wait(0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    yield started
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.process.pid, signal.SIGKILL)
    started.process.communicate()
    started.loads.unlink(missing_ok=True)


def test_killed_server_leaves_no_process_and_no_shared_memory(server: Server) -> None:
    assert len(server.members) == 3, (
        "it, the process that it started, and multiprocessing's tracker"
    )
    assert [file.exists() for file in server.shared] == [True, True]
    assert launch.find_shared_memory(server.process.pid) == {server.loads}
    launch.kill_processes(server.process.pid)
    server.until_gone(*server.shared)


def test_server_suspended_by_sigstop_is_killed_as_well(server: Server) -> None:
    os.killpg(server.process.pid, signal.SIGSTOP)
    launch.kill_processes(server.process.pid)
    server.until_gone(*server.shared)


def test_server_whose_parent_has_died_leaves_nothing(server: Server) -> None:
    assert server.process.stdin is not None
    server.process.stdin.close()
    server.until_gone(*server.shared, server.loads, server.folder, server.temporary)
    server.process.stdin = None
