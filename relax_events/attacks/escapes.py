"""Attempts to escape from a sandbox, as programs would make them: each is a block of statements
that sets `escaped` when it succeeds.

They are given `outside`: the targets of `relax_events.attacks.targets`. `file(name)` is the path of
a file outside, `victim(name)` the id of a process outside, `call(name, ...)` a raw system call,
`supervisor` the first process inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from relax_events.attacks.call_escapes import CHANGES, KERNEL, PROCESSES, SHARED, SOCKETS
from relax_events.attacks.file_escapes import READS, WRITES


class Layer(StrEnum):
    """The protection that stops an escape even where it is the only one."""

    FILES = "Landlock or a private root"
    CALLS = "the filter of system calls"


@dataclass(frozen=True, slots=True)
class Escape:
    """An attempt to escape."""

    code: str
    layer: Layer


ESCAPES = {
    f"{kind}: {name}": Escape(code, layer)
    for kind, codes, layer in (
        ("read", READS, Layer.FILES),
        ("write", WRITES, Layer.FILES),
        ("change", CHANGES, Layer.CALLS),
        ("socket", SOCKETS, Layer.CALLS),
        ("process", PROCESSES, Layer.CALLS),
        ("shared", SHARED, Layer.CALLS),
        ("kernel", KERNEL, Layer.CALLS),
    )
    for name, code in codes.items()
}
ATTEMPTS = """
import ctypes, fcntl, json, os, resource, signal, socket, struct, subprocess, sys, time
outside, attempts = json.loads(sys.stdin.readline()), json.loads(sys.stdin.readline())
supervisor = os.getppid()
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(name, *arguments):
    return libc.syscall(*(
        ctypes.c_long(one) if isinstance(one, int) else one
        for one in (outside["calls"][name], *arguments)
    ))
def file(name):
    return os.path.join(outside["folder"], name)
def victim(name):
    return outside["victims"][name]
for name, code in attempts.items():
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        scope = {**globals(), "escaped": None}
        try:
            exec(code, scope)
        except BaseException:
            pass
        os._exit(3 if scope["escaped"] else 0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3:
        print("ESCAPED", name)
print("tried", len(attempts))
"""
"""The program that makes the attempts; its input is `outside`, and the code of each attempt by its
name, a JSON object a line."""
