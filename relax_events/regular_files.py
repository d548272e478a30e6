"""Opens files that others have put there: only regular ones. Reading a pipe that nobody writes to,
or a device, would never end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

from relax_events.errors import ConfigError

WRONG_KIND = "it is no regular file"


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; links are followed.

    Raises:
        OSError: It is missing, unreadable, or no regular file.
    """
    descriptor = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    )  # a pipe without a writer opens at once
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, WRONG_KIND, str(path))
    os.set_blocking(descriptor, True)
    return cast("BinaryIO", os.fdopen(descriptor, "rb"))


def read_regular_text(path: Path) -> str:
    """Return the text of a file; raises as `open_regular`, and UnicodeDecodeError."""
    with open_regular(path) as file:
        return file.read().decode()


def require_regular_files(folder: Path, *, key: str) -> None:
    """Refuse a folder with something in it that is neither a file nor a folder, which libraries
    would open without looking.

    Args:
        folder: For example of a model; one that is not there is left to whoever needs it.
        key: Of the run file, for the error.
    Raises:
        ConfigError: There is a pipe, a socket or a device, or a link to one; the text names it.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(
                f"{key} {folder} holds {path.name}, which is no regular file: it can't be "
                "read to an end; take it out"
            )
