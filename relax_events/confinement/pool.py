"""Child processes that answer requests: each has a deadline, and a child that hangs, grows, crashes
or breaks the protocol costs the request that it ran, and no other.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from threading import Event
from typing import Any, Self

from relax_events.confinement.child import Child
from relax_events.confinement.frames import Buffer
from relax_events.confinement.pool_state import PoolState
from relax_events.confinement.requests import ChildLost, Reply, Request, Result
from relax_events.confinement.settings import ChildSettings

KILL_SECONDS = 10.0


class ChildPool:
    """Children of one entry point. Thread-safe; a child starts with the first request that needs
    it, and ends with this process, with the pool, or when the pool is garbage.
    """

    def __init__(self, settings: ChildSettings) -> None:
        """Start no child yet."""
        self._state = PoolState(settings)
        self._finalizer = weakref.finalize(self, _close, self._state, 0.0)
        self._finalizer.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running children."""
        return [slot.child.pid for slot in self._state.slots if slot.child is not None]

    def start(self) -> list[dict[str, Any]]:
        """Start all children; return what each says when it is loaded.

        Raises:
            ChildLost: One can't be loaded; kind `unloaded` has the reason in its `ending`.
        """
        started: list[Future[dict[str, Any]]] = [Future() for _ in self._state.slots]
        self._state.driver.post(lambda: self._state.start(started))
        return [future.result() for future in started]

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; each calls its `on_done` once."""
        self._state.driver.post(lambda: self._state.submit(requests))

    def call(
        self,
        head: Mapping[str, Any],
        contents: Sequence[Buffer] = (),
        *,
        seconds: float,
        slot: int | None = None,
        child: int | None = None,
    ) -> Future[Reply]:
        """Queue a request, and return the future of its answer; it raises `ChildLost`."""
        future: Future[Reply] = Future()
        future.set_running_or_notify_cancel()

        def finish(result: Result) -> None:
            if isinstance(result, ChildLost):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.submit(
            [
                Request(
                    head=head,
                    contents=contents,
                    seconds=seconds,
                    on_done=finish,
                    slot=slot,
                    child=child,
                )
            ]
        )
        return future

    def restart(self) -> list[dict[str, Any]]:
        """Replace all children; return and raise as `start`."""
        self._state.driver.post(self._state.end_children)
        return self.start()

    def close(self, *, exit_seconds: float = 0.0) -> None:
        """End all children; requests that wait or run fail.

        Args:
            exit_seconds: Time for the children to exit by themselves, once their requests end.
        """
        if self._finalizer.detach() is not None:
            _close(self._state, exit_seconds)


def _close(state: PoolState, exit_seconds: float) -> None:
    """Take the children from the driver, then end them in the caller's thread."""
    if not state.is_used:
        state.close()
        return
    driver = state.driver
    are_taken = Event()
    children: list[Child] = []

    def take() -> None:
        children.extend(state.close())
        are_taken.set()

    if driver.is_current_thread:
        take()
    else:
        driver.post(take)
        are_taken.wait(KILL_SECONDS)
    deadline = time.monotonic() + exit_seconds
    for child in children:
        child.end(exit_seconds=max(0.0, deadline - time.monotonic()))
