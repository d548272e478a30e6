"""The `relax` command. This file imports nothing heavy: each command loads what it needs when it is called."""

from __future__ import annotations

import os
import sys

from relax_events.cli.commands import HELP_FLAGS, help_text
from relax_events.errors import RelaxError

INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit with its code; an error of ours is one text on stderr, never a traceback."""
    if sys.argv[1:] == [] or (len(sys.argv) == 2 and sys.argv[1] in HELP_FLAGS):
        print(help_text())
        sys.exit(0)
    try:
        result = _called()
    except RelaxError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if sys.argv[1:2] == ["worker"]:  # a client that was left open has kept the interpreter from ever ending, its broker's name being gone
            os._exit(error.exit_code)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(result if isinstance(result, int) else 0)


def _called() -> object:
    if sys.argv[1:] == ["health"]:  # asked so often that the parser would be most of its cost
        from relax_events.cli.health import health

        health()
        return None
    import structlog

    from relax_events.cli.app import app

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for data
    return app()
