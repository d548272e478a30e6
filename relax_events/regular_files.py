"""Opens untrusted files only if they are regular files: reading a device, or a pipe without a
writer, would never end.
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
    """Open a regular file for reading; links are followed.

    Raises:
        OSError: The file is missing, unreadable, or not a regular file.
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
    """Return the text of a regular file.

    Raises:
        OSError: As `open_regular`.
        UnicodeDecodeError: The file is not UTF-8 text.
    """
    with open_regular(path) as file:
        return file.read().decode()


def require_regular_files(folder: Path, *, key: str) -> None:
    """Refuse a folder that contains anything but files and folders, because libraries would open it
    unchecked.

    Args:
        folder: For example a model folder. A missing folder is accepted here; the code that reads
            it reports it.
        key: The key of the run file, for the error text.
    Raises:
        ConfigError: The folder contains a pipe, a socket or a device, or a link to one; the text
            names it.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(
                f"{key} {folder} holds {path.name}, which is no regular file: it can't be "
                "read to an end; take it out"
            )
