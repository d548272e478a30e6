"""The supervisor's side of the starter."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import structlog

from relax_events.config import RunConfig
from relax_events.errors import RunFailed
from relax_events.launcher.fork_protocol import SpawnRequest, receive, send, shared_environment

log = structlog.get_logger()
START_SECONDS = 60.0
"""How long imports may take on a busy machine."""
EXIT_REPORT_SECONDS = 5.0
"""Within which the starter tells of an end."""


class ForkServer:
    """Starts worker processes: has them forked from one that has imported what they need. Used by
    one thread at a time.
    """

    def __init__(self, environment: Mapping[str, str], log_path: Path) -> None:
        """Nothing is started before something is asked for.

        Args:
            environment: What all workers have, and no secrets.
            log_path: For what goes wrong in the starter itself.
        """
        self._environment, self._log_path = dict(environment), log_path
        self._process: ForkServerProcess | None = None

    @classmethod
    def from_config(cls, config: RunConfig) -> ForkServer:
        """Return a run's starter."""
        return cls(shared_environment(), config.run_directory / "logs" / "starter.log")

    @property
    def pid(self) -> int | None:
        """Of the process that forks, if it is there."""
        return self._process.pid if self._process is not None else None

    def prepare(self, imports: Sequence[str]) -> None:
        """Have modules imported that workers will need, and don't wait for it."""
        self._running_process().prepare(imports)

    def spawn(
        self, order: SpawnRequest, *, log_path: Path, listener: socket.socket | None = None
    ) -> ForkedWorker:
        """Start a worker in a session of its own.

        Args:
            order: For it.
            log_path: Where its output is added.
            listener: A socket that it takes over, named by `order.socket_variable`; it stays open
                here.
        Raises:
            RunFailed: The starter can't be started.
        """
        log_path.parent.mkdir(
            parents=True, exist_ok=True
        )  # the run's folder may have been deleted: its worker says so, in a log
        with log_path.open("ab") as log_file:
            descriptors = [
                log_file.fileno(),
                *([listener.fileno()] if listener is not None else []),
            ]
            for _ in range(2):
                if (worker := self._running_process().fork(order, descriptors)) is not None:
                    return worker
                self.close()
        raise RunFailed(
            "no worker can be started: the process that forks them ended twice; see "
            f"{self._log_path}"
        )

    def close(self) -> None:
        """End the starter. What it has started goes on."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _running_process(self) -> ForkServerProcess:
        if self._process is None:
            self._process = ForkServerProcess(self._environment, self._log_path)
        return self._process


class ForkServerProcess:
    """One process that forks."""

    def __init__(self, environment: Mapping[str, str], log_path: Path) -> None:
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(START_SECONDS)
        self._codes: dict[int, int] = {}
        self._is_lost = False
        command = [sys.executable, "-m", "relax_events.launcher.fork_server", str(other.fileno())]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with other, log_path.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=environment,
                pass_fds=[other.fileno()],
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def prepare(self, imports: Sequence[str]) -> None:
        """Have modules imported."""
        with contextlib.suppress(OSError):  # it is gone, as the first order will find out
            send(self._channel, {"imports": list(imports)})

    def fork(self, order: SpawnRequest, descriptors: Sequence[int]) -> ForkedWorker | None:
        """Have a worker forked whose output goes to the first descriptor, and that owns a copy of
        the rest; None when the process is gone.
        """
        with contextlib.suppress(OSError):
            send(self._channel, asdict(order), *descriptors)
        worker = None
        while worker is None and not self._is_lost:
            worker = self._receive()
        return worker

    def wait_for_exit_code(self, pid: int, *, seconds: float) -> int | None:
        """Return the exit code of a worker that has ended, as soon as it is told; None if it is not
        in time.
        """
        deadline = time.monotonic() + seconds
        while (
            pid not in self._codes
            and not self._is_lost
            and select.select([self._channel], [], [], max(0.0, deadline - time.monotonic()))[0]
        ):
            self._receive()
        if pid not in self._codes and self._is_lost:
            return -signal.SIGKILL  # nobody has seen how it ended
        return self._codes.pop(pid, None)

    def close(self) -> None:
        """End the process. Of workers whose end it has not told by now nobody learns more."""
        self._is_lost = True
        self._channel.close()
        self._process.kill()
        self._process.wait(10)

    def _receive(self) -> ForkedWorker | None:
        """Take a message, and return the worker if one was started."""
        try:
            heard = receive(self._channel)
        except OSError as error:
            log.warning("starter.lost", pid=self.pid, error=str(error))
            heard = None
        if heard is None:
            self._is_lost = True
            return None
        message, descriptors = heard
        if "started" in message:
            self._codes.pop(message["started"], None)  # of a process that had the same id
            return ForkedWorker(self, message["started"], descriptors[0])
        self._codes[message["ended"]] = message["code"]
        return None


class ForkedWorker:
    """A worker that was forked, with what a `subprocess.Popen` would be asked for.

    Attributes:
        pid: Of its process, and of its process group.
    """

    def __init__(self, parent: ForkServerProcess, pid: int, handle: int) -> None:
        self.pid = pid
        self._parent, self._handle = parent, handle
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code once it has ended, -N if signal N ended it."""
        return self._exit_code(0, told_seconds=0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: It lives on.
        """
        code = self._exit_code(timeout, told_seconds=EXIT_REPORT_SECONDS)
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or EXIT_REPORT_SECONDS)
        return code

    def terminate(self) -> None:
        """Ask it to drain."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill it and all its children."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _exit_code(self, seconds: float | None, *, told_seconds: float) -> int | None:
        if self._code is None and select.select([self._handle], [], [], seconds)[0]:
            self._code = self._parent.wait_for_exit_code(self.pid, seconds=told_seconds)
            if self._code is not None:
                os.close(self._handle)
        return self._code
