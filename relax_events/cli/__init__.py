"""The `relax` command."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line and exit with its code. An interrupt while its modules are imported ends
    the process at once, without a traceback.
    """
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    from relax_events.cli.entry import run_command

    run_command(on_interrupt)
