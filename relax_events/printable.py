"""Escapes control and text-direction characters in untrusted text before it reaches a terminal."""

from __future__ import annotations

import io
import os
from typing import Any, TextIO

CONTROLS = [*range(0x20), 0x7F, *range(0x80, 0xA0)]
DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
KEPT = frozenset({0x09, 0x0A})
SHOWN = {number: f"\\u{number:04x}" for number in [*CONTROLS, *DIRECTIONS] if number not in KEPT}
"""Replacement by code point, in a form that is also valid in JSON."""


def printable(text: str) -> str:
    """Return the text with control characters escaped, except line ends and tabs."""
    return text.translate(SHOWN)


def write_line(text: str, stream: TextIO | int) -> bool:
    """Write a line past all buffers and return whether it was written whole.

    A full disk or a closed pipe raises nothing: what is written so may never end a process, and no
    buffer keeps it, whose flush at the interpreter's end would change the exit code.

    Args:
        text: The line without its end.
        stream: A text stream, or the descriptor of an open file.
    """
    try:
        fd = stream if isinstance(stream, int) else stream.fileno()
    except (AttributeError, io.UnsupportedOperation):  # a stream in memory
        assert not isinstance(stream, int)
        stream.write(f"{text}\n")
        return True
    data = f"{text}\n".encode(errors="backslashreplace")
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True


class PrintableStream:
    """A text stream that writes everything through `printable`; code that controls the terminal
    itself uses `terminal`.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal

    def write(self, text: str) -> int:
        """Write a text."""
        return self.terminal.write(printable(text))

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)
