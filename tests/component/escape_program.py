"""Runs all sandbox escapes, or all tricks, in the isolation that the command line names, and prints
the successful ones as JSON.

It is a program so that it can run as another user and in containers. Its arguments: a kind of
isolation (`chosen`: the one that a reward would use), and `ways`, `tricks` or `limits`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from relax_events.attacks.escapes import ESCAPES, Layer
from relax_events.attacks.forged_verdicts import RIGHT, TESTS
from relax_events.attacks.isolation_check import try_escapes
from relax_events.attacks.limits import FILE_LIMITS
from relax_events.attacks.targets import create_targets
from relax_events.attacks.verdict_tricks import list_tricks
from relax_events.errors import EnvironmentProblem
from relax_events.sandbox import (
    Isolation,
    Limits,
    Sandbox,
    Verdict,
    isolation,
    probing,
    require_isolation,
)

KINDS = {
    "bubblewrap": lambda one: one.has_private_root,
    "namespaces": lambda one: one.has_namespaces and not one.has_private_root,
    "landlock": lambda one: not one.has_namespaces,
}
WEAKENED: dict[str, Callable[[Isolation], Isolation]] = {
    **{
        f"landlock {version}": lambda one, version=version: dataclasses.replace(
            one, landlock=min(version, one.landlock)
        )
        for version in range(1, 6)
    },
    "landlock alone": lambda one: dataclasses.replace(one, filters=False),
    "filter alone": lambda one: dataclasses.replace(one, landlock=0),
}
"""Changes to Landlock with a filter: as on an older kernel, or with one of the two only."""
COUNTED = "namespaces, files counted"
"""Namespaces in which nothing can be mounted."""
LAYERS = {"landlock alone": Layer.FILES, "filter alone": Layer.CALLS}
"""The layer whose escapes a single one must stop; an isolation of one layer is refused."""
WITHOUT_SANDBOX_LEFT_OUT = {"kernel: new privileges"}
"""Escapes that end the attempts if nothing isolates them: a program of another user can't be
counted."""
NOTHING, CHOSEN = "nothing", "chosen"
WITH_A_PROCESS = (
    "import subprocess\ndef f(x):\n    return x + 1 + subprocess.run(['true']).returncode\n"
)
MODEST = """
import os, time
for n in range(20):
    file = os.open('file', os.O_CREAT | os.O_RDWR)
    os.unlink('file')
    os.posix_fallocate(file, 0, 1_000_000)
    open(f'file{n}', 'w').close()
time.sleep(1)
print('held')
"""
"""Takes less than the limits, and runs until its files have been counted."""
SECONDS = {"ways": 200, "tricks": 540, "limits": 540}


def walls_of(kind: str) -> Isolation | None:
    """Return the walls of a kind, if this machine has them."""
    if kind == COUNTED:
        mounted = walls_of("namespaces")
        return mounted and dataclasses.replace(mounted, has_own_files=False)
    if kind in WEAKENED:
        both = walls_of("landlock")
        return WEAKENED[kind](both) if both is not None and both.is_sufficient else None
    return next(
        (one for one in probing._candidates() if KINDS[kind](one) and probing._works(one)), None
    )


def attempts(kind: str, behind: Isolation) -> tuple[int, list[str]]:
    """Try the escapes that a kind of walls stops; return how many, and those that succeeded."""
    layers = [LAYERS[kind]] if kind in LAYERS else [*Layer]
    codes = {
        name: escape.code
        for name, escape in ESCAPES.items()
        if escape.layer in layers and (kind != NOTHING or name not in WITHOUT_SANDBOX_LEFT_OUT)
    }
    with create_targets() as targets:
        # like an account's packages: files of the account that programs may read
        readable = str(Path(targets.outside["readable"]).parent)
        isolation.SYSTEM_FOLDERS = (*isolation.SYSTEM_FOLDERS, readable)
        return len(codes), [
            *try_escapes(behind, codes, targets.outside),
            *targets.list_changes(),
        ]


def limits(behind: Isolation) -> list[str]:
    """Run programs that take too many files; return those that were let.

    Raises:
        RuntimeError: A program that takes fewer was not let.
    """
    passed = []
    with Sandbox(MODEST, Limits(seconds=120), isolation=behind) as sandbox:
        if (ending := sandbox.run_with_input("")) != (Verdict.PASSED, "held\n"):
            raise RuntimeError(f"a program that keeps the limits on files ended with {ending}")
    for name, program in FILE_LIMITS.items():
        bounds = Limits(seconds=120, memory_bytes=256 * 1024**2)
        with Sandbox(program, bounds, isolation=behind) as sandbox:
            if sandbox.run_with_input("")[0] is not Verdict.OUT_OF_LIMITS:
                passed.append(name)
        if sandbox._folder.exists():
            passed.append(f"{name}: files are left")
    return passed


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
        _try(kind, found, what)
    sys.stdout.flush()
    os._exit(0)


def _try(kind: str, found: Isolation | None, what: str) -> None:
    if found is None:
        print(json.dumps({"walls": None, "escaped": []}))
    elif what == "tricks":
        print(
            json.dumps(
                {"walls": found.describe(), "tried": len(list_tricks()), "escaped": tricks(found)}
            )
        )
    elif what == "limits":
        print(
            json.dumps(
                {"walls": found.describe(), "tried": len(FILE_LIMITS), "escaped": limits(found)}
            )
        )
    else:
        tried, escaped = attempts(kind, found)
        print(json.dumps({"walls": found.describe(), "tried": tried, "escaped": escaped}))


if __name__ == "__main__":
    main(*sys.argv[1:])
