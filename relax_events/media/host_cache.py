"""A cache of files shared by all workers of a machine: computed once, verified, of limited size."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from blake3 import blake3

from relax_events.regular_files import open_regular

DIGEST_BYTES = 32
ABSENT = (errno.ENOENT, errno.ELOOP, errno.EINVAL)
"""Errors of a name that has no regular file, but nothing, a link or a pipe: it is made again."""
LOW_WATER = 3 / 4
"""Share of the limit that remains after trimming."""
TRIM_CHECK_SHARE = 1 / 32
"""Share of the limit that one worker adds before it checks the folder's size: with it, eight
workers together stay within the limit.
"""


class HostCache:
    """A folder of files; each begins with the BLAKE3 digest of the rest, so that damaged ones are
    computed again.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Use a folder; it is created with the first file.

        Args:
            folder: A folder that only this cache uses.
            max_bytes: Limit for all files together; near it the least recently read are deleted.
        """
        self._folder, self._max_bytes = folder, max_bytes
        self._num_added_bytes = (
            max_bytes  # then the first addition checks the size, which includes earlier runs
        )

    def get(self, name: str, make: Callable[[], bytes]) -> bytes | memoryview:
        """Return a file, or compute it; a worker waits for a file that another worker computes.

        Args:
            name: Name of the file. Its first two characters select its lock and subfolder.
            make: Computes the content; on an error nothing is stored.
        """
        if (file := self._read(name)) is not None:
            return file
        with self._locked(name):
            if (file := self._read(name)) is not None:
                return file
            content = make()
            self._write(name, content)
            return content

    def contains(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        return self._path(name).is_file()

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _read(self, name: str) -> memoryview | None:
        path = self._path(name)
        try:
            with open_regular(path, follow_links=False) as file:
                data = memoryview(file.read())
                os.utime(file.fileno())
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            return None
        digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return content if blake3(content).digest() == digest else None

    def _write(self, name: str, content: bytes) -> None:
        path = self._path(name)
        self._make_folder(path.parent)
        with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            file.write(blake3(content).digest())
            file.write(content)
        Path(file.name).replace(path)
        self._num_added_bytes += len(content)
        if self._num_added_bytes >= self._max_bytes * TRIM_CHECK_SHARE:
            self._num_added_bytes = 0
            self._trim()

    def _make_folder(self, folder: Path) -> None:
        """Make a folder in which only this account may write: a file is verified by what it begins
        with, so its writers are trusted.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold one of 256 locks; the system releases it if the process dies."""
        folder = self._folder / "locks"
        self._make_folder(folder)
        with (folder / name[:2]).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _trim(self) -> None:
        files = []
        for path in self._folder.glob("*/*"):
            with suppress(FileNotFoundError):  # another worker trims as well
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self._max_bytes:
            return
        for _, size, path in sorted(files):
            if total <= self._max_bytes * LOW_WATER:
                break
            if path.parent.name != "locks":
                path.unlink(missing_ok=True)
                total -= size
