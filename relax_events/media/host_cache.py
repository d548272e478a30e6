"""Results that all workers of a machine share: files by name, made once, verified, within a bound
of bytes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from blake3 import blake3

DIGEST_BYTES = 32
LOW_WATER = 3 / 4
"""Share of the bound that trimming leaves."""
TRIM_CHECK_SHARE = 1 / 32
"""Share of the bound that one worker adds before it looks at the whole folder: eight workers
together stay within the bound."""


class HostCache:
    """A folder of files; each begins with the BLAKE3 digest of the rest, so that what was torn or
    altered is made again.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Use a folder; it is made when something is put into it.

        Args:
            folder: Of this cache alone.
            max_bytes: Of all files together; when they come near it, those that were read longest
                ago go.
        """
        self._folder, self._max_bytes = folder, max_bytes
        self._num_added_bytes = (
            max_bytes  # so that the first addition looks at what earlier runs have left
        )

    def get(self, name: str, make: Callable[[], bytes]) -> bytes | memoryview:
        """Return what is kept under a name, or make it; a worker that wants what another is making
        waits for that one.

        Args:
            name: Of a file; what is most alike in names stands at their end.
            make: Makes it; what it raises is raised, and nothing is kept.
        """
        if (found := self._read(name)) is not None:
            return found
        with self._locked(name):
            if (found := self._read(name)) is not None:
                return found
            made = make()
            self._write(name, made)
            return made

    def contains(self, name: str) -> bool:
        """Whether something is kept under a name."""
        return self._path(name).is_file()

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _read(self, name: str) -> memoryview | None:
        path = self._path(name)
        try:
            data = memoryview(path.read_bytes())
            os.utime(path)
        except FileNotFoundError:
            return None
        digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return content if blake3(content).digest() == digest else None

    def _write(self, name: str, content: bytes) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            file.write(blake3(content).digest())
            file.write(content)
        Path(file.name).replace(path)
        self._num_added_bytes += len(content)
        if self._num_added_bytes >= self._max_bytes * TRIM_CHECK_SHARE:
            self._num_added_bytes = 0
            self._trim()

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold one of 256 locks; the system frees it if we die."""
        folder = self._folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name[:2]).open("wb") as file:
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
