"""The embedded broker as an object: a directory, a port, a process that may outlive its parent."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import psutil

from relax_events.broker.embedded import process as processes
from relax_events.broker.embedded.access import file_problems, sole_access
from relax_events.broker.embedded.diagnosis import explain_death
from relax_events.broker.embedded.launch import LOG_NAME, STATE_NAME, launch
from relax_events.broker.embedded.ports import HOST
from relax_events.broker.embedded.security import readiness_settings
from relax_events.broker.embedded.state import BrokerState, read_state, write_state
from relax_events.errors import BrokerUnavailable, ConfigError, EnvironmentProblem, RelaxError

_LAST_PORT = 65_535
_NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})


class EmbeddedBroker:
    """One Kafka node that lives in a directory and listens on the loopback interface.

    The directory holds server.properties, data/, broker.log and broker.json. Any process may make an object for it: all see the same broker.
    Start, stop and start again, after a crash too, keep the ports and the records, so that running clients reconnect.
    As a context manager it starts on entry and stops on exit, but leaves running a broker that ran before.

    Args:
        directory: Made when missing.
        port: Where clients connect; 0 takes the port used before in this directory, or a free one.
        node_properties: Broker settings laid over ours, taken at the next start.
        credentials: A folder made by `relax broker secure`: only its principals get in. Remembered from then on.
    """

    def __init__(self, directory: Path, *, port: int = 0, node_properties: Mapping[str, str] | None = None, credentials: Path | None = None) -> None:
        if not 0 <= port <= _LAST_PORT:
            raise ConfigError(f"port must be 0 to {_LAST_PORT}, got {port}; 0 takes a free one")
        self._directory = Path(directory).absolute()
        self._wanted_port = port
        self._node_properties = _NO_PROPERTIES if node_properties is None else dict(node_properties)
        self._credentials = credentials
        self._started_here = False

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
    def pid(self) -> int | None:
        """Process id of the running broker, None when it is down."""
        state = self.state
        running = None if state is None else _find(state)
        return None if running is None else running.pid

    @property
    def is_running(self) -> bool:
        """Whether the broker's process is alive."""
        return self.pid is not None

    def start(self, *, timeout_seconds: float = 60.0) -> None:
        """Bring the broker up and return once it serves; one that runs already is only waited for.

        The first start on a machine fetches the jars, which takes its own time. A start that fails leaves no process behind.

        Args:
            timeout_seconds: From spawning the process to ready.
        Raises:
            EnvironmentProblem: No Java, no network on first use, no disk space, or the port is taken.
            BrokerError: The broker ended while it started; the text has the last lines of its log.
            BrokerUnavailable: It was not ready in time.
            ConfigError: `node_properties` sets what the embedded broker decides itself, or `credentials` lacks a file.
        """
        with file_problems(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        with sole_access(self._directory):
            state = self.state
            if state is not None and (running := _find(state)) is not None:
                self._check_port(state)
                self._await(running, state, timeout_seconds)
                return
            running, state = launch(
                self._directory,
                last=state,
                wanted_port=self._wanted_port,
                node_properties=self._node_properties,
                credentials=self._credentials,
            )
            ready = False
            try:
                self._await(running, state, timeout_seconds)
                ready = self._started_here = True
            finally:
                if not ready:
                    self._finish(running, state, 0.0)

    def stop(self, *, timeout_seconds: float = 20.0) -> None:
        """Shut the broker down cleanly, by force after the timeout; nothing happens when it is down."""
        self._end(timeout_seconds)

    def kill(self) -> None:
        """End the broker at once, as a crash would; what it acknowledged is safe."""
        self._end(0.0)

    def died_error(self) -> RelaxError:
        """Return the error that says why a broker that should be running is not."""
        state = self.state
        if state is None:
            return BrokerUnavailable(f"no broker was ever started in {self._directory}; start one with `relax broker start`")
        return explain_death(self.log_path, port=state.port, directory=self._directory, start_byte=state.log_start_byte)

    def ended_within(self, timeout_seconds: float) -> bool:
        """Wait for the broker to end, for so long at most, and tell whether it did; at once when it is down."""
        state = self.state
        running = None if state is None else _find(state)
        return running is None or processes.ended_within(running, timeout_seconds)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._started_here:
            self.stop()

    def _check_port(self, state: BrokerState) -> None:
        if self._wanted_port not in (0, state.port):
            raise EnvironmentProblem(
                f"the broker in {self._directory} runs on port {state.port}, not {self._wanted_port}; stop it first, or choose another directory"
            )

    def _await(self, running: psutil.Process, state: BrokerState, timeout_seconds: float) -> None:
        from relax_events.broker.embedded.readiness import becomes_ready  # loads librdkafka, which `relax broker status` does without

        client = readiness_settings(state.credentials)
        if becomes_ready(running, state.port, deadline_seconds=time.monotonic() + timeout_seconds, client=client):
            return
        if processes.ended_within(running, 0):
            raise self.died_error()
        raise BrokerUnavailable(f"the embedded broker on {HOST}:{state.port} was not ready within {timeout_seconds:g} s; see {self.log_path}")

    def _end(self, timeout_seconds: float) -> None:
        if not self._directory.is_dir():
            return
        with sole_access(self._directory):
            state = self.state
            if state is not None and (running := _find(state)) is not None:
                self._finish(running, state, timeout_seconds)
            self._started_here = False

    def _finish(self, running: psutil.Process, state: BrokerState, timeout_seconds: float) -> None:
        clean = processes.end(running, timeout_seconds=timeout_seconds)
        if state.archive_at_exit is not None:
            _keep_class_archive(Path(state.archive_at_exit), whole=clean)
        write_state(self._directory / STATE_NAME, replace(state, pid=None, started_at_seconds=None, archive_at_exit=None))


def _find(state: BrokerState) -> psutil.Process | None:
    return processes.find(state.pid, state.started_at_seconds)


def _keep_class_archive(draft: Path, *, whole: bool) -> None:
    """Put the archive that a clean exit wrote in its place for all later starts, or drop what a forced exit left."""
    if whole and draft.exists():
        os.replace(draft, draft.with_name(draft.name.split(".", 1)[0] + ".jsa"))
    else:
        draft.unlink(missing_ok=True)
