"""Opens untrusted files only if they are regular files: reading a device, or a pipe without a
writer, would never end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from relax_events.errors import ConfigError

WRONG_KIND = "it is no regular file"
LINK = "it is a link, and links are not followed"
OPEN_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe without a writer opens at once."""
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_regular(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: The file.
        follow_links: Whether the last part of the path may be a link.
    Raises:
        OSError: The file is missing, unreadable, not a regular file, or a link where none may be.
    """
    flags = OPEN_FILE if follow_links else OPEN_FILE | os.O_NOFOLLOW
    with _name_links(path):
        descriptor = os.open(path, flags)
    return _require_regular(descriptor, path)


def open_below(folder: Path, name: str) -> BufferedReader:
    """Open a regular file below a folder that others have filled; neither the file nor a folder on
    the way to it may be a link.

    Args:
        folder: May be a link itself.
        name: The file's path in the folder, with `/` between its parts.
    Raises:
        OSError: The file is missing, unreadable, not a regular file, or not below the folder.
    """
    path = folder / name
    *folders, last = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in (*folders, last)):
        raise OSError(errno.EINVAL, "it lies outside of the folder", str(path))
    with open_folders(folder, folders) as handles, _name_links(path):
        descriptor = os.open(last, OPEN_FILE | os.O_NOFOLLOW, dir_fd=handles[-1])
    return _require_regular(descriptor, path)


@contextmanager
def open_folders(folder: Path, names: Sequence[str]) -> Iterator[list[int]]:
    """Give handles of a folder and of each folder below it, in this order; none of those below is
    a link.

    Args:
        folder: May be a link itself.
        names: The first below the folder, the next below that one, and so on.
    Raises:
        OSError: One is missing, unreadable, no folder, or a link.
    """
    with ExitStack() as stack:
        handles = [os.open(folder, OPEN_FOLDER)]
        stack.callback(os.close, handles[0])
        path = folder
        for name in names:
            path /= name
            with _name_links(path):
                handles.append(os.open(name, OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=handles[-1]))
            stack.callback(os.close, handles[-1])
        yield handles


@contextmanager
def _name_links(path: Path) -> Iterator[None]:
    """Say of a path that can't be opened because it is a link that it is one."""
    try:
        yield
    except OSError as error:
        is_link = error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and path.is_symlink())
        if is_link:
            raise OSError(errno.ELOOP, LINK, str(path)) from None
        raise


def _require_regular(descriptor: int, path: Path) -> BufferedReader:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, WRONG_KIND, str(path))
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


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
