"""Asks before a change, unless `--yes` was given."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_events.control.runs.taking_over import NotTrusted


def agreed(question: str, *, yes: bool) -> bool:
    """Return whether the change may be made; nobody there to answer means no.

    Args:
        question: What is about to be done, for example `delete 120 records?`.
        yes: The flag `--yes`.
    """
    if yes:
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        print("nobody answers; give --yes", file=sys.stderr)
        return False


def accept_source(refused: NotTrusted, *, trusts: bool) -> None:
    """Show what a log names, and go on if the flag says so or a person on a terminal agrees.

    Raises:
        NotTrusted: Nobody agrees.
    """
    from relax_events.control.runs.taking_over import named_text
    from relax_events.printable import printable

    if not trusts and not sys.stdin.isatty():
        raise refused
    print(printable(f"the log of run {refused.source} names what will be used here:\n{named_text(refused.named)}"), file=sys.stderr)
    if not agreed("take all this over?", yes=trusts):
        raise refused
