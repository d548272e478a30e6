"""Fails a test session that leaves something behind: a process, a listening port, a file in the
temporary folder or in shared memory.

The session gets its own temporary folder, and a mark in the environment that the processes of its
tests inherit. So neither earlier files nor other users' processes count. Under pytest-xdist each
worker reports the ports that it still listens on, and the controller checks the rest once its
workers have ended. With `--leftovers report` ports and files are only reported, and processes alone
fail the session: for a machine on which others use shared memory at the same time.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.folders import delete_kept_folders

MARK = "LEFTOVERS_OF"
"""Not of the `RELAX_` variables, which tests clear for what they start."""
TEMPORARY_ROOT = "PYTEST_DEBUG_TEMPROOT"
"""Where pytest makes `tmp_path`: outside of the folder that must be empty in the end."""
SHARED_MEMORY = Path("/dev/shm")
TRACKED = ("sem.mp-", "psm_")
"""What multiprocessing names so, its tracker deletes once the processes that share it have ended,
whether they have it open or not."""
GRACE_SECONDS = 30.0
"""In which processes may end that are ending on command: the embedded broker ends by itself once no
one uses it any more."""
SHARED_MEMORY_SECONDS = 5.0
LOOK_SECONDS = 0.2


class Leftovers:
    """A plugin of pytest; see the module's docstring."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._found: list[str] = []
        self._running: list[str] = []
        self._is_worker = hasattr(config, "workerinput")
        if not self._is_worker:
            usual = tempfile.gettempdir()
            os.environ.setdefault(TEMPORARY_ROOT, usual)
            os.environ.setdefault(
                "TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{getpass.getuser()}"
            )  # kept from session to session
            os.environ[MARK] = uuid.uuid4().hex
            self._folder = Path(tempfile.mkdtemp(prefix="relax-tests-"))
            self._folder.chmod(
                0o755
            )  # programs that are run as someone else have folders of their own in it
            os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)
            self._shared_before = _names(SHARED_MEMORY)

    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of pytest-xdist has found."""
        self._found += getattr(node, "workeroutput", {}).get("leftovers", [])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        """Check after all fixtures are torn down and the workers have exited."""
        if self._is_worker:  # whose report is sent by the hooks inside of this one
            session._setupstate.teardown_exact(None)
            self._config.workeroutput["leftovers"] = _still_listening()  # type: ignore[attr-defined]
            return (yield)
        result = yield
        delete_kept_folders()
        self._found += _still_listening()
        self._look_around()
        if self._running or (self._found and self._config.getoption("leftovers", "fail") == "fail"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._running or self._found:
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            if reporter is not None:
                reporter.write_sep("=", "left behind by tests", red=True)
                for line in (*self._running, *self._found):
                    reporter.write_line(line)
        return result

    def _look_around(self) -> None:
        left = _left_running(os.environ[MARK])
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._running.append(
                    f"process {process.pid} still runs (killed now): "
                    f"{_shorten(' '.join(process.cmdline()))}"
                )
                process.kill()
        psutil.wait_procs(left, timeout=GRACE_SECONDS)
        self._found += [f"file {path}" for path in sorted(self._folder.iterdir())]
        shutil.rmtree(self._folder, ignore_errors=True)
        self._found += [f"file {path}" for path in _left_in_shared_memory(self._shared_before)]


def _shorten(command: str) -> str:
    """Return a command line without its middle: a Java program's folder is its last argument, after
    a long class path."""
    return command if len(command) <= 400 else f"{command[:200]} ... {command[-200:]}"


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _left_in_shared_memory(before: set[str]) -> list[Path]:
    """Return the new files that nothing uses and that stay: those of another session may be on
    their way out, as after a process that it killed."""
    deadline = time.monotonic() + SHARED_MEMORY_SECONDS
    while True:
        new = (SHARED_MEMORY / name for name in sorted(_names(SHARED_MEMORY) - before))
        left = [path for path in new if not _is_open(path)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(LOOK_SECONDS)


def _still_listening() -> list[str]:
    ports = {
        connection.laddr.port
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    return [
        f"port {port} is still listened at by the test process {os.getpid()}"
        for port in sorted(ports)
    ]


def _left_running(mark: str) -> list[psutil.Process]:
    """Return the session's processes that don't end within the grace, the session itself apart."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := list(_marked(mark))) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=LOOK_SECONDS)
    return left


def _marked(mark: str) -> Iterator[psutil.Process]:
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid in own or process.status() == psutil.STATUS_ZOMBIE:
                continue
            variables = _variables_of(process)
            if variables.get(MARK) == mark or (
                "PATH" not in variables and _is_orphan_of_ours(process)
            ):
                yield process


def _variables_of(process: psutil.Process) -> dict[str, str]:
    """Return the variables that a process was started with; none of one that hides them."""
    try:
        return process.environ()
    except psutil.AccessDenied:
        return {}


def _is_orphan_of_ours(process: psutil.Process) -> bool:
    """Return whether a process without a parent was started in our folder during the session. The
    environment can't be read for a worker, or a command of ours, which deletes it; a process with an
    environment and no mark in it was started by another session.
    """
    return (
        process.ppid() == 1
        and process.create_time() > psutil.Process().create_time()
        and Path(process.cwd()) == Path.cwd()
    )


def _is_open(path: Path) -> bool:
    """Return whether some process still uses a file of shared memory, or will delete it: then it is
    someone else's, since ours have ended."""
    is_tracked = path.name.startswith(TRACKED)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            command = " ".join(process.cmdline())
            if str(path) in command or (
                is_tracked and "multiprocessing.resource_tracker" in command
            ):
                return True
            if str(path) in Path(f"/proc/{process.pid}/maps").read_text():
                return True
            if any(file.path.startswith(str(path)) for file in process.open_files()):
                return True
    return False
