"""Who may touch a broker's directory, and what is said when the system refuses."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_events.errors import EnvironmentProblem


class BrokerBusy(EnvironmentProblem):
    """Another process is starting or stopping the broker."""


@contextmanager
def sole_access(directory: Path) -> Iterator[None]:
    """Hold a broker's directory against other starters and stoppers; the system drops the lock with its holder, so none is left behind.

    Raises:
        BrokerBusy: Another process holds it.
    """
    with file_problems(directory):
        file = (directory / "broker.lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BrokerBusy(f"another process is starting or stopping the broker in {directory}; try again when it is done") from None
        yield


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
