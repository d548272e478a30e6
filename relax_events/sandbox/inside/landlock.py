"""Landlock: a process gives up access to files, TCP and signals, for itself and all its children.
It needs no privileges.

Source: Documentation/userspace-api/landlock.rst of the Linux kernel.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_FOR_VERSION, RULE_PATH_BENEATH, RULE_PORT = 1, 1, 2
PR_SET_NO_NEW_PRIVS = 38
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""Rights that apply to files; the others apply to folders only."""
READ = EXECUTE | READ_FILE | READ_DIR
RIGHTS_BY_VERSION = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    4: (1 << 15) - 1,
    5: (1 << 16) - 1,
}
TCP_VERSION, SCOPE_VERSION = 4, 6
BIND_AND_CONNECT_TCP, CONNECT_TCP, ABSTRACT_SOCKETS_AND_SIGNALS = 3, 2, 3


def version() -> int:
    """Return the kernel's version of the Landlock interface; 0 if it has none."""
    answer = _libc().syscall(CREATE_RULESET, None, 0, ASK_FOR_VERSION)
    return max(int(answer), 0)


def restrict(
    *,
    readable: Sequence[str],
    writable: Sequence[str],
    tcp_ports: Sequence[int] = (),
    at_most: int | None = None,
) -> None:
    """Permanently deny this process and its children all other files, TCP, and signals to processes
    outside.

    Kernels before version 4 of the interface don't restrict TCP, those before 6 don't restrict
    signals: there a seccomp filter must do it.

    Args:
        readable: Folders and files that may be read and executed; missing ones are ignored.
        writable: Folders with all rights except creating devices and sockets, and writable files.
        tcp_ports: The TCP ports, of any address, that may be connected to.
        at_most: The version of the interface to use, if the kernel's is newer.
    Raises:
        OSError: The kernel has no Landlock, or refused the call.
    """
    used = version() if at_most is None else min(version(), at_most)
    rights = RIGHTS_BY_VERSION.get(min(used, max(RIGHTS_BY_VERSION)), 0)
    tcp = BIND_AND_CONNECT_TCP if used >= TCP_VERSION else 0
    scoped = ABSTRACT_SOCKETS_AND_SIGNALS if used >= SCOPE_VERSION else 0
    size = 24 if used >= SCOPE_VERSION else 16 if used >= TCP_VERSION else 8
    attributes = struct.pack("=QQQ", rights, tcp, scoped)[:size]
    ruleset = _check_result(_libc().syscall(CREATE_RULESET, attributes, size, 0))
    try:
        for path in readable:
            _allow(ruleset, path, READ & rights)
        for path in writable:
            _allow(ruleset, path, rights & ~_MAKE_DEVICES_AND_SOCKETS)
        for port in tcp_ports if tcp else ():
            _add(ruleset, RULE_PORT, struct.pack("=QQ", CONNECT_TCP, port))
        _check_result(_libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _check_result(_libc().syscall(RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


_MAKE_DEVICES_AND_SOCKETS = (1 << 6) | (1 << 9) | (1 << 11)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= FILE_RIGHTS
        _add(ruleset, RULE_PATH_BENEATH, struct.pack("=Qi", rights, parent))
    finally:
        os.close(parent)


def _add(ruleset: int, kind: int, rule: bytes) -> None:
    _check_result(_libc().syscall(ADD_RULE, ruleset, kind, rule, 0))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check_result(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
