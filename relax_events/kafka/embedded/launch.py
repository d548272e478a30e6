"""Put together all that a broker needs on this machine, and start its process."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from relax_events.kafka.embedded import process as processes
from relax_events.kafka.embedded.directory import (
    BROKER_START,
    OPEN,
    PASSWORD,
    BrokerState,
    file_problems,
    write_state,
)
from relax_events.kafka.embedded.jars import cache_directory, ensure_jars, read_lock
from relax_events.kafka.embedded.java import (
    Java,
    broker_command,
    class_archive_path,
    find_java,
    usual_heap_mib,
)
from relax_events.kafka.embedded.ports import choose_port, is_free, require_free
from relax_events.kafka.embedded.security import (
    NodeLogin,
    NodeSecurity,
    first_users,
    kept_credentials,
)
from relax_events.kafka.embedded.settings import server_properties
from relax_events.kafka.embedded.storage import ensure_formatted, is_formatted, require_free_space
from relax_events.kafka.security.folder import write_private

STATE_NAME = "broker.json"
LOG_NAME = "broker.log"
LOCALE = {"LC_ALL": "C.UTF-8"}
"""Java names files in the locale's encoding, and in that of LC_ALL=C none whose name is not
ASCII."""


class Launched(NamedTuple):
    """A broker that was started; it is not ready yet. `newcomer` is the login whose user it does
    not know yet.
    """

    process: psutil.Process
    state: BrokerState
    newcomer: NodeLogin | None = None


def launch(
    directory: Path,
    *,
    last: BrokerState | None,
    wanted_port: int,
    node_properties: Mapping[str, str],
    credentials: Path | None = None,
    has_password: bool | None = None,
    heap_mib: int = 0,
    started_by: str = BROKER_START,
) -> Launched:
    """Start a broker in a directory and record it there; it is not ready yet.

    Args:
        directory: The broker's, which exists.
        last: What the directory remembers of an earlier broker, whose ports are used again.
        wanted_port: Where clients connect; 0 takes the last one, or another where a program has
            taken that meanwhile.
        node_properties: Broker settings laid over ours.
        credentials: The security folder of a secured broker; None takes that of the last start.
        has_password: Whether clients of a broker without credentials log in; None does as the last
            start did, and at the first they do.
        heap_mib: The most that its heap may grow to; 0 for what this machine's memory allows.
        started_by: The command that wants it, for the record.
    Raises:
        ConfigError: The security folder lacks a file.
        EnvironmentProblem: No Java, no network on first use, no disk space, a folder that can't be
            written, or the port is taken.
    """
    java = find_java()
    require_free_space(directory)
    cache = cache_directory(read_lock())
    with file_problems(cache):
        jars = ensure_jars(read_lock(), cache)
    with file_problems(directory):
        if last and last.archive_at_exit:
            Path(last.archive_at_exit).unlink(
                missing_ok=True
            )  # of a broker that nobody stopped, so nobody knows whether it is whole
        port, controller_port = _choose_ports(last, wanted_port)
        state = BrokerState(port, controller_port, read_lock().kafka_version, started_by=started_by)
        security: NodeSecurity | NodeLogin | None = None
        newcomer = None
        if kept := kept_credentials(
            credentials, last.credentials if last else None, data=directory / "data"
        ):
            security = NodeSecurity.of(
                kept, internal_port=choose_port(taken=frozenset({port, controller_port}))
            )
            state = replace(
                state, internal_port=security.internal_port, credentials=str(security.folder.path)
            )
        elif not has_password and (
            has_password is False or (last is not None and last.login == OPEN)
        ):
            state = replace(state, login=OPEN)
        else:
            directory.chmod(0o700)
            security = NodeLogin.of(directory)
            is_known = not is_formatted(directory / "data") or (
                last is not None and last.login == PASSWORD and not security.is_new
            )
            newcomer = None if is_known else security
            state = replace(state, login=PASSWORD if is_known else "")
        heap_mib = heap_mib or usual_heap_mib()
        properties = _write_files(directory, state, node_properties, security, heap_mib)
        return Launched(*_run(directory, java, jars, properties, state, heap_mib), newcomer)


def _choose_ports(last: BrokerState | None, wanted_port: int) -> tuple[int, int]:
    """Keep the ports of the last start where they are still free: nobody listens there for clients
    of the broker that was.
    """
    if wanted_port:
        require_free(wanted_port)
    port = wanted_port or (
        last.port if last and last.port and is_free(last.port) else choose_port()
    )
    if last and last.controller_port != port and is_free(last.controller_port):
        return port, last.controller_port
    return port, choose_port(taken=frozenset({port}))


def _write_files(
    directory: Path,
    state: BrokerState,
    node_properties: Mapping[str, str],
    security: NodeSecurity | NodeLogin | None,
    heap_mib: int,
) -> Path:
    data = directory / "data"
    text = server_properties(
        data,
        port=state.port,
        controller_port=state.controller_port,
        overrides=node_properties,
        heap_mib=heap_mib,
        security=security,
    )
    users = (
        [security.credential()]
        if isinstance(security, NodeLogin)
        else first_users(security.folder)
        if security
        else []
    )
    ensure_formatted(data, users=users)
    (directory / "tmp").mkdir(exist_ok=True)
    path = directory / "server.properties"
    write_private(path, text.encode("ascii"))
    return path


def _run(
    directory: Path,
    java: Java,
    jars: list[Path],
    properties: Path,
    state: BrokerState,
    heap_mib: int,
) -> tuple[psutil.Process, BrokerState]:
    log = directory / LOG_NAME
    archive = class_archive_path(java, jars, jars[0].parent)
    archive_at_exit = (
        None if archive.exists() else str(archive.with_suffix(f".{os.getpid()}-{state.port}.tmp"))
    )
    log_start_byte = log.stat().st_size if log.exists() else 0
    command = broker_command(
        java, jars, properties, archive=archive, archive_at_exit=archive_at_exit, heap_mib=heap_mib
    )
    running = processes.spawn(command, log=log, environment=LOCALE)
    recorded = replace(
        state,
        pid=running.pid,
        started_at_seconds=running.create_time(),
        archive_at_exit=archive_at_exit,
        log_start_byte=log_start_byte,
    )
    try:
        write_state(directory / STATE_NAME, recorded)
    except OSError:
        processes.end(
            running, timeout_seconds=0
        )  # a process that nothing remembers could never be stopped
        raise
    return running, recorded
