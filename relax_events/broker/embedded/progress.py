"""How a transfer shows itself on stderr: a bar where a person watches, a few plain lines in a log."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MIB = 1 << 20
_PLAIN_STEP = 0.25


@contextmanager
def transfer_progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a transfer while the block runs.

    Args:
        title: What is transferred.
        total_bytes: The sum that makes it complete.
    Returns:
        A function, safe to call from any thread, that takes the bytes that arrived; negative when a failed part starts again.
    """
    if sys.stderr.isatty():
        with _bar(title, total_bytes) as advance:
            yield advance
    else:
        lines = _Lines(title, total_bytes)
        yield lines.advance


@contextmanager
def _bar(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console  # a tenth of a second that only a watched download pays
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda num_bytes: progress.update(task, advance=num_bytes)


class _Lines:
    """Prints one line at the start and one for each quarter that arrived."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title = title
        self._total_bytes = total_bytes
        self._arrived_bytes = 0
        self._next_ratio = _PLAIN_STEP
        self._lock = threading.Lock()
        print(f"fetching {title}, {total_bytes / _MIB:.1f} MiB", file=sys.stderr, flush=True)

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._arrived_bytes += num_bytes
            ratio = self._arrived_bytes / self._total_bytes
            if ratio >= self._next_ratio:
                print(f"fetched {ratio:.0%} of {self._title}", file=sys.stderr, flush=True)
                self._next_ratio = (ratio // _PLAIN_STEP + 1) * _PLAIN_STEP
