"""The directory of an embedded broker: exclusive access, user locks, and the state in
`broker.json`.

Each process that uses the broker holds a locked file in the folder `leases`; the system releases
the lock however the process ends.
"""

import fcntl
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from relax_events.errors import EnvironmentProblem

START_SECONDS = 180.0
"""How long a broker may take to become ready: over 60 s were seen on two cores shared by a hundred
processes."""
BUSY_SECONDS = START_SECONDS + 30.0
"""How long to wait for another process: it starts the broker within `START_SECONDS`, or stops it
within 30 s."""
_RETRY_SECONDS = 0.05


class BrokerBusy(EnvironmentProblem):
    """Another process is starting or stopping the broker."""


@contextmanager
def exclusive_access(directory: Path, *, busy_seconds: float = BUSY_SECONDS) -> Iterator[None]:
    """Hold the lock without which no process starts or stops the broker. The system releases it
    when its holder dies.

    Args:
        directory: The broker's existing directory.
        busy_seconds: How long to wait for another process that holds it.
    Raises:
        BrokerBusy: The other process still holds the lock.
    """
    with translate_file_errors(directory):
        file = (directory / "broker.lock").open("w")
    with file:
        deadline = time.monotonic() + busy_seconds
        while not _try_lock(file):  # flock has no timeout
            if time.monotonic() >= deadline:
                raise BrokerBusy(
                    f"another process is starting or stopping the broker in {directory}; try "
                    "again when it is done"
                )
            time.sleep(_RETRY_SECONDS)
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def translate_file_errors(folder: Path) -> Iterator[None]:
    """Translate an OSError in the block into an error that names the folder.

    Raises:
        EnvironmentProblem: The block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"the embedded broker can't use {folder}: {error}; it needs a folder that this "
            "user may write to"
        ) from error


_FOLDER = "leases"
_numbers = itertools.count()


class UserLock:
    """A lock that marks this process as a user of a broker, until `release` or the end of the
    process.
    """

    def __init__(self, directory: Path) -> None:
        """Acquire the lock. The caller holds `exclusive_access`, so that no process stops the
        broker meanwhile.

        Args:
            directory: The broker's directory.
        Raises:
            OSError: The folder can't be written.
        """
        folder = directory / _FOLDER
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if not _is_held(path):
                path.unlink(missing_ok=True)
        self._path = folder / f"{os.getpid()}-{next(_numbers)}"
        self._file = self._path.open("w")  # closed in children that run another program
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def list_users(directory: Path) -> list[int]:
    """Return the process ids of a broker's live users, one for each lock."""
    folder = directory / _FOLDER
    return (
        sorted(int(path.name.split("-")[0]) for path in folder.iterdir() if _is_held(path))
        if folder.is_dir()
        else []
    )


def _is_held(path: Path) -> bool:
    try:
        file = path.open("r")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


BROKER_START = "relax broker start"
PASSWORD, NO_LOGIN = "password", "open"
"""How clients authenticate: with the password of the folder, or not at all."""


@dataclass(frozen=True)
class BrokerState:
    """The recorded state of a broker. Ports outlive the process, so that running clients reconnect
    after a restart.

    `credentials` is the security folder of a secured broker, which has an additional listener for
    itself, `internal_port`. `login` is how clients of a broker without `credentials` authenticate;
    empty while the node does not know the folder's password yet. `started_by` is the command that
    started the broker; a broker started by `relax broker start` keeps running without users.
    """

    port: int
    controller_port: int
    kafka_version: str
    pid: int | None = None
    started_at_seconds: float | None = None
    archive_at_exit: str | None = None
    log_start_byte: int = 0
    internal_port: int = 0
    credentials: str | None = None
    started_by: str = ""
    login: str = ""

    @property
    def runs_until_stopped(self) -> bool:
        """Whether the broker runs until it is stopped, and not only while it has users."""
        return self.started_by == BROKER_START


def read_state(path: Path) -> BrokerState | None:
    """Return the recorded state; None when nothing was recorded.

    Raises:
        EnvironmentProblem: The file exists but can't be read or parsed.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EnvironmentProblem(
            f"the state of the embedded broker can't be read: {error}; it needs a folder "
            "that this user owns"
        ) from error
    try:
        return BrokerState(**json.loads(content))
    except (ValueError, TypeError, RecursionError) as error:
        raise EnvironmentProblem(
            f"{path} does not describe a broker: {error}; if no broker runs there, delete "
            "that file (the records in data/ stay)"
        ) from error


def write_state(path: Path, state: BrokerState) -> None:
    """Record a state atomically."""
    draft = path.with_suffix(".json.tmp")
    draft.write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)
