"""What runs inside of the sandbox: puts limits on itself, then runs the solution, and tests on it. Standard library alone.

It is started as a file of its own, isolated from everything installed beside Relax Events. Its argument is a JSON object:
`limits` by the names of the resource module, `solution`, a file, and `alive`, a pipe that gets one byte when the limits are in place.
When `has_tests` is set, stdin holds a JSON object with `tests`, a program that sees what the solution defined, and `word`, which is
written to stdout when they have passed. Otherwise stdin and stdout are the solution's own. Exit code 0 is success, 77 a limit that
the solution ran into, everything else a failure.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

LIMIT_EXIT_CODE = 77
PR_SET_PDEATHSIG = 1


def main(setup: dict[str, Any]) -> None:
    """Run the solution under its limits."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing outlives whoever judges it
    for name, limit in setup["limits"].items():
        _limit(getattr(resource, name), limit)
    os.write(setup["alive"], b"1")
    try:
        if setup["has_tests"]:
            _run_with_tests(setup["solution"])
        else:
            runpy.run_path(setup["solution"], run_name="__main__")
    except MemoryError:
        os._exit(LIMIT_EXIT_CODE)
    except OSError as error:
        os._exit(LIMIT_EXIT_CODE if error.errno in (errno.EAGAIN, errno.ENOMEM) else 1)


def _limit(kind: int, wanted: int) -> None:
    """Set a limit; where one stands that is lower, keep it."""
    _, hard = resource.getrlimit(kind)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


def _run_with_tests(solution: str) -> None:
    # The tests and the word are read when the solution has run, so it cannot leave early and seem to have passed.
    question, verdict, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    defined = runpy.run_path(solution, run_name="solution")
    with os.fdopen(question, "rb") as file:
        asked = json.load(file)
    Path("tests.py").write_text(asked["tests"])
    runpy.run_path("tests.py", init_globals=defined, run_name="tests")
    os.write(verdict, asked["word"].encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
