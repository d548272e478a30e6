"""A process's turn on a device that several processes of a machine use in turn.

The turn is a lock on a file: the trainer's alone, or shared by engines. The kernel gives it to the
next process when its holder dies, at whatever instruction, so nothing has to be detected or
repaired.

A process that wants the device alone locks a second file first, and keeps the lock until its turn
ends. Others pass this lock before they take the first, so they can't overtake a process that
waits, and the processes whose turn it is can see that they are to leave.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Names the running kernel, which is what two processes must share: a folder may be another
machine's too."""
WANTED_SUFFIX = ".wanted"
"""Of the second file."""
_open_files: set[int] = set()


def turn_files() -> tuple[int, ...]:
    """Return the open files of this process's turns. A child that inherits them, because it works
    on the device too, prolongs a turn until both processes have ended.
    """
    return tuple(_open_files)


class DeviceTurn:
    """Asked for and ended by one thread; a thread of its own waits for the lock."""

    def __init__(self, path: Path, *, alone: bool) -> None:
        """Start without the turn.

        Args:
            path: The lock's file, the same for all processes on the device.
            alone: Whether no other process may have a turn at the same time.
        """
        self._path, self._alone = path, alone
        self._asked_for: threading.Event | None = None
        self._file: int | None = None
        self._wanted_file: int | None = None

    def ask(self, on_begin: Callable[[], None] = lambda: None) -> bool:
        """Ask for the turn, unless it was asked for; return whether it has begun.

        Args:
            on_begin: Called from another thread when it begins.
        """
        if self._asked_for is None:
            if self._file is None or self._wanted_file is None:
                self._file = self._open(self._path)
                self._wanted_file = self._open(
                    self._path.with_suffix(WANTED_SUFFIX), is_inherited=False
                )
            self._asked_for = begun = threading.Event()
            arguments = (self._file, self._wanted_file, begun, on_begin)
            threading.Thread(
                target=self._wait_for_lock, args=arguments, name="device-turn", daemon=True
            ).start()
        return self._asked_for.is_set()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for a turn that was asked for; return whether it has begun."""
        return self.ask() or bool(self._asked_for and self._asked_for.wait(timeout_seconds))

    @property
    def has_begun(self) -> bool:
        """Whether this process may use the device."""
        return self._asked_for is not None and self._asked_for.is_set()

    def is_wanted(self) -> bool:
        """Return whether, in a shared turn, another process waits to have the device alone."""
        if not self.has_begun or self._wanted_file is None:
            return False
        try:
            fcntl.flock(self._wanted_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._wanted_file, fcntl.LOCK_UN)
        return False

    def end(self) -> None:
        """End a turn that has begun; does nothing without one."""
        if self.has_begun:
            assert self._file is not None, "a turn has a file"
            assert self._wanted_file is not None, "and a second one"
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a child may have the file open
            fcntl.flock(self._wanted_file, fcntl.LOCK_UN)
            self._asked_for = None

    def _open(self, path: Path, *, is_inherited: bool = True) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if is_inherited:
            _open_files.add(file)
        weakref.finalize(self, _close, file)
        return file

    def _wait_for_lock(
        self, file: int, wanted_file: int, begun: threading.Event, on_begin: Callable[[], None]
    ) -> None:
        kind = fcntl.LOCK_EX if self._alone else fcntl.LOCK_SH
        fcntl.flock(wanted_file, kind)
        fcntl.flock(file, kind)
        if not self._alone:
            fcntl.flock(wanted_file, fcntl.LOCK_UN)
        begun.set()
        on_begin()


def _close(file: int) -> None:
    _open_files.discard(file)
    os.close(file)


def lock_path(folder: Path, device: str) -> Path:
    """Return the file that is locked for a device of this machine.

    Args:
        folder: Of the run's devices.
        device: Its name, the same in all processes.
    """
    boot = BOOT_ID.read_text().strip()[:8] if BOOT_ID.exists() else os.uname().nodename
    return folder / f"{boot}-{device}.lock"
