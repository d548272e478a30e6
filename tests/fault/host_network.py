"""Hosts as network namespaces: each has an address of its own on one switch, and a link that can be
cut and healed. Needs root and `ip` of iproute2.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

PREFIX = "10.77.0."
SWITCH = "switch"
SETUP_SECONDS = 30.0


class NotPermitted(Exception):
    """This user can't make network namespaces here; the text says why."""


class Network:
    """The hosts of a run. Leaving the context removes them."""

    def __init__(self, names: Sequence[str]) -> None:
        """Lay out the hosts; `__enter__` makes them.

        Args:
            names: Of the hosts; they get the addresses 10.77.0.1 and so on, in this order.
        """
        self._tag = f"relax{secrets.token_hex(3)}"
        self._names = list(names)

    def address(self, name: str) -> str:
        """Return a host's address, which all other hosts reach."""
        return f"{PREFIX}{self._names.index(name) + 1}"

    def cut(self, name: str) -> None:
        """Cut a host's link; its peers get no message."""
        self._in(SWITCH, "ip", "link", "set", self._port(name), "down")

    def heal(self, name: str) -> None:
        """Restore a host's link."""
        self._in(SWITCH, "ip", "link", "set", self._port(name), "up")

    def list_pids(self, name: str) -> list[int]:
        """Return the processes of a host."""
        words = ["ip", "netns", "pids", self.namespace(name)]
        output = subprocess.run(words, check=True, capture_output=True, timeout=SETUP_SECONDS)
        return [int(pid) for pid in output.stdout.split()]

    def spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        folder: Path,
        log: IO[bytes],
        environment: Mapping[str, str],
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host, in a session of its own."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(name), *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        if shutil.which("ip") is None or os.geteuid() != 0:
            raise NotPermitted("network namespaces need root and the program ip (iproute2)")
        try:
            _run("ip", "netns", "add", self.namespace(SWITCH))
        except subprocess.CalledProcessError as error:
            raise NotPermitted(f"ip netns add failed: {error.stderr.decode().strip()}") from None
        try:
            self._in(SWITCH, "ip", "link", "add", "bridge", "type", "bridge")
            self._in(SWITCH, "ip", "link", "set", "bridge", "up")
            for name in self._names:
                self._add_host(name)
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise NotPermitted(f"{error.cmd}: {error.stderr.decode().strip()}") from None
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self._names, SWITCH):
            subprocess.run(
                ["ip", "netns", "del", self.namespace(name)],
                check=False,
                capture_output=True,
                timeout=SETUP_SECONDS,
            )

    def _add_host(self, name: str) -> None:
        namespace, port = self.namespace(name), self._port(name)
        _run("ip", "netns", "add", namespace)
        self._in(
            SWITCH, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0",
            "netns", namespace,
        )  # fmt: skip
        self._in(SWITCH, "ip", "link", "set", port, "master", "bridge", "up")
        for words in (
            ("addr", "add", f"{self.address(name)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            self._in(name, "ip", *words)

    def _in(self, name: str, *words: str) -> None:
        _run("ip", "netns", "exec", self.namespace(name), *words)

    def namespace(self, name: str) -> str:
        """Return the name of a host's namespace."""
        return f"{self._tag}-{name}"

    def _port(self, name: str) -> str:
        return f"port-{name}"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=SETUP_SECONDS)
