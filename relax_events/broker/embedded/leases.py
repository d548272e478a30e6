"""Which processes use a broker: each holds a locked file in the broker's `leases` folder, and the system drops the lock however its holder ends."""

import fcntl
import itertools
import os
from pathlib import Path

_FOLDER = "leases"
_numbers = itertools.count()


class Lease:
    """The mark of one user of a broker, from `take` to `release` or to the end of the process."""

    def __init__(self, directory: Path) -> None:
        """Take a lease; the caller holds the broker's directory (`sole_access`), so that nobody stops the broker meanwhile.

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
    return sorted(int(path.name.split("-")[0]) for path in folder.iterdir() if _is_held(path)) if folder.is_dir() else []


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
