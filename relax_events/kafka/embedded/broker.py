"""The embedded broker as an object: a directory, a port, a process that may outlive its parent."""

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
from relax_events.kafka.embedded import process as processes
from relax_events.kafka.embedded.broker_log import explain_death
from relax_events.kafka.embedded.directory import (
    BROKER_START,
    BUSY_SECONDS,
    PASSWORD,
    START_SECONDS,
    BrokerState,
    Lease,
    file_problems,
    lease_holders,
    read_state,
    sole_access,
    write_state,
)
from relax_events.kafka.embedded.launch import LOG_NAME, STATE_NAME, launch
from relax_events.kafka.embedded.ports import HOST
from relax_events.kafka.embedded.security import PASSWORD_NAME, NodeLogin, readiness_settings
from relax_events.kafka.security.settings import LOCAL_USER

_LAST_PORT = 65_535
STOP_SECONDS = 20.0
_NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})


class EmbeddedBroker:
    """One Kafka node that lives in a directory and listens on the loopback interface.

    The directory holds server.properties, data/, broker.log and broker.json. Any process may make
    an object for it: all see the same broker. Start, stop and start again, after a crash too, keep
    the ports and the records, so that running clients reconnect. What `start` brings up runs until
    `stop`. `in_use` brings it up for as long as it is needed: the last user to leave stops it, and
    a user that is killed counts no more. As a context manager the object is one user.

    Args:
        directory: Made when missing.
        port: Where clients connect; 0 takes the port used before in this directory, or a free one.
        node_properties: Broker settings laid over ours, taken at the next start.
        credentials: A folder made by `relax broker secure`: only its principals get in. Remembered
            from then on.
        has_password: Whether clients of a broker without credentials log in with the password of
            `password_file`. False lets every user of the machine in; None does as the last start
            did, and at the first start they log in.
        heap_mib: The most that its heap may grow to, in MiB, from the next start on; 0 for what the
            machine's memory allows.
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

    @property
    def directory(self) -> Path:
        """Where the broker lives, absolute."""
        return self._directory

    @property
    def log_path(self) -> Path:
        """What the broker prints, of all its starts."""
        return self._directory / LOG_NAME

    @property
    def state(self) -> BrokerState | None:
        """What the directory remembers, None before the first start."""
        return read_state(self._directory / STATE_NAME)

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect, also while the broker is down.

        Raises:
            BrokerUnavailable: The broker was never started, so it has no port yet.
        """
        state = self.state
        if state is None:
            raise self.died_error()
        return f"{HOST}:{state.port}"

    @property
    def password_file(self) -> Path | None:
        """File with the password that clients log in with; None where they log in as principals, or
        not at all.
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
        state = self.state
        running = None if state is None else _find(state)
        return None if running is None else running.pid

    @property
    def is_running(self) -> bool:
        """Whether the broker's process is alive."""
        return self.pid is not None

    @property
    def users(self) -> list[int]:
        """Process ids of those who use the broker now."""
        return lease_holders(self._directory)

    def start(
        self, *, timeout_seconds: float = START_SECONDS, busy_seconds: float = BUSY_SECONDS
    ) -> None:
        """Bring the broker up until `stop`, and return once it serves; one that runs already is
        only waited for, and stays from now on.

        The first start on a machine fetches the jars, which takes its own time. A start that fails
        leaves no process behind.

        Args:
            timeout_seconds: From spawning the process to ready.
            busy_seconds: How long to wait for another process that starts or stops it.
        Raises:
            EnvironmentProblem: No Java, no network on first use, no disk space, or the port is
                taken.
            BrokerError: The broker ended while it started; the text has the cause from its log.
            BrokerUnavailable: It was not ready in time.
            ConfigError: `node_properties` sets what the embedded broker decides itself, or
                `credentials` lacks a file.
        """
        self._make_directory()
        with sole_access(self._directory, busy_seconds=busy_seconds):
            self._bring_up(timeout_seconds, by=BROKER_START)
            state = self.state
            if state is not None and not state.stays:
                write_state(self._directory / STATE_NAME, replace(state, started_by=BROKER_START))

    def restart(self, *, timeout_seconds: float = START_SECONDS) -> None:
        """Bring up again a broker that died under its users, on the same port; when it is stopped
        stays as it was. One that runs is left alone.

        Raises:
            BrokerBusy: Another process is at it already.
            EnvironmentProblem: As for `start`.
            BrokerError: As for `start`.
        """
        with sole_access(self._directory, busy_seconds=0):
            state = self.state
            self._bring_up(
                timeout_seconds,
                by=state.started_by if state else BROKER_START,
                port=state.port if state else 0,
            )

    @contextmanager
    def in_use(self, by: str, *, timeout_seconds: float = START_SECONDS) -> Iterator[bool]:
        """Keep the broker up while the block runs, and give whether this brought it up; the last
        user that leaves stops it.

        Args:
            by: The command that uses it, for the record.
            timeout_seconds: How long a start may take.
        Raises:
            BrokerError: As for `start`.
            EnvironmentProblem: As for `start`.
        """
        self._make_directory()
        with ExitStack() as stack:
            with sole_access(self._directory):
                self._take_lease(stack)
                is_new = self._bring_up(timeout_seconds, by=by)
            yield is_new

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Count as a user of a broker that others bring up: it is not stopped while the block runs,
        unless by force.
        """
        with ExitStack() as stack:
            with sole_access(self._directory):
                self._take_lease(stack)
            yield

    def stop(
        self, *, timeout_seconds: float = STOP_SECONDS, busy_seconds: float = BUSY_SECONDS
    ) -> None:
        """Shut the broker down cleanly, by force after the timeout, whoever uses it; nothing
        happens when it is down.
        """
        self._end(timeout_seconds, busy_seconds, is_wanted=False)

    def kill(self) -> None:
        """End the broker at once, as a crash would; what it acknowledged is safe."""
        self._end(0.0, BUSY_SECONDS, is_wanted=True)

    def died_error(self) -> RelaxError:
        """Return the error that says why a broker that should be running is not."""
        state = self.state
        if state is None:
            return BrokerUnavailable(
                f"no broker was ever started in {self._directory}; start one with `relax "
                "broker start`"
            )
        return explain_death(
            self.log_path,
            port=state.port,
            directory=self._directory,
            start_byte=state.log_start_byte,
        )

    def ended_within(self, timeout_seconds: float) -> bool:
        """Wait for the broker to end, for so long at most, and tell whether it did; at once when it
        is down.
        """
        state = self.state
        running = None if state is None else _find(state)
        return running is None or processes.ended_within(running, timeout_seconds)

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
        with file_problems(self._directory):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _bring_up(self, timeout_seconds: float, *, by: str, port: int = 0) -> bool:
        """Start the broker unless it runs, wait until it serves, and return whether it had to be
        started; the caller has sole access.
        """
        state = self.state
        if state is not None and (running := _find(state)) is not None:
            self._check_port(state)
            self._await(running, state, timeout_seconds)
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
        ready = False
        try:
            if newcomer is not None:
                state = self._introduce(newcomer, running, state, timeout_seconds)
            self._await(running, state, timeout_seconds)
            ready = True
        finally:
            if not ready:
                self._finish(running, state, 0.0)
        return True

    def _introduce(
        self, login: NodeLogin, running: psutil.Process, state: BrokerState, timeout_seconds: float
    ) -> BrokerState:
        """Make the folder's password known to a node that was made without it, or under another
        one, and return what is recorded of that.
        """
        from relax_events.kafka.connection import Connection
        from relax_events.kafka.security.principals import PrincipalAdmin, SecurityChanges

        self._await(running, state, timeout_seconds, client=login.of_node())
        itself = Connection(
            f"{HOST}:{state.port}",
            timeout_seconds,
            client_id="relax.broker",
            credentials=login.of_node(),
        )
        PrincipalAdmin(itself).apply(
            SecurityChanges([LOCAL_USER], [], [], []), password_of=lambda _: login.password
        )
        known = replace(state, login=PASSWORD)
        write_state(self._directory / STATE_NAME, known)
        return known

    def _take_lease(self, stack: ExitStack) -> None:
        with file_problems(self._directory):
            stack.callback(self._leave, Lease(self._directory))

    def _leave(self, lease: Lease) -> None:
        """Give a lease back, and stop the broker if nobody else has one and it is not to stay."""
        try:
            if not self._directory.is_dir():
                return
            with sole_access(self._directory):
                lease.release()
                state = self.state
                if (
                    state is not None
                    and not state.stays
                    and (running := _find(state)) is not None
                    and not self.users
                ):
                    self._finish(running, state, STOP_SECONDS)
        finally:
            lease.release()

    def _check_port(self, state: BrokerState) -> None:
        if self._wanted_port not in (0, state.port):
            raise EnvironmentProblem(
                f"the broker in {self._directory} runs on port {state.port}, not "
                f"{self._wanted_port}; stop it first, or choose another directory"
            )

    def _await(
        self,
        running: psutil.Process,
        state: BrokerState,
        timeout_seconds: float,
        *,
        client: Mapping[str, str] | None = None,
    ) -> None:
        from relax_events.kafka.embedded.process import (
            becomes_ready,  # loads librdkafka, which `relax broker status` does without
        )

        if client is None:
            client = readiness_settings(state, self._directory / PASSWORD_NAME)
        if becomes_ready(
            running, state.port, deadline_seconds=time.monotonic() + timeout_seconds, client=client
        ):
            return
        if processes.ended_within(running, 0):
            raise self.died_error()
        raise BrokerUnavailable(
            f"the embedded broker on {HOST}:{state.port} was not ready within "
            f"{timeout_seconds:g} s; see {self.log_path}"
        )

    def _end(self, timeout_seconds: float, busy_seconds: float, *, is_wanted: bool) -> None:
        if not self._directory.is_dir():
            return
        with sole_access(self._directory, busy_seconds=busy_seconds):
            state = self.state
            if state is not None and (running := _find(state)) is not None:
                self._finish(
                    running, state if is_wanted else replace(state, started_by=""), timeout_seconds
                )

    def _finish(self, running: psutil.Process, state: BrokerState, timeout_seconds: float) -> None:
        clean = processes.end(running, timeout_seconds=timeout_seconds)
        if state.archive_at_exit is not None:
            _keep_class_archive(Path(state.archive_at_exit), whole=clean)
        write_state(
            self._directory / STATE_NAME,
            replace(state, pid=None, started_at_seconds=None, archive_at_exit=None),
        )


def _find(state: BrokerState) -> psutil.Process | None:
    return processes.find(state.pid, state.started_at_seconds)


def _keep_class_archive(draft: Path, *, whole: bool) -> None:
    """Put the archive that a clean exit wrote in its place for all later starts, or drop what a
    forced exit left.
    """
    if whole and draft.exists():
        os.replace(draft, draft.with_name(draft.name.split(".", 1)[0] + ".jsa"))
    else:
        draft.unlink(missing_ok=True)
