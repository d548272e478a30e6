"""Says how far the reading of a log is, when that takes long."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_SECONDS = 5.0
MAX_INTERVAL_SECONDS = 300.0


class ReadingProgress:
    """Prints a line after five seconds, and then ever more rarely. It is called with the number of
    records that are read and that there are.
    """

    def __init__(
        self,
        print_line: Callable[[str], None],
        *,
        hint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            print_line: Prints a line.
            hint: Advice to a person who waits, printed once.
            clock: Returns seconds.
        """
        self._print_line, self._hint, self._clock = print_line, hint, clock
        self._began = clock()
        self._next, self._interval = self._began + FIRST_SECONDS, FIRST_SECONDS

    def __call__(self, num_read: int, num_records: int) -> None:
        """Print a line if it is time for one."""
        now = self._clock()
        if now < self._next or not 0 < num_read < num_records:
            return
        self._interval = min(2 * self._interval, MAX_INTERVAL_SECONDS)
        self._next = now + self._interval
        left = (now - self._began) * (num_records - num_read) / num_read
        self._print_line(
            f"checking that no sample was lost or trained twice: {num_read / num_records:.0%} of "
            f"{num_records:,} records read, about {_format_seconds(left)} left{self._hint}"
        )
        self._hint = ""


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"
