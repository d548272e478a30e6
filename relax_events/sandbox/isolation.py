"""Finds the isolation that this machine offers by trying it, and refuses insufficient isolation.

Files are isolated by bubblewrap (a private root) or Landlock. The network, other processes and
risky system calls are isolated by a seccomp filter, and by namespaces if available. Landlock and
seccomp need no privileges and work in containers.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import orjson

from relax_events.errors import EnvironmentProblem, RewardError
from relax_events.sandbox import inside
from relax_events.sandbox.inside import landlock, seccomp

ENTRY = Path(inside.__file__).parent / "entry.py"
SYSTEM_PYTHON = "/usr/bin/python3"
"""The interpreter to try when the program's user can't access ours."""
PROBE_SECONDS = 20.0
FIRST_SPARE_USER, NUM_SPARE_USERS = 61_000, 4_000
KEEP_CAPABILITIES = "--keep-caps"
"""In the user namespace: the first process inside needs them to mount, and drops them before it
runs a program."""
NAMESPACES = ("--net", "--pid", "--ipc", "--fork", "--kill-child")
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/zero", "/dev/urandom", "/dev/random")
PROBE = "import decimal, json, statistics\nprint('here')\n"
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID")
"""The capabilities that root needs to run programs as another user, to end them and to delete their
files."""
ALLOW_UNPROTECTED = "reward.options.allow_unprotected = true"


@dataclass(frozen=True, slots=True)
class Isolation:
    """The isolation of a program."""

    command: tuple[str, ...] = ()
    """The command that enters namespaces."""
    has_namespaces: bool = False
    """Whether the program has its own network, process and IPC namespaces."""
    has_private_root: bool = False
    """Whether the program has a private root, created by bubblewrap."""
    has_own_files: bool = False
    """Whether the program's folder is a file system of its own, whose size the kernel limits."""
    landlock: int = 0
    """The version of Landlock that restricts file access; 0 when it is not used."""
    filters: bool = False
    """Whether a seccomp filter refuses system calls."""
    user: int | None = None
    """The user to switch to, if we are root."""
    python: str = sys.executable
    binds: tuple[tuple[str, str], ...] = ()
    """Interpreter folders that the user can't access, each with the ending that the name of the
    program's folder gets for its mount point."""

    @property
    def guards_files(self) -> bool:
        """Whether the program is denied access to this machine's files."""
        return self.has_private_root or self.landlock > 0

    @property
    def guards_network(self) -> bool:
        """Whether the program is denied access to the network."""
        return self.has_namespaces or self.filters

    @property
    def guards_processes(self) -> bool:
        """Whether the program is denied access to other processes."""
        return self.has_namespaces or self.filters

    @property
    def may_signal(self) -> bool:
        """Whether the program may send signals, because they can't reach other processes."""
        return self.has_namespaces or self.landlock >= landlock.SCOPE_VERSION

    @property
    def keeps_files(self) -> bool:
        """Whether a program may leave files outside its folder, in a private root's temporary
        folders.
        """
        return self.has_private_root and not self.landlock

    @property
    def is_sufficient(self) -> bool:
        """Whether an untrusted program may run in it."""
        return self.guards_files and self.guards_network and self.guards_processes

    def describe(self) -> str:
        """Describe the isolation in one line."""
        parts = {
            "a private root by bubblewrap": self.has_private_root,
            f"Landlock (version {self.landlock})": self.landlock > 0,
            "a seccomp filter": self.filters,
            "namespaces": self.has_namespaces,
            "a file system of its own": self.has_own_files,
            f"user {self.user}": self.user is not None,
        }
        return ", ".join(name for name, is_active in parts.items() if is_active) or "nothing"


def list_readable_paths(isolation: Isolation, folder: Path) -> list[str]:
    """Return the paths that a program may read and run: system software and the interpreter with
    its packages.
    """
    return [
        *SYSTEM_FOLDERS,
        *SYSTEM_FILES,
        *DEVICES,
        *list_interpreter_folders(),
        str(ENTRY.parent),
        *(target for _, target in list_binds(isolation, folder)),
    ]


def list_binds(isolation: Isolation, folder: Path) -> list[tuple[str, str]]:
    """Return the interpreter folders that the program's user can't access, with their mount
    points.
    """
    return [(source, f"{folder}-{name}") for source, name in isolation.binds]


def list_interpreter_folders() -> list[str]:
    """Return the folders of our interpreter, its standard library and its packages."""
    return list(
        dict.fromkeys(
            [
                sys.base_prefix,
                sys.base_exec_prefix,
                sysconfig.get_path("purelib"),
                sysconfig.get_path("platlib"),
            ]
        )
    )


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
    from relax_events.sandbox.runner import Limits, Verdict
    from relax_events.sandbox.sandbox import Sandbox

    try:
        with Sandbox(PROBE, Limits(seconds=PROBE_SECONDS), isolation=isolation) as sandbox:
            return sandbox.run_with_input("") == (Verdict.PASSED, "here\n")
    except (OSError, EnvironmentProblem, RewardError, subprocess.SubprocessError):
        return False


def build_bubblewrap_command(isolation: Isolation, *, folder: Path) -> list[str]:
    """Return the bubblewrap command for a private root: system software, the interpreter, and one
    writable folder.
    """
    arguments = [
        *isolation.command,
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]  # noqa: S108 inside
    for path in dict.fromkeys(
        [*SYSTEM_FOLDERS, *SYSTEM_FILES, *list_interpreter_folders(), str(ENTRY.parent), sys.prefix]
    ):
        if Path(path).is_symlink():
            arguments += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).exists():
            arguments += ["--ro-bind", path, path]
    return [*arguments, "--bind", str(folder), str(folder), "--chdir", str(folder), "--"]


def build_setup(
    isolation: Isolation,
    *,
    folder: Path,
    limits: dict[str, int],
    processes: int,
    own_files: tuple[int, int],
    control: int,
) -> str:
    """Return the JSON configuration of the first process inside."""
    setup: dict[str, object] = {
        "limits": limits,
        "processes": processes,
        "folder": str(folder),
        "own_files": own_files if isolation.has_own_files else None,
        "readable": list_readable_paths(isolation, folder),
        "writable": [str(folder), "/dev/null"],
        "landlock": isolation.landlock,
        "filters": isolation.filters,
        "may_signal": isolation.may_signal,
        "user": isolation.user,
        "control": control,
        "binds": list_binds(isolation, folder),
    }
    return orjson.dumps(setup).decode()
