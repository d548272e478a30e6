"""The embedded broker: a directory, a port, and a process that may outlive its parent."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import psutil

from relax_events.errors import BrokerUnavailable, ConfigError, EnvironmentProblem, RelaxError
from relax_events.kafka.embedded.broker_log import explain_death
from relax_events.kafka.embedded.directory import (
    BROKER_START,
    BUSY_SECONDS,
    PASSWORD,
    START_SECONDS,
    BrokerState,
    UserLock,
    exclusive_access,
    list_users,
    read_state,
    translate_file_errors,
    write_state,
)
from relax_events.kafka.embedded.launch import LOG_NAME, PROPERTIES_NAME, STATE_NAME, launch
from relax_events.kafka.embedded.ports import HOST
from relax_events.kafka.embedded.process import (
    find_process,
    get_exit_code,
    terminate,
    wait_for_end,
    wait_until_ready,
)
from relax_events.kafka.embedded.security import PASSWORD_NAME, NodeLogin, read_readiness_settings
from relax_events.kafka.security.settings import EMBEDDED_USER

_LAST_PORT = 65_535
STOP_SECONDS = 20.0
_NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})


class EmbeddedBroker:
    """One Kafka node in a directory, which listens on the loopback interface.

    The directory holds server.properties, data/, broker.log and broker.json. Objects in any process
    refer to the same broker. Restarts, after a crash too, keep ports and records, so that running
    clients reconnect. A broker started by `start` runs until `stop`. A broker started by `in_use`
    runs while it has users: the last user to leave stops it, and a killed user no longer counts. As
    a context manager the object is one user.

    Args:
        directory: The broker's directory; created when missing.
        port: The clients' port; 0 uses the directory's last port, or a free one.
        node_properties: Broker settings that override ours from the next start on.
        credentials: A folder created by `relax broker secure`: only its principals may connect.
            Stored for later starts.
        has_password: Whether clients of a broker without `credentials` authenticate with the
            password of `password_file`. False admits every user of the machine; None keeps the last
            start's choice, which is True at first.
        heap_mib: The maximal heap in MiB from the next start on; 0 derives it from the machine's
            memory.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        node_properties: Mapping[str, str] | None = None,
        credentials: Path | None = None,
        has_password: bool | None = None,
        heap_mib: int = 0,
    ) -> None:
        if not 0 <= port <= _LAST_PORT:
            raise ConfigError(f"port must be 0 to {_LAST_PORT}, got {port}; 0 takes a free one")
        self._directory = Path(directory).absolute()
        self._wanted_port = port
        self._node_properties = _NO_PROPERTIES if node_properties is None else dict(node_properties)
        self._credentials, self._has_password, self._heap_mib = credentials, has_password, heap_mib
        self._uses = ExitStack()
        self._child: psutil.Process | None = None

    @property
    def directory(self) -> Path:
        """The broker's directory, absolute."""
        return self._directory

    @property
    def log_path(self) -> Path:
        """The broker's log file, of all its starts."""
        return self._directory / LOG_NAME

    @property
    def state(self) -> BrokerState | None:
        """The recorded state; None before the first start."""
        return read_state(self._directory / STATE_NAME)

    @property
    def bootstrap_servers(self) -> str:
        """The clients' address, also while the broker is down.

        Raises:
            BrokerUnavailable: The broker was never started, so it has no port yet.
        """
        state = self.state
        if state is None:
            raise self.explain_death()
        return f"{HOST}:{state.port}"

    @property
    def password_file(self) -> Path | None:
        """The file of the clients' password; None when clients authenticate as principals or not at
        all.
        """
        state = self.state
        return (
            self._directory / PASSWORD_NAME
            if state is not None and state.login == PASSWORD
            else None
        )

    @property
    def pid(self) -> int | None:
        """Process id of the running broker, None when it is down."""
        running = self._find_process(self.state)
        return None if running is None else running.pid

    @property
    def is_running(self) -> bool:
        """Whether the broker's process is alive."""
        return self.pid is not None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the newest broker that this object started, -N if signal N ended it;
        None while it runs, and where another process started the broker.
        """
        state = self.state
        if self._child is None or (state is not None and state.pid not in (None, self._child.pid)):
            return None
        return get_exit_code(self._child)

    @property
    def users(self) -> list[int]:
        """Process ids of the broker's current users."""
        return list_users(self._directory)

    def start(
        self, *, timeout_seconds: float = START_SECONDS, busy_seconds: float = BUSY_SECONDS
    ) -> None:
        """Start the broker until `stop`, and return once it serves. A running broker is kept until
        `stop` from now on.

        The first start on a machine downloads the jars, which takes additional time. A failed start
        leaves no process behind.

        Args:
            timeout_seconds: The time from the process's start until it is ready.
            busy_seconds: How long to wait for another process that is starting or stopping the
                broker.
        Raises:
            EnvironmentProblem: There is no Java, no network on first use, no disk space, or the
                port is taken.
            BrokerError: The broker died during its start; the text has the cause from its log.
            BrokerUnavailable: The broker was not ready in time.
            ConfigError: `node_properties` sets a property that the embedded broker controls, or
                `credentials` lacks a file.
        """
        self._make_directory()
        with exclusive_access(self._directory, busy_seconds=busy_seconds):
            self._ensure_running(timeout_seconds, by=BROKER_START)
            state = self.state
            if state is not None and not state.runs_until_stopped:
                write_state(self._directory / STATE_NAME, replace(state, started_by=BROKER_START))

    def restart(self, *, timeout_seconds: float = START_SECONDS) -> None:
        """Restart a broker that died while in use, on the same port and with the same lifetime. A
        running broker is unchanged.

        Raises:
            BrokerBusy: Another process is already starting or stopping it.
            EnvironmentProblem: As for `start`.
            BrokerError: As for `start`.
        """
        with exclusive_access(self._directory, busy_seconds=0):
            state = self.state
            self._ensure_running(
                timeout_seconds,
                by=state.started_by if state else BROKER_START,
                port=state.port if state else 0,
            )

    @contextmanager
    def in_use(self, by: str, *, timeout_seconds: float = START_SECONDS) -> Iterator[bool]:
        """Keep the broker running during the block, and yield whether this call started it. The
        last user to leave stops it.

        Args:
            by: The command that uses the broker; recorded in broker.json.
            timeout_seconds: How long a start may take.
        Raises:
            BrokerError: As for `start`.
            EnvironmentProblem: As for `start`.
        """
        self._make_directory()
        with ExitStack() as stack:
            with exclusive_access(self._directory):
                self._lock_as_user(stack)
                is_new = self._ensure_running(timeout_seconds, by=by)
            yield is_new

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Count as a user of a broker that another process starts: it is stopped during the block
        only by `stop`.
        """
        with ExitStack() as stack:
            with exclusive_access(self._directory):
                self._lock_as_user(stack)
            yield

    def stop(
        self, *, timeout_seconds: float = STOP_SECONDS, busy_seconds: float = BUSY_SECONDS
    ) -> None:
        """Shut the broker down, by force after the timeout, even if it has users; do nothing when
        it is down.
        """
        self._stop_process(timeout_seconds, busy_seconds, is_wanted=False)

    def kill(self) -> None:
        """Kill the broker, as a crash would; acknowledged records are durable."""
        self._stop_process(0.0, BUSY_SECONDS, is_wanted=True)

    def explain_death(self) -> RelaxError:
        """Return the error that explains why the broker is not running."""
        state = self.state
        if state is None:
            return BrokerUnavailable(
                f"no broker has been started in {self._directory}; start one with `relax "
                "broker start`"
            )
        return explain_death(
            self.log_path,
            port=state.port,
            directory=self._directory,
            start_byte=state.log_start_byte,
            exit_code=self.exit_code,
        )

    def wait_for_end(self, timeout_seconds: float) -> bool:
        """Wait for the broker's end and return whether it ended; return at once when it is down."""
        running = self._find_process(self.state)
        return running is None or wait_for_end(running, timeout_seconds)

    def __enter__(self) -> Self:
        self._uses.enter_context(self.in_use("a Python program"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._uses.close()

    def _make_directory(self) -> None:
        with translate_file_errors(self._directory):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _ensure_running(self, timeout_seconds: float, *, by: str, port: int = 0) -> bool:
        """Start the broker unless it runs, wait until it serves, and return whether it was started.
        The caller holds exclusive access.
        """
        state = self.state
        if state is not None and (running := self._find_process(state)) is not None:
            self._check_port(state)
            self._wait_until_ready(running, state, timeout_seconds)
            return False
        running, state, newcomer = launch(
            self._directory,
            last=state,
            wanted_port=self._wanted_port or port,
            node_properties=self._node_properties,
            credentials=self._credentials,
            has_password=self._has_password,
            heap_mib=self._heap_mib,
            started_by=by,
        )
        self._child = running
        ready = False
        try:
            if newcomer is not None:
                state = self._register_user(newcomer, running, state, timeout_seconds)
            self._wait_until_ready(running, state, timeout_seconds)
            ready = True
        finally:
            if not ready:
                self._end_process(running, state, 0.0)
        return True

    def _register_user(
        self, login: NodeLogin, running: psutil.Process, state: BrokerState, timeout_seconds: float
    ) -> BrokerState:
        """Register the folder's password with a node that was formatted without it or with another
        one; return the new state.
        """
        from relax_events.kafka.connection import Connection
        from relax_events.kafka.security.principals import PrincipalAdmin, SecurityChanges

        self._wait_until_ready(running, state, timeout_seconds, client=login.node_client_settings())
        itself = Connection(
            f"{HOST}:{state.port}",
            timeout_seconds,
            client_id="relax.broker",
            credentials=login.node_client_settings(),
        )
        PrincipalAdmin(itself).apply(
            SecurityChanges([EMBEDDED_USER], [], [], []), password_of=lambda _: login.password
        )
        new_state = replace(state, login=PASSWORD)
        write_state(self._directory / STATE_NAME, new_state)
        return new_state

    def _lock_as_user(self, stack: ExitStack) -> None:
        with translate_file_errors(self._directory):
            stack.callback(self._release_user_lock, UserLock(self._directory))

    def _release_user_lock(self, lease: UserLock) -> None:
        """Release a user lock, and stop the broker if it has no other users and was not started by
        `start`.
        """
        try:
            if not self._directory.is_dir():
                return
            with exclusive_access(self._directory):
                lease.release()
                state = self.state
                if (
                    state is not None
                    and not state.runs_until_stopped
                    and (running := self._find_process(state)) is not None
                    and not self.users
                ):
                    self._end_process(running, state, STOP_SECONDS)
        finally:
            lease.release()

    def _check_port(self, state: BrokerState) -> None:
        if self._wanted_port not in (0, state.port):
            raise EnvironmentProblem(
                f"the broker in {self._directory} runs on port {state.port}, not "
                f"{self._wanted_port}; stop it first, or choose another directory"
            )

    def _wait_until_ready(
        self,
        running: psutil.Process,
        state: BrokerState,
        timeout_seconds: float,
        *,
        client: Mapping[str, str] | None = None,
    ) -> None:
        if client is None:
            client = read_readiness_settings(state, self._directory / PASSWORD_NAME)
        if wait_until_ready(
            running, state.port, deadline_seconds=time.monotonic() + timeout_seconds, client=client
        ):
            return
        if wait_for_end(running, 0):
            raise self.explain_death()
        raise BrokerUnavailable(
            f"the embedded broker on {HOST}:{state.port} was not ready within "
            f"{timeout_seconds:g} s; see {self.log_path}"
        )

    def _find_process(self, state: BrokerState | None) -> psutil.Process | None:
        pid = None if state is None else state.pid
        if self._child is not None and self._child.pid == pid and wait_for_end(self._child, 0):
            return None
        return find_process(pid, self._directory / PROPERTIES_NAME)

    def _stop_process(
        self, timeout_seconds: float, busy_seconds: float, *, is_wanted: bool
    ) -> None:
        if not self._directory.is_dir():
            return
        with exclusive_access(self._directory, busy_seconds=busy_seconds):
            state = self.state
            if state is not None and (running := self._find_process(state)) is not None:
                self._end_process(
                    running, state if is_wanted else replace(state, started_by=""), timeout_seconds
                )

    def _end_process(
        self, running: psutil.Process, state: BrokerState, timeout_seconds: float
    ) -> None:
        clean = terminate(running, timeout_seconds=timeout_seconds)
        if state.archive_at_exit is not None:
            _keep_class_archive(Path(state.archive_at_exit), whole=clean)
        write_state(
            self._directory / STATE_NAME,
            replace(state, pid=None, started_at_seconds=None, archive_at_exit=None),
        )


def _keep_class_archive(draft: Path, *, whole: bool) -> None:
    """Publish the class archive of a clean exit for later starts, or delete that of a forced
    exit.
    """
    if whole and draft.exists():
        os.replace(draft, draft.with_name(draft.name.split(".", 1)[0] + ".jsa"))
    else:
        draft.unlink(missing_ok=True)
