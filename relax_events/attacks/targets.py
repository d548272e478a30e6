"""Targets of escapes from a sandbox: files, sockets, processes and shared memory of this account.

They are created for the attempts, and nothing else is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from relax_events.sandbox.inside import entry, seccomp

CONTENT = "TOPSECRET"
"""The content of each file, and of a piece of this process's memory."""
VARIABLE = "SECRET_OF_THE_JUDGE"
KEPT = {
    **dict.fromkeys(("private", "written", "appended", "renamed", "exchanged"), 0o600),
    **dict.fromkeys(("named", "linked", "truncated", "emptied", "database"), 0o600),
    **dict.fromkeys(("public", "attributed"), 0o644),
    **dict.fromkeys(("deletable", "deletable too"), 0o666),
}
"""The modes of the files, by name."""
VICTIMS = (
    *("read", "kill", "killpg", "tgkill", "tkill", "queue", "tgqueue", "pidfd", "F_SETOWN"),
    *("F_SETOWN group", "F_SETOWN_EX", "FIOSETOWN", "SIOCSPGRP", "pipe", "traced", "seized"),
)
IPC_PRIVATE, IPC_CREATE, IPC_REMOVE, IPC_STATUS = 0, 0o1000, 0, 2
O_CREAT_RDWR = os.O_CREAT | os.O_RDWR


class Targets:
    """The targets of escapes.

    Attributes:
        outside: The targets that a program gets: paths, ports, and the ids of processes and shared
            memory.
        canary: A file that does not exist, for attacks to create.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Create the targets in an empty folder; the stack deletes the targets outside of it."""
        self._folder = folder / "account"
        self.canary = folder / "canary"
        self._server = _listen(stack)
        self._server.setblocking(False)
        self._files_at_first = set(_create_files(folder))
        self._content = ctypes.create_string_buffer(CONTENT.encode())
        self._victims = {name: _start_victim(stack) for name in VICTIMS}
        self.outside: dict[str, Any] = {
            "folder": str(self._folder),
            "private": str(self._folder / "private"),
            "public": str(self._folder / "public"),
            "script": str(self._folder / "script"),
            "readable": str(folder / "readable" / "file"),
            "home": str(Path.home()),
            "root": [path.name for path in Path("/").iterdir()],
            "tmp": [path.name for path in Path(tempfile.gettempdir()).iterdir()],
            "judge": os.getpid(),
            "address": ctypes.addressof(self._content),
            "victims": {name: victim.pid for name, victim in self._victims.items()},
            "packages": json.__path__[0],
            "inside": entry.__file__,
            "calls": seccomp.read_numbers(platform.machine()),
            "port": self._server.getsockname()[1],
            **_open_sockets(self._folder, stack),
            **_create_shared_memory(stack, name=folder.name),
        }

    def list_traces(self) -> list[str]:
        """Return the traces at the canary and the TCP port since the last call; quick."""
        traces = []
        if self.canary.exists():
            self.canary.unlink()
            traces.append("CREATED the canary")
        while True:
            try:
                self._server.accept()[0].close()
            except BlockingIOError:
                return traces
            traces.append("CONNECTED to the port")

    def list_changes(self) -> list[str]:
        """Return the changes to the targets."""
        ended = [name for name, victim in self._victims.items() if victim.poll() is not None]
        files = {path.name for path in self._folder.iterdir()}
        return [
            *(f"ENDED {name}" for name in ended),
            *(f"DELETED {name}" for name in sorted(self._files_at_first - files)),
            *(f"CREATED {name}" for name in sorted(files - self._files_at_first)),
            *(
                f"CHANGED {name}"
                for name in KEPT
                if name in files and (self._folder / name).read_text() != CONTENT
            ),
            *([] if self._content.value == CONTENT.encode() else ["CHANGED memory"]),
            *(f"DELETED {name}" for name in _list_deleted_memory(self.outside)),
        ]


@contextmanager
def create_targets() -> Iterator[Targets]:
    """Create the targets of escapes, and delete them in the end."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        yield Targets(Path(name), stack)


def _create_files(folder: Path) -> list[str]:
    """Create files in a folder that all may write to, and one outside that may be readable."""
    folder.chmod(0o755)
    (folder / "readable").mkdir()
    (folder / "readable" / "file").write_text(CONTENT)
    account = folder / "account"
    account.mkdir()
    (account / "deletable folder").mkdir()
    for name, mode in KEPT.items():
        (account / name).write_text(CONTENT)
        (account / name).chmod(mode)
    (account / "script").write_text("#!/bin/sh\nexit 0\n")
    (account / "script").chmod(0o755)
    with contextlib.suppress(OSError):  # not all file systems have attributes
        os.setxattr(account / "attributed", "user.relax", b"1")
    account.chmod(0o777)
    return [path.name for path in account.iterdir()] + ["socket", "datagrams"]


def _listen(stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_server(("127.0.0.1", 0)))


def _open_sockets(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Open sockets of all kinds that a program could connect to; return their addresses."""
    abstract = f"relax-{os.getpid()}-{folder.parent.name}"
    for name, address, kind in (
        ("socket", str(folder / "socket"), socket.SOCK_STREAM),
        ("datagrams", str(folder / "datagrams"), socket.SOCK_DGRAM),
        ("", f"\0{abstract}", socket.SOCK_STREAM),
    ):
        local = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        local.bind(address)
        if kind == socket.SOCK_STREAM:
            local.listen()
        if name:
            Path(address).chmod(0o777)
    addresses = {"port6": 0, "udp": 9, "abstract": abstract}
    with contextlib.suppress(OSError):  # not all machines have IPv6
        server6 = stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6))
        addresses["port6"] = server6.getsockname()[1]
    paths = {name: str(folder / name) for name in ("socket", "datagrams")}
    return addresses | paths


def _start_victim(stack: ExitStack) -> subprocess.Popen[bytes]:
    """Start a process, with a session of its own and a secret in its environment."""
    victim = subprocess.Popen(
        ["/bin/sleep", "600"],
        env={"PATH": os.environ.get("PATH", os.defpath), VARIABLE: "1"},
        start_new_session=True,
    )
    stack.callback(victim.wait)
    stack.callback(victim.kill)
    return victim


def _create_shared_memory(stack: ExitStack, *, name: str) -> dict[str, Any]:
    """Create a shared segment, semaphores and queues that only this account may use."""
    queue = f"relax-{os.getpid()}-{name}"
    flags = IPC_CREATE | 0o600
    shared = {
        "segment": _call("shmget", IPC_PRIVATE, 4096, flags),
        "semaphores": _call("semget", IPC_PRIVATE, 1, flags),
        "queue": _call("msgget", IPC_PRIVATE, flags),
    }
    for kind, call in (("segment", "shmctl"), ("queue", "msgctl")):
        stack.callback(_call, call, shared[kind], IPC_REMOVE, 0)
    stack.callback(_call, "semctl", shared["semaphores"], 0, IPC_REMOVE, 0)
    descriptor = _call("mq_open", queue.encode(), O_CREAT_RDWR, 0o600, 0)
    if descriptor >= 0:
        os.close(descriptor)
        stack.callback(_call, "mq_unlink", queue.encode())
    message = b"\x01" + bytes(7) + b"x"
    _call("msgsnd", shared["queue"], message, 1, 0)
    return {**shared, "named_queue": queue, "has_named_queue": descriptor >= 0}


def _list_deleted_memory(outside: dict[str, Any]) -> list[str]:
    """Return the names of shared memory that was created and is gone."""
    status = ctypes.create_string_buffer(512)
    results = {
        "segment": _call("shmctl", outside["segment"], IPC_STATUS, status),
        "semaphores": _call("semctl", outside["semaphores"], 0, IPC_STATUS, status),
        "queue": _call("msgctl", outside["queue"], IPC_STATUS, status),
    }
    deleted = [name for name, result in results.items() if outside[name] >= 0 and result < 0]
    queue = _call("mq_open", outside["named_queue"].encode(), os.O_RDONLY, 0, 0)
    if queue >= 0:
        os.close(queue)
    return deleted + (["named queue"] if outside["has_named_queue"] and queue < 0 else [])


def _call(name: str, *arguments: object) -> int:
    """Return the result of a raw system call; -1 if this kernel has none of that name."""
    number = seccomp.read_numbers(platform.machine()).get(name)
    if number is None:
        return -1
    whole = (ctypes.c_long(one) if isinstance(one, int) else one for one in (number, *arguments))
    return int(ctypes.CDLL(None).syscall(*whole))
