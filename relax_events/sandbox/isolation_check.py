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
from relax_events.sandbox.runner import Limits, Verdict
from relax_events.sandbox.sandbox import Sandbox

CHECK_SECONDS = 30.0
ESCAPES = {
    "read a file of this account": "open(outside['file']).read()",
    "write to a file of this account": "open(outside['file'], 'w')",
    "list the home of this account": "os.listdir(outside['home'])",
    "write to shared memory": "os.close(os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR))",
    "read this process's environment": "open('/proc/%d/environ' % outside['pid']).read()",
    "signal this process": "os.kill(outside['pid'], 0)",
    "connect to a port": "socket.create_connection(('127.0.0.1', outside['port']), 2)",
    "connect to a Unix socket": "socket.socket(socket.AF_UNIX).connect(outside['socket'])",
    "send to a Unix socket": (
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'', outside['socket'])"
    ),
    "create a namespace": (
        "os.waitstatus_to_exitcode(subprocess.run(['unshare', '--user', 'true'], "
        "check=True).returncode)"
    ),
    "create an anonymous file": "os.memfd_create('relax')",
}
PROGRAM = """
import json, os, socket, subprocess, sys
outside, escapes = json.loads(sys.stdin.readline()), json.loads(sys.stdin.readline())
succeeded = []
for name, code in escapes.items():
    try:
        eval(code)
    except Exception:
        continue
    succeeded.append(name)
print(json.dumps(succeeded))
"""


def check_isolation(*, allow_unprotected: bool = False) -> str:
    """Try every known escape; return a description of the isolation and the number of escapes.

    Raises:
        EnvironmentProblem: There is no sufficient isolation.
        CheckFailed: An escape succeeds; the text names it.
    """
    isolation = require_isolation(allow_unprotected=allow_unprotected)
    with (
        _create_targets() as targets,
        Sandbox(PROGRAM, Limits(seconds=CHECK_SECONDS), isolation=isolation) as sandbox,
    ):
        verdict, printed = sandbox.run_with_input(
            f"{orjson.dumps(targets).decode()}\n{orjson.dumps(ESCAPES).decode()}\n"
        )
    if verdict is not Verdict.PASSED:
        raise CheckFailed(
            f"the program that tests the isolation ({isolation.describe()}) failed: {verdict}"
        )
    if succeeded := orjson.loads(printed):
        raise CheckFailed(
            f"a program isolated by {isolation.describe()} can {', '.join(succeeded)}"
        )
    return (
        f"programs are isolated by {isolation.describe()}; {len(ESCAPES)} known escapes tried, "
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
