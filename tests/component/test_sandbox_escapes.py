"""Nothing escapes from a sandbox: attempts on files, the network, other processes and the kernel,
in each kind of isolation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from escape_program import COUNTED, KINDS, LAYERS, NOTHING, SECONDS, WEAKENED, walls_of
from escapes import programs_left
from ordinary_user import ORDINARY_USER, as_ordinary_user

from relax_events.attacks import isolation_check
from relax_events.attacks.escapes import ESCAPES, Escape, Layer
from relax_events.attacks.forged_verdicts import RIGHT, TESTS
from relax_events.attacks.isolation_check import check_isolation
from relax_events.attacks.limits import FILE_LIMITS, HELD_SECONDS
from relax_events.config import MediaConfig
from relax_events.errors import CheckFailed, MediaError
from relax_events.events.parts import Modality
from relax_events.media.decoder import Decoder
from relax_events.sandbox import Isolation, Limits, Sandbox, Verdict, runner
from relax_events.sandbox.probing import CAPABILITIES

ROOT = Path(__file__).parent.parent.parent
PROGRAM = Path(__file__).parent / "escape_program.py"
MIN_ESCAPES = 60
PRIVILEGED = {
    *("read: the shadow file", "read: root's home", "read: the account's home"),
    "write: the account's home",  # which the user of this test can't reach
    *("read: the own environment", "read: the private file through an inherited descriptor"),
    *("read: the kernel's settings", "write: the packages", "write: the program inside"),
    *("change: a file by its handle", "change: a device", "change: a mount"),
    *("change: a mount by its file system", "change: a copy of a mount", "change: another root"),
    *("socket: a raw socket", "socket: a packet socket", "kernel: a mount namespace"),
    *("kernel: a network namespace", "kernel: a time namespace", "kernel: another's namespace"),
    *("kernel: becoming root", "kernel: capabilities", "kernel: new privileges"),
    *("kernel: a host's name", "kernel: the clock", "kernel: a module", "kernel: accounting"),
}
"""Escapes that only root can make, and two that the sandbox prevents before any isolation."""
DEPENDENT_ON_THE_MACHINE = {
    *("read: the hosts file", "read: the host's name file", "read: the root folder"),
    *("read: a file by openat2", "read: the judge's memory", "write: the judge's memory"),
    *("write: a nameless file", "change: a mode by fchmodat2", "change: an attribute"),
    *("change: an attribute by setxattrat", "change: a removed attribute", "change: a lease"),
    *("change: flags of a file", "change: flags by file_setattr", "change: the mounts"),
    *("change: watches on a file system", "change: files by their handles"),
    *("socket: TCP over IPv6", "socket: TCP with the first data", "socket: UDP over IPv6"),
    *("socket: TCP over several paths", "socket: SCTP", "socket: a ping", "socket: netlink"),
    *("socket: the hypervisor", "socket: the kernel's ciphers", "socket: io_uring"),
    *("socket: a socket of another family", "socket: old asynchronous input"),
    *("process: tracing", "process: tracing without a stop", "process: reading memory"),
    *("process: writing memory", "process: comparing processes", "process: another's descriptor"),
    *("process: another's memory nodes", "process: another's pages"),
    *("process: another's permission to trace", "process: a processor of its own"),
    *("shared: a named queue, opened", "shared: a named queue, deleted"),
    *("kernel: a user namespace", "kernel: a namespace by clone", "kernel: a namespace by clone3"),
    *("kernel: keys", "kernel: a keyring", "kernel: a requested key", "kernel: bpf"),
    *("kernel: performance counters", "kernel: user faults", "kernel: secret memory"),
    *("kernel: input into a terminal", "kernel: the kernel's log", "kernel: the 32-bit calls"),
}
"""Escapes that not all kernels, file systems and settings of a machine allow."""
KILLED = {
    *("kill", "killpg", "tgkill", "tkill", "queue", "tgqueue", "pidfd", "F_SETOWN"),
    *("F_SETOWN group", "F_SETOWN_EX", "FIOSETOWN", "SIOCSPGRP", "pipe"),
}
"""Processes outside that escapes end."""


def run_program(
    kind: str,
    what: str = "ways",
    *,
    home: Path,
    python: str = sys.executable,
    command: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run all escape attempts, and return the program's output."""
    paths = [
        str(ROOT / "tests"),
        str(PROGRAM.parent),
        str(ROOT),
        *(path for path in sys.path if path.endswith("site-packages")),
    ]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": ":".join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    result = subprocess.run(
        [*command, python, str(PROGRAM), kind, what],
        capture_output=True,
        text=True,
        env=environment,
        timeout=SECONDS[what] + 15,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def run_as_ordinary_user(kind: str, what: str, factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = factory.getbasetemp().parent / f"home-of-{ORDINARY_USER}"
    home.mkdir(exist_ok=True)
    command, python = as_ordinary_user(home)
    return run_program(kind, what, home=home, python=python, command=command)


def assert_nothing_escaped(kind: str, report: dict[str, Any]) -> None:
    if report["walls"] is None:
        pytest.skip(f"this machine builds no walls of {kind}")
    assert report["escaped"] == []


@pytest.mark.parametrize("kind", [*KINDS, *WEAKENED])
def test_no_sandbox_escape_succeeds(kind: str, tmp_path: Path) -> None:
    report = run_program(kind, home=tmp_path)
    assert_nothing_escaped(kind, report)
    assert report["tried"] >= MIN_ESCAPES


@pytest.mark.parametrize("kind", [*KINDS, *WEAKENED])
def test_no_sandbox_escape_succeeds_for_an_unprivileged_user(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    report = run_as_ordinary_user(kind, "ways", tmp_path_factory)
    assert_nothing_escaped(kind, report)
    assert report["tried"] >= MIN_ESCAPES


def test_isolation_of_one_layer_is_refused() -> None:
    for kind in LAYERS:
        if (found := walls_of(kind)) is not None:
            assert not found.is_sufficient


def test_sandbox_escapes_succeed_without_isolation(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The attempts are real: as an ordinary user without walls, all succeed but those that need
    another user, or a kernel that not all machines have."""
    try:
        report = run_as_ordinary_user(NOTHING, "ways", tmp_path_factory)
    finally:
        for folder in ("/dev/shm", "/var/tmp"):
            Path(folder, "relax-escape").unlink(missing_ok=True)
    succeeded = set(report["escaped"])
    assert set(ESCAPES) - succeeded <= PRIVILEGED | DEPENDENT_ON_THE_MACHINE
    assert {f"ENDED {name}" for name in KILLED} <= succeeded
    for layer in Layer:
        names = {name for name, escape in ESCAPES.items() if escape.layer is layer}
        assert len(names & succeeded) >= MIN_ESCAPES


@pytest.mark.parametrize("kind", [*KINDS, COUNTED])
def test_sandbox_limits_files_however_a_program_takes_them(kind: str, tmp_path: Path) -> None:
    assert_nothing_escaped(kind, run_program(kind, "limits", home=tmp_path))


@pytest.mark.parametrize("kind", [*KINDS, COUNTED])
def test_sandbox_limits_files_of_an_unprivileged_user(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_nothing_escaped(kind, run_as_ordinary_user(kind, "limits", tmp_path_factory))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to give up")
@pytest.mark.parametrize("what", ["ways", "limits"])
def test_sandbox_holds_as_root_with_the_capabilities_of_a_container(
    what: str, tmp_path: Path
) -> None:
    kept = ",".join(f"+{name.lower()}" for name in CAPABILITIES)
    command = ("setpriv", f"--bounding-set=-all,{kept}")
    assert_nothing_escaped(
        "landlock", run_program("landlock", what, home=tmp_path, command=command)
    )


@pytest.mark.parametrize("name", FILE_LIMITS)
def test_program_that_takes_too_many_files_passes_without_limits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs are real: they can take the files, and end by themselves afterwards."""
    for limit in ("MAX_COUNTED_FILE_BYTES", "MAX_FOLDER_BYTES", "MAX_FILES"):
        monkeypatch.setattr(runner, limit, 1 << 40)
    monkeypatch.setattr(runner, "exceeds_file_limits", lambda *_, **__: False)
    program = FILE_LIMITS[name].replace(str(HELD_SECONDS), "0")
    with Sandbox(program, Limits(seconds=60), isolation=Isolation()) as sandbox:
        assert sandbox.run_with_input("")[0] is Verdict.PASSED


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_correct_program_passes_in_every_kind_of_isolation(kind: str) -> None:
    if (found := walls_of(kind)) is None:
        pytest.skip(f"this machine builds no walls of {kind}")
    with Sandbox(RIGHT, Limits(seconds=20), isolation=found) as sandbox:
        assert sandbox.run_with_tests(TESTS) is Verdict.PASSED
        assert sandbox.run_with_tests("assert f(1) == 3") is Verdict.FAILED


BOUNDS = {
    "processes": """
import os, time
while True:
    try:
        if os.fork() == 0: time.sleep(60)
    except OSError: pass
""",
    "memory of all together": """
import os, time
for _ in range(12):
    if os.fork() == 0:
        held = b'x' * 60_000_000
        time.sleep(60)
time.sleep(60)
""",
    "time, signals ignored": """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True: time.sleep(60)
""",
}
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(3, 64)
        time.sleep(600)
    os._exit(0)
print('done')
"""


@pytest.mark.parametrize("bound", BOUNDS)
def test_sandbox_limits_apply_to_all_processes_of_a_program(kind: str, bound: str) -> None:
    if (found := walls_of(kind)) is None:
        pytest.skip(f"this machine builds no walls of {kind}")
    with Sandbox(
        BOUNDS[bound], Limits(seconds=3, memory_bytes=256 * 1024**2), isolation=found
    ) as sandbox:
        assert sandbox.run_with_input("")[0] is Verdict.OUT_OF_LIMITS
    assert not programs_left()


def test_no_process_of_a_sandboxed_program_is_left(kind: str) -> None:
    if (found := walls_of(kind)) is None:
        pytest.skip(f"this machine builds no walls of {kind}")
    with Sandbox(DAEMON, Limits(seconds=20), isolation=found) as sandbox:
        assert sandbox.run_with_input("") == (Verdict.PASSED, "done\n")
    assert not programs_left()


def test_doctor_tries_known_sandbox_escapes() -> None:
    assert re.fullmatch(
        rf"programs are isolated by .*; {len(ESCAPES)} known escapes tried, none succeeds",
        check_isolation(),
    )


def test_doctor_names_the_sandbox_escapes_that_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"add numbers": "escaped = 1 + 1", "divide by zero": "escaped = 1 / 0"}
    escapes = {name: Escape(code, Layer.CALLS) for name, code in codes.items()}
    monkeypatch.setattr(isolation_check, "ESCAPES", escapes)
    with pytest.raises(CheckFailed, match=r"a program isolated by .* escapes: add numbers$"):
        check_isolation()


def test_decoder_runs_confined() -> None:
    decoder = Decoder(MediaConfig())
    with pytest.raises(MediaError):
        decoder.inspect(b"no image", Modality.IMAGE, location="test")
    status = Path(f"/proc/{decoder.pid}/status").read_text()
    assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
    assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE)
