"""Start a process that outlives its parent, find it again without mistaking another for it, and end
it.

Wait until a starting broker serves: its port accepts, then a metadata answer lists a broker.
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

# The start time is reckoned from the boot time, which moves by up to a second when the clock is
# set.
_SAME_START_SECONDS = 2.0
_KILL_SECONDS = 10.0


def spawn(
    command: list[str], *, log: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> psutil.Process:
    """Run a command in a session of its own, its output appended to `log`, and return without
    waiting.

    A session of its own keeps the interrupt key of the terminal that started it from ending it.

    Args:
        command: The program with its arguments.
        log: Where its output is added.
        environment: Laid over our own.
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


def find(pid: int | None, started_at_seconds: float | None) -> psutil.Process | None:
    """Return the live process of that id and start time; None when it ended, even if another has
    its id by now.
    """
    if pid is None or started_at_seconds is None:
        return None
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - started_at_seconds) > _SAME_START_SECONDS:
            return None
        return None if ended_within(process, 0) else process
    except psutil.NoSuchProcess:
        return None


def ended_within(process: psutil.Process, timeout_seconds: float) -> bool:
    """Wait until a process ends, for so long at most, and tell whether it did; a child of ours is
    reaped.

    Ended means that it runs no more, whether or not its parent took note: psutil's own wait takes
    another parent's zombie for alive.
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


def _is_gone(process: psutil.Process, timeout_seconds: float) -> bool:
    try:
        process.wait(timeout_seconds)
    except psutil.TimeoutExpired:
        return False
    return True


def end(process: psutil.Process, *, timeout_seconds: float) -> bool:
    """Ask a process to end, then make it, and tell whether asking was enough.

    Args:
        process: Whom.
        timeout_seconds: How long it may take to end by itself; 0 does not ask.
    Raises:
        BrokerError: It is still there 10 s after SIGKILL, which only a hung disk explains.
    """
    try:
        if timeout_seconds > 0:
            process.send_signal(signal.SIGTERM)
            if ended_within(process, timeout_seconds):
                return True
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    if not ended_within(process, _KILL_SECONDS):
        raise BrokerError(
            f"process {process.pid} did not end within {_KILL_SECONDS:.0f} s of SIGKILL; "
            "look at the disk it writes to"
        )
    return False


_PAUSE_SECONDS = 0.02
_CONNECT_SECONDS = 0.5
_METADATA_SECONDS = 2.0


def becomes_ready(
    process: psutil.Process, port: int, *, deadline_seconds: float, client: Mapping[str, str]
) -> bool:
    """Wait for a broker and tell whether it got ready; False when its process ended or the deadline
    passed.

    A listening socket that isn't there yet tells nobody when it comes, so this asks again after
    each short wait for the end of the process.

    Args:
        process: The broker's.
        port: Where it will listen, on the loopback interface.
        deadline_seconds: On the monotonic clock.
        client: Settings that the broker asks of its clients, for security.
    """
    while not _accepts(port):
        if time.monotonic() > deadline_seconds or ended_within(process, _PAUSE_SECONDS):
            return False
    quick: dict[str, str | int] = {
        "bootstrap.servers": f"{HOST}:{port}",
        "reconnect.backoff.ms": 20,
        "reconnect.backoff.max.ms": 50,
        "log_level": 0,
    }
    asking = AdminClient({**quick, **client})
    while not _lists_a_broker(asking):
        if time.monotonic() > deadline_seconds or ended_within(process, _PAUSE_SECONDS):
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
