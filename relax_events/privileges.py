"""Keeps processes of one account from reading each other. Standard library only: scripts that start
in milliseconds use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

PR_SET_DUMPABLE, PR_CAPBSET_DROP = 4, 24
CAP_SYS_PTRACE = 19
CAPABILITY_VERSION = 0x20080522
ENVIRONMENT_FIELDS = slice(47, 49)
"""Of /proc/PID/stat after the name: where the variables of its start begin and end."""


def hide_process() -> None:
    """Deny other processes of this account the memory and the variables of this one.

    A process of root with the capability SYS_PTRACE can still read its memory; foreign code runs
    without it, see `drop_ptrace`. Other capabilities of root are enough to read the variables that
    a process was started with (Linux, `may_access_mm`), so these are deleted there; the program's
    own view of its variables stays.
    """
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for name, value in os.environ.items():
        os.putenv(name, value)  # copies it into other memory
    with contextlib.suppress(OSError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = map(int, fields[ENVIRONMENT_FIELDS])
        first = _find_first_variable(ctypes.string_at(start, end - start))
        ctypes.memset(start + first, 0, end - start - first)


def _find_first_variable(content: bytes) -> int:
    """Return where variables begin in the memory that they were started in: a process title may
    stand before them, or have replaced them all.
    """
    variables = b"\0" + content
    places = (variables.find(b"\0" + name + b"=") for name in os.environb)
    return min((place for place in places if place >= 0), default=len(content))


def drop_ptrace() -> None:
    """Give up the right of root to read other processes, for this process and what it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 bits
    if libc.capget(header, sets):
        return
    for index in range(3):
        sets[index] &= ~(1 << CAP_SYS_PTRACE)
    libc.capset(header, sets)
