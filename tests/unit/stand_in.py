"""A program that replaces a worker: `python -m tests.unit.stand_in ACTION`."""

from __future__ import annotations

import json
import os
import signal
import sys

from relax_events.telemetry.final_error import write_final_error


def main(action: str, *words: str) -> None:
    """Perform an action of the test."""
    if action == "show":
        seen = {
            "arguments": sys.argv[1:],
            "environment": dict(os.environ),
            "input": os.read(0, 1).decode(),
        }
        seen |= {
            "group": os.getpgid(0),
            "session": os.getsid(0),
            "modules": {name: name in sys.modules for name in words},
        }
        print(json.dumps(seen))
    elif action == "end":
        if words[0] == "misread":
            print(
                (
                    "python: rdbuf.c:1115: rd_slice_narrow_copy: Assertion "
                    "`rd_slice_abs_offset(new_slice) <= new_slice->end' failed."
                ),
                flush=True,
            )
            os.abort()
        print("error: the reason")
        if not words[0].isdecimal():
            write_final_error(type(words[0], (Exception,), {})("no room for 7.42 GiB"), exit_code=1)
        sys.exit(int(words[0]) if words[0].isdecimal() else 1)
    elif action == "drain":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        print("up", flush=True)
        signal.sigwait({signal.SIGTERM})
    elif action == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
