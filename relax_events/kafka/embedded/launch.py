"""Prepares jars, settings and data folder of a broker, and starts its process."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from relax_events.kafka.embedded.directory import (
    BROKER_START,
    NO_LOGIN,
    PASSWORD,
    BrokerState,
    translate_file_errors,
    write_state,
)
from relax_events.kafka.embedded.jars import ensure_jars, locate_cache, read_jar_lock
from relax_events.kafka.embedded.java import (
    Java,
    build_broker_command,
    choose_heap_mib,
    find_java,
    locate_class_archive,
)
from relax_events.kafka.embedded.ports import choose_port, is_free, require_free
from relax_events.kafka.embedded.process import spawn, terminate
from relax_events.kafka.embedded.security import (
    NodeLogin,
    NodeSecurity,
    choose_credentials,
    read_bootstrap_users,
)
from relax_events.kafka.embedded.settings import build_server_properties
from relax_events.kafka.embedded.storage import ensure_formatted, is_formatted, require_free_space
from relax_events.secret_handling import write_private

STATE_NAME = "broker.json"
LOG_NAME = "broker.log"
PROPERTIES_NAME = "server.properties"
"""The last argument of the broker's command: its process is found by it."""
LOCALE = {"LC_ALL": "C.UTF-8"}
"""Java encodes file names by the locale, and with LC_ALL=C it supports only ASCII names."""


class LaunchedBroker(NamedTuple):
    """A started broker that is not ready yet. `unregistered_login` is a login whose user the node
    does not know yet.
    """

    process: psutil.Process
    state: BrokerState
    unregistered_login: NodeLogin | None = None


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
) -> LaunchedBroker:
    """Start a broker in a directory and record its state; it is not ready yet.

    Args:
        directory: The broker's existing directory.
        last: The recorded state of the last start, whose ports are reused.
        wanted_port: The clients' port; 0 uses the last one, or another if a program has taken that
            meanwhile.
        node_properties: Broker settings that override ours.
        credentials: The security folder of a secured broker; None uses that of the last start.
        has_password: Whether clients of a broker without `credentials` authenticate; None keeps the
            last start's choice, True at first.
        heap_mib: The maximal heap in MiB; 0 derives it from the machine's memory.
        started_by: The command that starts the broker; recorded.
    Raises:
        ConfigError: The security folder lacks a file.
        EnvironmentProblem: There is no Java, no network on first use, no disk space, no write
            access, or the port is taken.
    """
    java = find_java()
    require_free_space(directory)
    cache = locate_cache(read_jar_lock())
    with translate_file_errors(cache):
        jars = ensure_jars(read_jar_lock(), cache)
    with translate_file_errors(directory):
        if last and last.archive_at_exit:
            Path(last.archive_at_exit).unlink(
                missing_ok=True
            )  # of a broker that was not stopped cleanly: it may be incomplete
        port, controller_port = _choose_ports(last, wanted_port)
        state = BrokerState(
            port, controller_port, read_jar_lock().kafka_version, started_by=started_by
        )
        secured = _secure(
            directory, state, last, credentials=credentials, has_password=has_password
        )
        heap_mib = heap_mib or choose_heap_mib()
        properties = _write_files(directory, secured, node_properties, heap_mib)
        process, state = _start_process(directory, java, jars, properties, secured.state, heap_mib)
        return LaunchedBroker(process, state, secured.unregistered_login)


class _SecuredNode(NamedTuple):
    """How the clients of a node authenticate, and the node's state that records it."""

    state: BrokerState
    security: NodeSecurity | NodeLogin | None = None
    unregistered_login: NodeLogin | None = None


def _secure(
    directory: Path,
    state: BrokerState,
    last: BrokerState | None,
    *,
    credentials: Path | None,
    has_password: bool | None,
) -> _SecuredNode:
    """Choose how clients authenticate: by a security folder, by the node's password, or not at all.

    Raises:
        ConfigError: The security folder lacks a file.
        EnvironmentProblem: The node was created without the security folder that is given.
    """
    data = directory / "data"
    folder = choose_credentials(credentials, last.credentials if last else None, data=data)
    if folder is not None:
        ports = frozenset({state.port, state.controller_port})
        security = NodeSecurity.from_folder(folder, internal_port=choose_port(taken=ports))
        return _SecuredNode(
            replace(
                state, internal_port=security.internal_port, credentials=str(security.folder.path)
            ),
            security,
        )
    had_no_login = last is not None and last.login == NO_LOGIN
    if has_password is False or (has_password is None and had_no_login):
        return _SecuredNode(replace(state, login=NO_LOGIN))
    directory.chmod(0o700)
    login = NodeLogin.from_directory(directory)
    is_known = not is_formatted(data) or (
        last is not None and last.login == PASSWORD and not login.is_new
    )
    return _SecuredNode(
        replace(state, login=PASSWORD if is_known else ""), login, None if is_known else login
    )


def _choose_ports(last: BrokerState | None, wanted_port: int) -> tuple[int, int]:
    """Reuse the ports of the last start if they are still free."""
    if wanted_port:
        require_free(wanted_port)
    port = wanted_port or (
        last.port if last and last.port and is_free(last.port) else choose_port()
    )
    if last and last.controller_port != port and is_free(last.controller_port):
        return port, last.controller_port
    return port, choose_port(taken=frozenset({port}))


def _write_files(
    directory: Path, node: _SecuredNode, node_properties: Mapping[str, str], heap_mib: int
) -> Path:
    """Format the data folder if it is new, and write the broker's settings; return their file."""
    data, security = directory / "data", node.security
    text = build_server_properties(
        data,
        port=node.state.port,
        controller_port=node.state.controller_port,
        overrides=node_properties,
        heap_mib=heap_mib,
        security=security,
    )
    users = (
        [security.credential()]
        if isinstance(security, NodeLogin)
        else read_bootstrap_users(security.folder)
        if security
        else []
    )
    ensure_formatted(data, users=users)
    (directory / "tmp").mkdir(exist_ok=True)
    path = directory / PROPERTIES_NAME
    write_private(path, text.encode("ascii"))
    return path


def _start_process(
    directory: Path,
    java: Java,
    jars: list[Path],
    properties: Path,
    state: BrokerState,
    heap_mib: int,
) -> tuple[psutil.Process, BrokerState]:
    log = directory / LOG_NAME
    archive = locate_class_archive(java, jars, jars[0].parent)
    archive_at_exit = (
        str(archive.with_suffix(f".{os.getpid()}-{state.port}.tmp"))
        if java.writes_archive and not archive.exists()
        else None
    )
    log_start_byte = log.stat().st_size if log.exists() else 0
    command = build_broker_command(
        java, jars, properties, archive=archive, archive_at_exit=archive_at_exit, heap_mib=heap_mib
    )
    running = spawn(command, log=log, environment=LOCALE)
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
        terminate(
            running, timeout_seconds=0
        )  # a process without a recorded state could never be stopped
        raise
    return running, recorded
