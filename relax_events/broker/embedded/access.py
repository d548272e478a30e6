"""Who may touch a broker's directory, and what is said when the system refuses."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from relax_events.errors import EnvironmentProblem

START_SECONDS = 180.0
"""How long a broker may take to get ready: on two cores that a hundred processes waited for, it took over 60 s."""
BUSY_SECONDS = START_SECONDS + 30.0
"""How long another process may take: it starts the broker within `START_SECONDS`, or stops it within 30 s."""
_RETRY_SECONDS = 0.05


class BrokerBusy(EnvironmentProblem):
    """Another process is starting or stopping the broker."""


@contextmanager
def sole_access(directory: Path, *, busy_seconds: float = BUSY_SECONDS) -> Iterator[None]:
    """Hold a broker's directory against other starters and stoppers; the system drops the lock with its holder, so none is left behind.

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
                raise BrokerBusy(f"another process is starting or stopping the broker in {directory}; try again when it is done")
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
        raise EnvironmentProblem(f"the embedded broker can't use {place}: {error}; it needs a folder that this user may write to") from error
