"""Describes the isolation of a program, and writes the commands that set it up.

Files are isolated by bubblewrap (a private root) or Landlock. The network, other processes and
risky system calls are isolated by a seccomp filter, and by namespaces if available. Landlock and
seccomp need no privileges and work in containers.
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import orjson

from relax_events.sandbox.inside import landlock

ENTRY = Path(landlock.__file__).parent / "entry.py"
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/zero", "/dev/urandom", "/dev/random")


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
