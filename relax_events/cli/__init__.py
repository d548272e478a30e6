"""The `relax` command. This file imports nothing heavy: each command loads what it needs when it is called."""

from __future__ import annotations

import sys

from relax_events.cli.commands import HELP_FLAGS, help_text
from relax_events.errors import RelaxError

INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit with its code; an error of ours is one text on stderr, never a traceback."""
    if sys.argv[1:] == [] or (len(sys.argv) == 2 and sys.argv[1] in HELP_FLAGS):
        print(help_text())
        sys.exit(0)
    import structlog

    from relax_events.cli.app import app

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for data
    try:
        result = app()
    except RelaxError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(result if isinstance(result, int) else 0)
