"""What code could do in a child of each profile, if it ran there: a child that evaluates the texts
it receives tries it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from relax_events.attacks.suite import HELD, Assault, Attack, NotPossible
from relax_events.attacks.targets import Targets
from relax_events.attacks.user_code import SECRETS
from relax_events.confinement import ChildLost, ChildPool, ChildSettings, Profile
from relax_events.confinement.entry_points import Door, EntryPoint
from relax_events.confinement.profiles import describe_missing

SECONDS = 60.0
MEMORY_BYTES = 2 * 1024**3
FALSE = "False"
VARIABLES = {"a secret among the own variables": "any(name in os.environ for name in secrets)"}
"""Refused in every profile. As root a child of profile `program` keeps the right to read other
processes, which the sandbox needs to count the files of programs; no foreign code runs in it."""
ALWAYS = VARIABLES | {
    "the worker's memory": "Path(f'/proc/{pid}/mem').open('rb').read(1)",
    "the worker's variables": "b'PATH=' in Path(f'/proc/{pid}/environ').read_bytes()",
    "the worker's descriptors": "os.open(f'/proc/{pid}/fd/1', os.O_WRONLY)",
    "the worker's memory by a call": (
        "ctypes.CDLL(None, use_errno=True).ptrace(0x4206, pid, None, None) == 0"
    ),
}
"""Refused wherever foreign code could run."""
CONFINED = {
    "reading a file": "Path(file).read_text()",
    "writing a file": "Path(file).write_text('x')",
    "deleting a file": "Path(file).unlink()",
    "creating a file": "Path(canary).touch()",
    "creating a nameless file": "os.open(folder, os.O_TMPFILE | os.O_RDWR)",
    "listing a folder": "os.listdir(folder)",
    "reading accounts": "Path('/etc/passwd').read_text()",
    "listing the home": "os.listdir(os.path.expanduser('~'))",
    "forking": "os.fork()",
    "a program": "subprocess.run(['touch', canary], check=True)",
    "becoming a program": "os.execv('/bin/true', ['true'])",
    "a signal": "os.kill(pid, 0)",
    "memory as a file": "os.memfd_create('x')",
    "a socket on a path": "socket.socket(socket.AF_UNIX)",
    "listening": "socket.create_server(('127.0.0.1', 0))",
    "connecting": "socket.create_connection(('127.0.0.1', port), 5)",
    "datagrams": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "more memory": "bytearray(8 * 1024 ** 3)",
}
"""Refused in the profiles `pure` and `network`."""
ALLOWED_BY_NETWORK = frozenset({"datagrams"})
"""Looking up a host's name needs them."""


def profile_assaults() -> Iterator[Assault]:
    """Give the assaults of code in a child of each profile."""
    for profile in Profile:
        yield Assault(f"profile {profile}", tuple(Door), profile, partial(_prepare, profile))


def list_probes(profile: Profile) -> dict[str, str]:
    """Return expressions that a child of a profile must not be able to evaluate."""
    if profile is Profile.PROGRAM:
        return VARIABLES
    if profile is Profile.TRUSTED:
        return ALWAYS
    probes = ALWAYS | CONFINED
    if profile is Profile.NETWORK:
        return {name: code for name, code in probes.items() if name not in ALLOWED_BY_NETWORK}
    return probes


@contextmanager
def _prepare(profile: Profile, targets: Targets) -> Iterator[list[Attack]]:
    if profile in (Profile.PURE, Profile.NETWORK) and (missing := describe_missing()):
        raise NotPossible(f"this kernel does not restrict {missing}")
    point = EntryPoint("probe", (), profile, "relax_events.attacks.probe_child")
    setup = {"memory_bytes": MEMORY_BYTES}
    outside = targets.outside
    names = {
        "file": outside["private"],
        "folder": outside["folder"],
        "canary": str(targets.canary),
        "pid": os.getpid(),
        "port": outside["port"],
        "secrets": list(SECRETS),
    }
    with ChildPool(ChildSettings(entry_point=point, setup=setup)) as pool:
        probes = list_probes(profile)
        yield [
            Attack("a sum, which must work", lambda: _expect(pool, "1 + 1", names, "2")),
            *(
                Attack(name, partial(_expect, pool, code, names, FALSE))
                for name, code in probes.items()
            ),
        ]


def evaluate(pool: ChildPool, code: str, names: dict[str, Any]) -> str:
    """Return an expression's value in a child, as text; empty if it raises or ends the child."""
    try:
        head = pool.call({"code": code, "names": names}, seconds=SECONDS).result().head
    except ChildLost:
        return ""
    return str(head.get("value", ""))


def _expect(pool: ChildPool, code: str, names: dict[str, Any], harmless: str) -> str:
    value = evaluate(pool, code, names)
    is_wrong = value != harmless if harmless != FALSE else value not in ("", FALSE)
    return f"{code} gives {value[:200]!r}" if is_wrong else HELD
