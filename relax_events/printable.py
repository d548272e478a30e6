"""Text of strangers for a terminal: control characters and those that turn the direction of writing
are shown, not obeyed.
"""

from __future__ import annotations

from typing import Any, TextIO

CONTROLS = [*range(0x20), 0x7F, *range(0x80, 0xA0)]
DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
KEPT = frozenset({0x09, 0x0A})
SHOWN = {number: f"\\u{number:04x}" for number in [*CONTROLS, *DIRECTIONS] if number not in KEPT}
"""In the form that is right in JSON, too."""


def printable(text: str) -> str:
    """Return a text with control characters as escapes; line ends and tabs stay."""
    return text.translate(SHOWN)


class PrintableStream:
    """A text stream to which everything is written as `printable`; what draws on a terminal itself
    takes `terminal`.
    """

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal

    def write(self, text: str) -> int:
        """Write a text."""
        return self.terminal.write(printable(text))

    def writelines(self, lines: list[str]) -> None:
        """Write several."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)
