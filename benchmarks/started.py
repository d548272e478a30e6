"""What `benchmarks.starting` starts in place of a worker: it imports the modules that it gets, says
so, and waits to be killed."""

from __future__ import annotations

import importlib
import signal
import sys


def main(modules: list[str]) -> None:
    """Import, say so, wait."""
    for module in modules:
        importlib.import_module(module)
    print("up", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
