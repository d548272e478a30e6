"""Finds the isolation that this machine offers by trying it, and refuses insufficient isolation."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from relax_events.errors import EnvironmentProblem, RewardError
from relax_events.sandbox.inside import landlock, seccomp
from relax_events.sandbox.isolation import Isolation, list_interpreter_folders
from relax_events.sandbox.runner import Limits, Verdict
from relax_events.sandbox.sandbox import Sandbox

PROBE_SECONDS = 20.0
FIRST_SPARE_USER, NUM_SPARE_USERS = 61_000, 4_000
PROBE = "import decimal, json, statistics\nprint('here')\n"
KEEP_CAPABILITIES = "--keep-caps"
"""In the user namespace: the first process inside needs them to mount, and drops them before it
runs a program."""
SYSTEM_PYTHON = "/usr/bin/python3"
"""The interpreter to try when the program's user can't access ours."""
NAMESPACES = ("--net", "--pid", "--ipc", "--fork", "--kill-child")
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID")
"""The capabilities that root needs to run programs as another user, to end them and to delete their
files."""
ALLOW_UNPROTECTED = "reward.options.allow_unprotected = true"


@cache
def find_isolation() -> Isolation:
    """Return the strongest isolation in which a test program runs on this machine.

    Raises:
        EnvironmentProblem: The interpreter does not start in any isolation.
    """
    isolation = next((candidate for candidate in _candidates() if _works(candidate)), None)
    if isolation is None:
        as_root = (
            "run it as a user other than root, or give it the capabilities "
            f"{', '.join(CAPABILITIES)}"
        )
        remedy = as_root if os.geteuid() == 0 else "install bubblewrap"
        raise EnvironmentProblem(
            f"no program can be isolated here: {sys.executable} does not start in any "
            f"isolation; {remedy}"
        )
    return isolation


def require_isolation(*, allow_unprotected: bool = False) -> Isolation:
    """Return this machine's isolation if it is sufficient for a program that a model wrote.

    Args:
        allow_unprotected: Accept insufficient isolation: the program may then read the account's
            files, or use the network.
    Raises:
        EnvironmentProblem: The isolation is insufficient, or there is none.
    """
    isolation = find_isolation()
    if isolation.is_sufficient or allow_unprotected is True:  # also of a caller that is not typed
        return isolation
    is_isolated_from = {
        "files (requires bubblewrap or Landlock)": isolation.guards_files,
        "the network (requires seccomp or namespaces)": isolation.guards_network,
        "other processes (requires seccomp or namespaces)": isolation.guards_processes,
    }
    missing = " and ".join(
        name for name, is_isolated in is_isolated_from.items() if not is_isolated
    )
    raise EnvironmentProblem(
        f"programs that a model wrote can't run here: nothing isolates them from {missing}. "
        "Install bubblewrap, use a kernel with Landlock (5.13 or"
        " newer) and, in a container, a seccomp profile that lets Landlock through, as "
        "Docker's own does, or accept the risk, on a machine "
        f"without valuable data, with {ALLOW_UNPROTECTED}"
    )


def _candidates() -> list[Isolation]:
    is_root = os.geteuid() == 0
    user = FIRST_SPARE_USER + os.getpid() % NUM_SPARE_USERS if is_root else None
    landlock_version, filters = landlock.version(), platform.machine() in seccomp.ARCHITECTURES
    unshare = ("unshare", *(() if is_root else ("--user", "--map-current-user")), *NAMESPACES)
    with_mounts = (*unshare, "--mount-proc", *(() if is_root else (KEEP_CAPABILITIES,)))
    pythons = [
        python
        for python in dict.fromkeys([sys.executable, SYSTEM_PYTHON])
        if os.access(python, os.X_OK)
    ]
    binds = tuple(
        (folder, f"python-{number}")
        for number, folder in enumerate(list_interpreter_folders())
        if user is not None and not _is_world_accessible(folder)
    )
    candidates: list[Isolation] = []
    if (
        (bwrap := shutil.which("bwrap")) and not is_root
    ):  # run by root, its programs stay root, and process limits do not apply to root
        candidates.append(
            Isolation(
                (bwrap,),
                has_namespaces=True,
                has_private_root=True,
                landlock=landlock_version,
                filters=filters,
            )
        )
    for command in dict.fromkeys((with_mounts, (*unshare, "--mount-proc"), unshare, ())):
        used_binds = binds if "--mount-proc" in command else ()
        candidates += [
            Isolation(
                command,
                bool(command),
                has_own_files=command == with_mounts,
                landlock=landlock_version,
                filters=filters,
                user=user,
                python=python,
                binds=used_binds,
            )
            for python in pythons
        ]
    return candidates


def _is_world_accessible(folder: str) -> bool:
    """Return whether other users can access a folder."""
    path = Path(folder).resolve()
    return all(one.stat().st_mode & 0o001 for one in (path, *path.parents))


def _works(isolation: Isolation) -> bool:
    """Return whether a test program can import and print in this isolation."""
    try:
        with Sandbox(PROBE, Limits(seconds=PROBE_SECONDS), isolation=isolation) as sandbox:
            return sandbox.run_with_input("") == (Verdict.PASSED, "here\n")
    except (OSError, EnvironmentProblem, RewardError, subprocess.SubprocessError):
        return False
