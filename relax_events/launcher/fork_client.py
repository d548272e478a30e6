"""The supervisor's side of the fork server: spawns worker processes and reports their exits."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import structlog

from relax_events.config import RunConfig
from relax_events.errors import RunFailed
from relax_events.launcher.fork_protocol import SpawnRequest, receive, send, shared_environment
from relax_events.launcher.own_process import start_module

log = structlog.get_logger()
START_SECONDS = 600.0
"""Time limit of the imports: on a busy machine, or from a slow disk, they take minutes."""
EXIT_REPORT_SECONDS = 5.0
"""Time limit of the report of an exit."""


class StartInterrupted(Exception):
    """A worker was not started, since the run is to end."""


class ForkServer:
    """Spawns worker processes by forking a process that has imported their modules. Used by one
    thread at a time, but for `interrupt`.
    """

    def __init__(
        self, environment: Mapping[str, str], log_path: Path, *, held: Sequence[int] = ()
    ) -> None:
        """Start nothing yet; the first request starts the process.

        Args:
            environment: The environment of all workers, without secrets.
            log_path: Log of the fork server itself.
            held: Open files that it and all workers hold: their locks end with the last of them.
        """
        self._environment, self._log_path = dict(environment), log_path
        self._held = tuple(held)
        self._process: ForkServerProcess | None = None
        self._is_interrupted = False

    @classmethod
    def from_config(cls, config: RunConfig, *, held: Sequence[int] = ()) -> ForkServer:
        """Return a run's fork server; see `__init__`."""
        return cls(shared_environment(), config.run_directory / "logs" / "starter.log", held=held)

    @property
    def pid(self) -> int | None:
        """Process id of the fork server, if it runs."""
        return self._process.pid if self._process is not None else None

    def prepare(self, imports: Sequence[str]) -> None:
        """Import modules that workers will need, without waiting for it."""
        self._running_process().prepare(imports)

    def spawn(
        self, request: SpawnRequest, *, log_path: Path, listener: socket.socket | None = None
    ) -> ForkedWorker:
        """Start a worker in a session of its own.

        Args:
            request: The worker to start.
            log_path: The file that its output is appended to.
            listener: A socket that the worker inherits, named by `request.socket_variable`; it
                stays open here.
        Raises:
            RunFailed: The fork server can't be started.
            StartInterrupted: By `interrupt`.
        """
        log_path.parent.mkdir(
            parents=True, exist_ok=True
        )  # the run's folder may have been deleted; the worker reports that in its log
        with log_path.open("ab") as log_file:
            descriptors = [
                log_file.fileno(),
                *([listener.fileno()] if listener is not None else []),
            ]
            for _ in range(2):
                process = self._running_process()
                if self._is_interrupted:
                    raise StartInterrupted
                if (worker := process.fork(request, descriptors)) is not None:
                    return worker
                self.close()
        raise RunFailed(
            f"no worker can be started: the fork server {process.loss} twice; see {self._log_path}"
        )

    def interrupt(self) -> None:
        """Let the `spawn` that waits, and later ones, raise StartInterrupted. A signal handler may
        call it.
        """
        self._is_interrupted = True
        if self._process is not None:
            self._process.interrupt()

    def close(self) -> None:
        """End the fork server. The workers that it has spawned keep running."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _running_process(self) -> ForkServerProcess:
        if self._process is None:
            self._process = ForkServerProcess(self._environment, self._log_path, self._held)
        return self._process


class ForkServerProcess:
    """One process of the fork server."""

    def __init__(self, environment: Mapping[str, str], log_path: Path, held: Sequence[int]) -> None:
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(START_SECONDS)
        self._interrupts, self._interrupter = socket.socketpair()
        self._codes: dict[int, int] = {}
        self._is_lost = False
        self.loss = "ended"
        """What happened to it, once it is lost."""
        with other:
            self._process = start_module(
                "relax_events.launcher.fork_server",
                [str(other.fileno())],
                output=log_path,
                environment=environment,
                descriptors=[other.fileno(), *held],
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def prepare(self, imports: Sequence[str]) -> None:
        """Import modules in the process."""
        with contextlib.suppress(
            OSError
        ):  # the process has exited; the first spawn request restarts it
            send(self._channel, {"imports": list(imports)})

    def fork(self, request: SpawnRequest, descriptors: Sequence[int]) -> ForkedWorker | None:
        """Fork a worker that writes its output to the first descriptor and inherits the rest;
        return None if the process has exited, or does not answer in time.

        Raises:
            StartInterrupted: By `interrupt`, before an answer.
        """
        with contextlib.suppress(OSError):
            send(self._channel, asdict(request), *descriptors)
        worker = None
        while worker is None and not self._is_lost:
            ready = select.select([self._channel, self._interrupts], [], [], START_SECONDS)[0]
            if ready == [self._interrupts]:
                raise StartInterrupted
            if ready:
                worker = self._receive()
            else:
                self.loss = f"needed more than {START_SECONDS:g} s to import the workers' modules"
                self._is_lost = True
                log.warning("fork_server.lost", pid=self.pid, error=self.loss)
        return worker

    def wait_for_exit_code(self, pid: int, *, seconds: float) -> int | None:
        """Return the exit code of a worker that has exited, as soon as it is reported; None if it
        is not reported in time.
        """
        deadline = time.monotonic() + seconds
        while (
            pid not in self._codes
            and not self._is_lost
            and select.select([self._channel], [], [], max(0.0, deadline - time.monotonic()))[0]
        ):
            self._receive()
        if pid not in self._codes and self._is_lost:
            return -signal.SIGKILL  # no exit code was reported
        return self._codes.pop(pid, None)

    def interrupt(self) -> None:
        """End the wait of `fork`."""
        with contextlib.suppress(OSError):  # it is closed
            self._interrupter.send(b"\0")

    def close(self) -> None:
        """Kill the process. Exits that it has not reported by now are lost."""
        self._is_lost = True
        for one in (self._channel, self._interrupts, self._interrupter):
            one.close()
        self._process.kill()
        self._process.wait(10)

    def _receive(self) -> ForkedWorker | None:
        """Receive a message, and return the worker if one was started."""
        try:
            message_read = receive(self._channel)
        except OSError as error:
            log.warning("fork_server.lost", pid=self.pid, error=str(error))
            message_read = None
        if message_read is None:
            self._is_lost = True
            return None
        message, descriptors = message_read
        if "started" in message:
            self._codes.pop(message["started"], None)  # of an earlier process with the same id
            return ForkedWorker(self, message["started"], descriptors[0])
        self._codes[message["ended"]] = message["code"]
        return None


class ForkedWorker:
    """A forked worker, with the interface of `subprocess.Popen`.

    Attributes:
        pid: Of its process and of its process group.
    """

    def __init__(self, parent: ForkServerProcess, pid: int, handle: int) -> None:
        self.pid = pid
        self._parent, self._handle = parent, handle
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code once it has exited, -N if signal N ended it."""
        return self._exit_code(0, report_seconds=0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        code = self._exit_code(timeout, report_seconds=EXIT_REPORT_SECONDS)
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or EXIT_REPORT_SECONDS)
        return code

    def terminate(self) -> None:
        """Signal it to drain."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill it and all its children."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _exit_code(self, seconds: float | None, *, report_seconds: float) -> int | None:
        if self._code is None and select.select([self._handle], [], [], seconds)[0]:
            self._code = self._parent.wait_for_exit_code(self.pid, seconds=report_seconds)
            if self._code is not None:
                os.close(self._handle)
        return self._code
