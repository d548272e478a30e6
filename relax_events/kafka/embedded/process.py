"""Starts, finds and ends the broker's process, which outlives its parent, and waits until the
broker is ready.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from relax_events.errors import BrokerError, EnvironmentProblem
from relax_events.kafka.embedded.ports import HOST

_KILL_SECONDS = 10.0


def spawn(
    command: list[str], *, log: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> psutil.Process:
    """Run a command in its own session, append its output to `log`, and return without waiting.

    In its own session, Ctrl-C in the starting terminal does not end it.

    Args:
        command: The program with its arguments.
        log: The file to which its output is appended.
        environment: Variables that override our environment.
    Raises:
        EnvironmentProblem: The program can't be run.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    try:
        return psutil.Process(
            os.posix_spawn(
                command[0],
                command,
                {**os.environ, **environment},
                file_actions=actions,
                setsid=True,
            )
        )
    except OSError as error:
        raise EnvironmentProblem(f"could not run {command[0]}: {error}") from error


def find_process(pid: int | None, file: Path) -> psutil.Process | None:
    """Return the live process with this id whose last argument is this file; None when it ended,
    even if its id was reused.

    Start times don't identify a process: they are computed from the boot time, which moves when the
    clock is set.
    """
    if pid is None or not psutil.pid_exists(pid):  # it may be the id of a thread now
        return None
    try:
        process = psutil.Process(pid)
        if wait_for_end(process, 0):
            return None
        last_argument = (process.cmdline() or [""])[-1]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return process if os.path.realpath(last_argument) == os.path.realpath(file) else None


def wait_for_end(process: psutil.Process, timeout_seconds: float) -> bool:
    """Wait for a process's end and return whether it ended; a child process is reaped.

    A zombie counts as ended, also one of another parent, which psutil's own wait takes for alive.
    """
    if sys.platform != "linux":
        return _is_gone(process, timeout_seconds)
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        ended = bool(poller.poll(timeout_seconds * 1000))
    finally:
        os.close(descriptor)
    if ended:
        _is_gone(process, 0)
    return ended


def get_exit_code(process: psutil.Process) -> int | None:
    """Return the exit code of a child process, -N if signal N ended it; None while it runs, and
    where it was reaped through another object.
    """
    return process.wait(0) if wait_for_end(process, 0) else None


def _is_gone(process: psutil.Process, timeout_seconds: float) -> bool:
    try:
        process.wait(timeout_seconds)
    except psutil.TimeoutExpired:
        return False
    return True


def terminate(process: psutil.Process, *, timeout_seconds: float) -> bool:
    """Send SIGTERM, then SIGKILL after a timeout; return whether SIGTERM was enough.

    Args:
        process: The process.
        timeout_seconds: How long it may take after SIGTERM; 0 sends SIGKILL at once.
    Raises:
        BrokerError: The process still exists 10 s after SIGKILL, which suggests a hung disk.
    """
    try:
        if timeout_seconds > 0:
            process.send_signal(signal.SIGTERM)
            if wait_for_end(process, timeout_seconds):
                return True
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    if not wait_for_end(process, _KILL_SECONDS):
        raise BrokerError(
            f"process {process.pid} did not end within {_KILL_SECONDS:.0f} s of SIGKILL; "
            "check the disk it writes to"
        )
    return False


_PAUSE_SECONDS = 0.02
_CONNECT_SECONDS = 0.5
_METADATA_SECONDS = 2.0


def wait_until_ready(
    process: psutil.Process, port: int, *, deadline_seconds: float, client: Mapping[str, str]
) -> bool:
    """Wait until a broker accepts connections and lists itself in a metadata response; False when
    its process ended or the deadline passed.

    Args:
        process: The broker's process.
        port: The broker's port on the loopback interface.
        deadline_seconds: The deadline on the monotonic clock.
        client: The client's security settings.
    """
    while not _accepts(port):
        if time.monotonic() > deadline_seconds or wait_for_end(process, _PAUSE_SECONDS):
            return False
    quick: dict[str, str | int] = {
        "bootstrap.servers": f"{HOST}:{port}",
        "reconnect.backoff.ms": 20,
        "reconnect.backoff.max.ms": 50,
        "log_level": 0,
    }
    asking = AdminClient({**quick, **client})
    while not _lists_a_broker(asking):
        if time.monotonic() > deadline_seconds or wait_for_end(process, _PAUSE_SECONDS):
            return False
    return True


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(_CONNECT_SECONDS)
        return probe.connect_ex((HOST, port)) == 0


def _lists_a_broker(client: AdminClient) -> bool:
    try:
        return bool(client.list_topics(timeout=_METADATA_SECONDS).brokers)
    except KafkaException:
        return False
