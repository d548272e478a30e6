"""Runs all sandbox escapes, or all tricks, in the isolation that the command line names, and prints
the successful ones as JSON.

It is a program so that it can run as another user and in containers. Its arguments: a kind of
isolation (`chosen`: the one that a reward would use), and `ways` or `tricks`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from escapes import ATTEMPTS, ESCAPES

from relax_events.attacks.forged_verdicts import RIGHT, TESTS
from relax_events.attacks.verdict_tricks import list_tricks
from relax_events.errors import EnvironmentProblem
from relax_events.sandbox import Isolation, Limits, Sandbox, Verdict, isolation, require_isolation
from relax_events.sandbox.inside import entry

KINDS = {
    "bubblewrap": lambda one: one.has_private_root,
    "namespaces": lambda one: one.has_namespaces and not one.has_private_root,
    "landlock": lambda one: not one.has_namespaces,
}
NOTHING, CHOSEN = "nothing", "chosen"
WITH_A_PROCESS = (
    "import subprocess\ndef f(x):\n    return x + 1 + subprocess.run(['true']).returncode\n"
)
SECONDS = {"ways": 100, "tricks": 540}


def walls_of(kind: str) -> Isolation | None:
    """Return the walls of a kind, if this machine has them."""
    return next(
        (one for one in isolation._candidates() if KINDS[kind](one) and isolation._works(one)), None
    )


@contextmanager
def outside() -> Iterator[dict[str, Any]]:
    """Yield resources that no program may reach."""
    with (
        tempfile.TemporaryDirectory() as name,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
    ):
        folder = Path(name)
        for file, mode in (("private", 0o600), ("public", 0o644), ("deletable", 0o666)):
            (folder / file).write_text("TOPSECRET")
            (folder / file).chmod(mode)
        folder.chmod(0o777)
        local.bind(str(folder / "socket"))
        local.listen()
        (folder / "socket").chmod(0o777)
        datagrams, abstract = (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX),
        )
        datagrams.bind(str(folder / "datagrams"))
        (folder / "datagrams").chmod(0o777)
        abstract.bind(f"\0{folder.name}")
        abstract.listen()
        victim = subprocess.Popen(["sleep", "600"])
        os.environ["SECRET_OF_THE_JUDGE"] = "1"
        with datagrams, abstract:
            try:
                yield {
                    **{
                        file: str(folder / file)
                        for file in ("private", "public", "deletable", "socket", "datagrams")
                    },
                    "home": str(Path.home()),
                    "root": [path.name for path in Path("/").iterdir()],
                    "tmp": [path.name for path in Path(tempfile.gettempdir()).iterdir()],
                    "tmp_file": str(folder / "made"),
                    "judge": os.getpid(),
                    "victim": victim.pid,
                    "port": server.getsockname()[1],
                    "udp": 9,
                    "abstract": folder.name,
                    "packages": json.__path__[0],
                    "inside": entry.__file__,
                }
                if (
                    victim.poll() is not None
                    or (folder / "private").read_text() != "TOPSECRET"
                    or not (folder / "deletable").exists()
                ):
                    raise RuntimeError("something outside was changed")
            finally:
                victim.kill()
                victim.wait()


def attempts(behind: Isolation, things: dict[str, Any]) -> list[str]:
    """Try all ways out; return those that led somewhere."""
    with Sandbox(ATTEMPTS, Limits(seconds=60), isolation=behind) as sandbox:
        verdict, printed = sandbox.run_with_input(f"{json.dumps(things)}\n{json.dumps(ESCAPES)}\n")
    lines = printed.splitlines()
    if lines[-1:] != [f"tried {len(ESCAPES)}"]:
        lines.append(f"{verdict} before all were tried")
        return lines
    return lines[:-1]


def tricks(behind: Isolation) -> list[str]:
    """Try all programs that pass without being right; return those that did.

    Raises:
        RuntimeError: One that is right did not pass.
    """
    for program in (RIGHT, WITH_A_PROCESS):
        with Sandbox(program, Limits(seconds=20), isolation=behind) as sandbox:
            if sandbox.run_with_tests(TESTS) is not Verdict.PASSED:
                raise RuntimeError(f"a program that is right did not pass: {program}")
    passed = []
    for trick in list_tricks():
        with Sandbox(trick.program, Limits(seconds=20), isolation=behind) as sandbox:
            if sandbox.run_with_tests(trick.tests) is Verdict.PASSED:
                passed.append(trick.name)
    return passed


def find(kind: str) -> Isolation | None:
    """Return the walls that the command line names.

    Raises:
        EnvironmentProblem: Those that a reward would take are not enough.
    """
    if kind == NOTHING:
        return Isolation()
    return require_isolation() if kind == CHOSEN else walls_of(kind)


def main(kind: str, what: str = "ways") -> None:
    """Run the attempts and print the results."""
    watch = threading.Timer(SECONDS[what], lambda: os._exit(9))
    watch.daemon = True
    watch.start()
    try:
        found = find(kind)
    except EnvironmentProblem as error:
        print(json.dumps({"walls": None, "refused": str(error)}))
    else:
        _try(found, what)
    sys.stdout.flush()
    os._exit(0)


def _try(found: Isolation | None, what: str) -> None:
    if found is None:
        print(json.dumps({"walls": None, "escaped": []}))
    elif what == "tricks":
        print(
            json.dumps(
                {"walls": found.describe(), "tried": len(list_tricks()), "escaped": tricks(found)}
            )
        )
    else:
        with outside() as things:
            print(
                json.dumps(
                    {
                        "walls": found.describe(),
                        "tried": len(ESCAPES),
                        "escaped": attempts(found, things),
                    }
                )
            )
            sys.stdout.flush()
            if found == Isolation():
                os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
