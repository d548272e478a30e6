"""Read the end of a broker's log, once or as it grows."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

_TAIL_BYTES = 256 << 10
_PAUSE_SECONDS = 0.25


def last_lines(path: Path, *, num_lines: int, start_byte: int = 0, end_byte: int | None = None) -> list[str]:
    """Return the last lines of a part of a log, from that part's last 256 KiB at most; empty when there is no file."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END) if end_byte is None else end_byte
            begin = file.seek(max(start_byte, end - _TAIL_BYTES))
            lines = file.read(max(0, end - begin)).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return lines[-num_lines:] if num_lines > 0 else []


def follow_lines(path: Path, *, start_byte: int, ended_within: Callable[[float], bool]) -> Iterator[str]:
    """Yield the lines that are added to a log until its writer ends; a last line without line end comes as it is.

    A growing file calls nobody, so this looks again after each short wait for the end of the writer.

    Args:
        path: The log.
        start_byte: Where to begin.
        ended_within: Waits so many seconds for the end of the writer, and tells whether it came.
    """
    rest = ""
    with path.open("r", encoding="utf-8", errors="replace") as file:
        file.seek(start_byte)
        ended = False
        while not ended:
            ended = ended_within(_PAUSE_SECONDS)
            *lines, rest = (rest + file.read()).split("\n")
            yield from lines
    if rest:
        yield rest
