"""The thread of a process that reads, writes and watches all its children.

    any thread --post--> inbox --> select over the pipes of all children, until the next deadline
                                     | answers, losses --> on_done of each request

One thread serves all pools, and lives as long as the process: a child is killed when the thread
that started it ends.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

from relax_events.confinement.child import Child
from relax_events.privileges import hide_process

log = structlog.get_logger()
WRITE, READ = selectors.EVENT_WRITE, selectors.EVENT_READ


class ChildOwner(Protocol):
    """What the driver calls for the children of a pool."""

    def read_answers(self, child: Child) -> None:
        """Answers of a child have arrived."""

    def find_deadline(self) -> float | None:
        """Return the next deadline of its children."""

    def end_late_children(self, now: float) -> None:
        """End the children that missed their deadline."""


class Driver:
    """See the module's docstring."""

    def __init__(self) -> None:
        """Start the thread."""
        self._selector = selectors.DefaultSelector()
        self._inbox: deque[Callable[[], None]] = deque()
        self._owners: dict[ChildOwner, None] = {}
        self._wake_end, self._wake_begin = os.pipe()
        os.set_blocking(self._wake_begin, False)
        self._selector.register(self._wake_end, READ, None)
        self._thread = threading.Thread(target=self._run, name="children", daemon=True)
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def post(self, work: Callable[[], None]) -> None:
        """Run something in the thread."""
        self._inbox.append(work)
        try:  # each time: the thread may have seen an empty inbox just before
            os.write(self._wake_begin, b"\0")
        except BlockingIOError:
            return

    def watch(self, child: Child, owner: ChildOwner) -> None:
        """Serve a child's pipes from now on."""
        self._owners[owner] = None
        self._selector.register(child.stdout, READ, (owner.read_answers, child))
        self._selector.register(child.stderr, READ, (self._read_prints, child))
        self.watch_writing(child)

    def watch_writing(self, child: Child) -> None:
        """Wait for room in a child's pipe while bytes wait for it."""
        is_watched = child.stdin in self._selector.get_map()
        if child.has_outgoing and not is_watched:
            self._selector.register(child.stdin, WRITE, (self._write, child))
        elif not child.has_outgoing and is_watched:
            self._selector.unregister(child.stdin)

    def forget(self, child: Child) -> None:
        """Stop to serve a child."""
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)

    def forget_owner(self, owner: ChildOwner) -> None:
        """Stop to serve a pool."""
        self._owners.pop(owner, None)

    def _write(self, child: Child) -> None:
        child.write()
        self.watch_writing(child)

    def _read_prints(self, child: Child) -> None:
        if not child.read_prints():
            self._selector.unregister(child.stderr)

    def _run(self) -> None:
        while True:
            try:
                self._step()
            except Exception:  # a defect in one pool must not end the children of all
                log.exception("child_processes.failed")

    def _step(self) -> None:
        for key, _ in self._selector.select(self._seconds_left()):
            if key.data is None:
                os.read(self._wake_end, 4096)
            elif self._selector.get_map().get(key.fd) == key:  # no earlier event closed it
                handle, child = key.data
                handle(child)
        while self._inbox:
            self._inbox.popleft()()
        # after reading, so that a delay of this process does not count as a child's
        now = time.monotonic()
        for owner in list(self._owners):
            owner.end_late_children(now)

    def _seconds_left(self) -> float | None:
        if self._inbox:
            return 0.0
        deadlines = [
            deadline for owner in self._owners if (deadline := owner.find_deadline()) is not None
        ]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


_lock = threading.Lock()
_drivers: dict[int, Driver] = {}


def find_driver() -> Driver:
    """Return this process's driver; it is started at the first call, which hides the process from
    its children.
    """
    with _lock:
        driver = _drivers.get(os.getpid())
        if driver is None:
            hide_process()
            _drivers.clear()  # of the process that this one was forked from
            driver = _drivers[os.getpid()] = Driver()
        return driver
