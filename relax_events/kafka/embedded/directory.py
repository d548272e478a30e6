"""Who may touch a broker's directory, and what is said when the system refuses.

Which processes use a broker: each holds a locked file in the broker's `leases` folder, and the
    system drops the lock however its holder ends.

What a broker's directory remembers of it, in `broker.json`: which process, which ports, which
version.
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
"""How long a broker may take to get ready: on two cores that a hundred processes waited for, it
took over 60 s."""
BUSY_SECONDS = START_SECONDS + 30.0
"""How long another process may take: it starts the broker within `START_SECONDS`, or stops it
within 30 s."""
_RETRY_SECONDS = 0.05


class BrokerBusy(EnvironmentProblem):
    """Another process is starting or stopping the broker."""


@contextmanager
def sole_access(directory: Path, *, busy_seconds: float = BUSY_SECONDS) -> Iterator[None]:
    """Hold a broker's directory against other starters and stoppers; the system drops the lock with
    its holder, so none is left behind.

    Args:
        directory: The broker's, which exists.
        busy_seconds: How long to wait for another process that holds it.
    Raises:
        BrokerBusy: It still holds it.
    """
    with file_problems(directory):
        file = (directory / "broker.lock").open("w")
    with file:
        deadline = time.monotonic() + busy_seconds
        while not _is_locked(file):  # flock has no timeout, so this asks again
            if time.monotonic() >= deadline:
                raise BrokerBusy(
                    f"another process is starting or stopping the broker in {directory}; try "
                    "again when it is done"
                )
            time.sleep(_RETRY_SECONDS)
        yield


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def file_problems(place: Path) -> Iterator[None]:
    """Turn what the system says about a folder into an error that names it.

    Raises:
        EnvironmentProblem: The block met an OSError.
    """
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"the embedded broker can't use {place}: {error}; it needs a folder that this "
            "user may write to"
        ) from error


_FOLDER = "leases"
_numbers = itertools.count()


class Lease:
    """The mark of one user of a broker, from `take` to `release` or to the end of the process."""

    def __init__(self, directory: Path) -> None:
        """Take a lease; the caller holds the broker's directory (`sole_access`), so that nobody
        stops the broker meanwhile.

        Args:
            directory: The broker's.
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
        """Give the lease back; a second call does nothing."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def lease_holders(directory: Path) -> list[int]:
    """Return the process ids of a broker's living users, one for each lease."""
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
PASSWORD, OPEN = "password", "open"
"""How clients log in: with the password of the folder, or not at all."""


@dataclass(frozen=True)
class BrokerState:
    """One broker as last recorded; ports outlive the process so that a restart is found by running
    clients.

    `credentials` is the security folder of a secured broker, which has a listener of its own for
    itself, `internal_port`. `login` is how clients log in to one without `credentials`; empty where
    the node does not know the folder's password yet. `started_by` is the command that brought the
    broker up; what `relax broker start` brought up runs on when nobody uses it.
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
    def stays(self) -> bool:
        """Whether the broker runs until it is stopped, and not only as long as somebody uses it."""
        return self.started_by == BROKER_START


def read_state(path: Path) -> BrokerState | None:
    """Return what was recorded, None when nothing ever was.

    Raises:
        EnvironmentProblem: The file is there and is not ours to read, or to understand.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EnvironmentProblem(
            f"what is known of the embedded broker can't be read: {error}; it needs a folder "
            "of this user's"
        ) from error
    try:
        return BrokerState(**json.loads(content))
    except (ValueError, TypeError, RecursionError) as error:
        raise EnvironmentProblem(
            f"{path} does not describe a broker: {error}; if no broker runs there, delete "
            "that file (the records in data/ stay)"
        ) from error


def write_state(path: Path, state: BrokerState) -> None:
    """Record a state; a reader sees the old file or the new one, never half of one."""
    draft = path.with_suffix(".json.tmp")
    draft.write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)
