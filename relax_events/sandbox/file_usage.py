"""Counts the files of a program's process tree, deleted ones that it still holds included, where
its folder is no file system of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

BLOCK_BYTES = 512
DELETED = " (deleted)"
HIDDEN_ERRORS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""How reading fails where a program took the right to read, or nested folders too deep."""
TRIES = 3
FileKey = tuple[int, int]
"""The device and the number of a file."""


def exceeds_file_limits(
    folder: Path,
    processes: Iterable[psutil.Process],
    *,
    max_bytes: int,
    max_files: int,
    user: int | None,
    may_hide: bool,
) -> bool:
    """Return whether the files in a folder, and deleted files that processes hold, exceed a limit.

    Files that can't be counted, because a program has made them unreadable, exceed the limits.

    Args:
        folder: The folder, the only one that the processes may write to.
        processes: The processes.
        max_bytes: The limit on the space that the files take.
        max_files: The limit on the number of files and folders.
        user: The user of the programs, if it is another one than ours, which then is root.
        may_hide: Whether processes may hide what they hold, as a bubblewrap with rights of its own
            does.
    Raises:
        OSError: The files can't be counted for another reason, such as too many open files here.
    """
    num_bytes, num_files = 0, 0
    held: dict[FileKey, int] = {}
    try:
        for size in _sizes_in(folder):
            num_bytes, num_files = num_bytes + size, num_files + 1
            if num_bytes > max_bytes or num_files > max_files:
                return True
        with _acting_as(user):
            for process in processes:
                held |= _deleted_files(process, folder.resolve(), user=user, may_hide=may_hide)
    except OSError as error:
        if error.errno in HIDDEN_ERRORS:
            return True
        raise
    return num_bytes + sum(held.values()) > max_bytes or num_files + len(held) > max_files


@contextmanager
def _acting_as(user: int | None) -> Iterator[None]:
    """Let this thread access files as another user: in a container, root may not look at another
    user's processes, and that user may.
    """
    if user is None:
        yield
        return
    libc = ctypes.CDLL(None)
    group_before, user_before = libc.setfsgid(user), libc.setfsuid(user)
    try:
        yield
    finally:
        libc.setfsuid(user_before)
        libc.setfsgid(group_before)


def _sizes_in(folder: Path) -> Iterator[int]:
    """Yield the size of each file and folder below a folder.

    Raises:
        OSError: A folder can't be read, or lies too deep for a path.
    """
    folders = [str(folder)]
    while folders:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(folders.pop()) as entries,
        ):
            for entry in entries:
                yield _measure_size(entry)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def _measure_size(entry: os.DirEntry[str]) -> int:
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
        return entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
    return 0


def _deleted_files(
    process: psutil.Process, folder: Path, *, user: int | None, may_hide: bool
) -> dict[FileKey, int]:
    """Return the size of each deleted file that a process holds.

    Processes of other users than the programs' start programs, and hold no deleted files.
    """
    files: dict[FileKey, int] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        if user is not None and process.uids().real != user:
            return files
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(PermissionError) if may_hide else contextlib.nullcontext():
                files |= _files_of_thread(thread, folder)
    return files


def _files_of_thread(thread: Path, folder: Path) -> dict[FileKey, int]:
    """Return the size of each deleted file that a thread holds; none if it has ended.

    A thread may have open files of its own, and outlive the first thread of its process.

    Raises:
        PermissionError: The thread hides them.
    """
    for _ in range(TRIES):
        try:
            return _mapped_files(thread, folder) | _open_files(thread)
        except (FileNotFoundError, ProcessLookupError):
            return {}
        except PermissionError as error:
            if not _has_memory(thread):  # it is ending
                return {}
            hidden = error
    raise hidden


def _open_files(thread: Path) -> dict[FileKey, int]:
    sizes = {}
    for path in (thread / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                sizes[status.st_dev, status.st_ino] = status.st_blocks * BLOCK_BYTES
    return sizes


def _mapped_files(thread: Path, folder: Path) -> dict[FileKey, int]:
    sizes: dict[FileKey, int] = {}
    for line in (thread / "maps").read_text(errors="replace").splitlines():
        if not line.endswith(DELETED):
            continue
        addresses, _, offset, device, number, path = line.split(maxsplit=5)
        if path.startswith(f"{folder}/"):
            first, last = (int(address, 16) for address in addresses.split("-"))
            major, minor = (int(part, 16) for part in device.split(":"))
            key = os.makedev(major, minor), int(number)
            sizes[key] = max(sizes.get(key, 0), int(offset, 16) + last - first)
    return sizes


def _has_memory(thread: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "VmSize:" in (thread / "status").read_text()
    return False
