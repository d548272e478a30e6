"""Whether a replica may take memory of a device: it opens no engine while others use the device."""

from __future__ import annotations

import threading
import time


class OpeningGate:
    """Between a replica's thread, which opens engines, and its router, which ends the use of the
    device.
    """

    def __init__(self) -> None:
        """Start open, with nothing on the device."""
        self._changed = threading.Condition()
        self._is_held = self._is_closing = self._is_used = False

    def enter(self, *, pause_seconds: float) -> bool:
        """Wait before an engine is opened, and for as long as none may be; return False if the gate
        is closed. The replica has nothing on the device meanwhile.
        """
        until = time.monotonic() + pause_seconds
        self.leave()
        with self._changed:
            while not self._is_closing:
                left = until - time.monotonic()
                if not self._is_held and left <= 0:
                    self._is_used = True
                    return True
                self._changed.wait(None if self._is_held else left)
            return False

    @property
    def is_held(self) -> bool:
        """Whether no engine may be on the device."""
        with self._changed:
            return self._is_held

    def use(self) -> None:
        """Count the device as used."""
        self._set_used(True)

    def leave(self) -> None:
        """Count the device as not used."""
        self._set_used(False)

    def hold(self) -> None:
        """Let no engine be opened; an engine that is being opened then has to free its memory."""
        self._set_held(True)

    def release(self) -> None:
        """Let engines be opened again."""
        self._set_held(False)

    def wait_until_left(self) -> None:
        """Wait until the device is not used; what uses it has deadlines."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_used)

    def close(self) -> None:
        """Let `enter` return for good."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _set_used(self, value: bool) -> None:
        with self._changed:
            self._is_used = value
            self._changed.notify_all()

    def _set_held(self, value: bool) -> None:
        with self._changed:
            self._is_held = value
            self._changed.notify_all()
