"""Tests this machine's isolation with known escapes, for `relax doctor`."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from relax_events.errors import CheckFailed
from relax_events.sandbox.isolation import require_isolation
from relax_events.sandbox.sandbox import Limits, Sandbox, Verdict

CHECK_SECONDS = 30.0
ESCAPES = {
    "read a file of the account's": "open(outside['file']).read()",
    "write to a file of the account's": "open(outside['file'], 'w')",
    "list the account's home": "os.listdir(outside['home'])",
    "write to shared memory": "os.close(os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR))",
    "read this process's environment": "open('/proc/%d/environ' % outside['pid']).read()",
    "signal this process": "os.kill(outside['pid'], 0)",
    "connect to a port": "socket.create_connection(('127.0.0.1', outside['port']), 2)",
    "connect to a socket on a path": "socket.socket(socket.AF_UNIX).connect(outside['socket'])",
    "send to a socket on a path": (
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'', outside['socket'])"
    ),
    "make a namespace": (
        "os.waitstatus_to_exitcode(subprocess.run(['unshare', '--user', 'true'], "
        "check=True).returncode)"
    ),
    "make an anonymous file": "os.memfd_create('relax')",
}
PROGRAM = """
import json, os, socket, subprocess, sys
outside, ways = json.loads(sys.stdin.readline()), json.loads(sys.stdin.readline())
open_ways = []
for name, code in ways.items():
    try:
        eval(code)
    except Exception:
        continue
    open_ways.append(name)
print(json.dumps(open_ways))
"""


def check_isolation(*, allow_unprotected: bool = False) -> str:
    """Try every known escape; return a description of the isolation and the number of escapes.

    Raises:
        EnvironmentProblem: There is no sufficient isolation.
        CheckFailed: An escape succeeds; the text names it.
    """
    walls = require_isolation(allow_unprotected=allow_unprotected)
    with (
        _create_targets() as things,
        Sandbox(PROGRAM, Limits(seconds=CHECK_SECONDS), walls=walls) as sandbox,
    ):
        verdict, printed = sandbox.run_with_input(
            f"{orjson.dumps(things).decode()}\n{orjson.dumps(ESCAPES).decode()}\n"
        )
    if verdict is not Verdict.PASSED:
        raise CheckFailed(
            f"the program that tests the isolation ({walls.describe()}) failed: {verdict}"
        )
    if open_ways := orjson.loads(printed):
        raise CheckFailed(f"a program isolated by {walls.describe()} can {', '.join(open_ways)}")
    return (
        f"programs are isolated by {walls.describe()}; {len(ESCAPES)} known escapes tried, "
        "none succeeds"
    )


@contextmanager
def _create_targets() -> Iterator[dict[str, object]]:
    with (
        tempfile.TemporaryDirectory() as name,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
    ):
        folder = Path(name)
        (folder / "file").write_text("of the account")
        local.bind(str(folder / "socket"))
        local.listen()
        yield {
            "file": str(folder / "file"),
            "socket": str(folder / "socket"),
            "home": str(Path.home()),
            "pid": os.getpid(),
            "port": server.getsockname()[1],
        }
