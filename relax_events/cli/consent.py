"""Asks before a change, unless `--yes` was given."""

from __future__ import annotations

import sys


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
