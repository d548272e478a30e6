"""What a child process may touch.

    pure      reads its interpreter, its packages, and the files that its setup names; no other
              file, no network, no new process, no other process
    network   the same, and connects to the ports of the addresses that the run file names
    program   starts programs in the sandbox, which has walls of its own
    trusted   the user's own code: what its account may, except the memory and the variables of
              other processes

Landlock restricts files and ports, a seccomp filter the rest. Where the kernel lacks one of them,
the other still holds; `describe_missing` names what is missing. A child in which foreign code runs
can't read the worker; see `privileges.hide_process`. One of profile `program` keeps root's right to
do so, by which it counts the files of its programs: these run apart, as another user.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

import relax_events
from relax_events import privileges
from relax_events.confinement.variables import PROXIES
from relax_events.sandbox.inside import landlock, seccomp
from relax_events.sandbox.isolation import (
    DEVICES,
    SYSTEM_FILES,
    SYSTEM_FOLDERS,
    list_interpreter_folders,
)

PR_SET_PDEATHSIG = 1
NAME_FILES = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ssl",
    "/etc/pki",
    "/run/systemd/resolve",
)
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
"""Names of folders of packages: an environment may use those of others, by PYTHONPATH or `.pth`."""
HOME_CACHE = os.path.expanduser("~/.cache")  # noqa: PTH111  # which fails without a home
FONT_CACHE = "matplotlib"
"""Without its list of fonts the library makes a new one at each import, which takes a second."""
DNS_PORT = 53
DEFAULT_PORTS = {"https": 443, "wss": 443, "http": 80, "ws": 80}


class Profile(StrEnum):
    """A confinement profile; see the module's docstring."""

    PURE = "pure"
    NETWORK = "network"
    PROGRAM = "program"
    TRUSTED = "trusted"


@dataclass(frozen=True, slots=True)
class Confinement:
    """A profile, with what it opens for one entry point.

    Attributes:
        profile: The profile.
        readable: Further files and folders that may be read.
        writable: Folders that may be written.
        ports: TCP ports that may be connected to, with profile `network`.
    """

    profile: Profile
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return it as an argument of `launch`."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> Confinement:
        """Return what `to_json` wrote."""
        fields: dict[str, Any] = orjson.loads(text)
        lists = {name: tuple(fields[name]) for name in ("readable", "writable", "ports")}
        return cls(Profile(fields["profile"]), **lists)

    def apply(self) -> None:
        """Confine this process and its children, permanently; it is killed when the thread that
        started it ends.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.profile is not Profile.PROGRAM:
            privileges.drop_ptrace()
        if self.profile in (Profile.PURE, Profile.NETWORK):
            self._restrict_files()
            self._restrict_calls()

    def _restrict_files(self) -> None:
        if not landlock.version():
            return
        is_network = self.profile is Profile.NETWORK
        package = str(Path(relax_events.__file__).parent)
        readable = (
            *(*SYSTEM_FOLDERS, *SYSTEM_FILES, *DEVICES, *list_interpreter_folders(), package),
            *(path for path in sys.path if Path(path).name in PACKAGE_FOLDERS),
            str(Path(os.environ.get("XDG_CACHE_HOME") or HOME_CACHE, FONT_CACHE)),
        )
        landlock.restrict(
            readable=[*readable, *(_list_network_files() if is_network else ()), *self.readable],
            writable=["/dev/null", *self.writable],
            tcp_ports=[*self.ports, DNS_PORT] if is_network else [],
        )

    def _restrict_calls(self) -> None:
        if platform.machine() in seccomp.ARCHITECTURES:
            seccomp.restrict(
                may_signal=False,
                may_start_processes=False,
                may_connect=self.profile is Profile.NETWORK,
            )


def _list_network_files() -> list[str]:
    """Return what looking up a host and checking its certificate read."""
    named = (os.environ.get(name, "") for name in CERTIFICATES)
    return [*NAME_FILES, *(path for path in named if path)]


def list_ports(addresses: Iterable[str]) -> tuple[int, ...]:
    """Return the TCP ports of addresses, and of the proxies that the environment names."""
    proxies = (os.environ.get(name, "") for name in PROXIES)
    ports = set()
    for address in (*addresses, *proxies):
        parts = urlsplit(address)
        if parts.hostname:
            ports.add(parts.port or DEFAULT_PORTS.get(parts.scheme, 80))
    return tuple(sorted(ports))


def describe_missing() -> str:
    """Name what this machine's kernel lacks of the profiles; empty if nothing."""
    missing = {
        "files (Landlock, Linux 5.13 or newer)": bool(landlock.version()),
        "system calls (seccomp on x86_64 or aarch64)": platform.machine() in seccomp.ARCHITECTURES,
    }
    return " and ".join(name for name, is_there in missing.items() if not is_there)
