"""Nothing escapes from a sandbox: attempts on files, the network, other processes and the kernel,
in each kind of isolation.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from escape_program import KINDS, walls_of
from escapes import ESCAPES, programs_left
from ordinary_user import ORDINARY_USER, as_ordinary_user

from relax_events.attacks.forged_verdicts import RIGHT, TESTS
from relax_events.config import MediaConfig
from relax_events.errors import CheckFailed, MediaError
from relax_events.events.parts import Modality
from relax_events.media.decoder import Decoder
from relax_events.sandbox import Limits, Sandbox, Verdict, isolation_check
from relax_events.sandbox.isolation_check import check_isolation

ROOT = Path(__file__).parent.parent.parent
PROGRAM = Path(__file__).parent / "escape_program.py"
SECONDS = 115


def run_program(
    kind: str, *, home: Path, python: str = sys.executable, command: tuple[str, ...] = ()
) -> dict[str, object]:
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
        [*command, python, str(PROGRAM), kind],
        capture_output=True,
        text=True,
        env=environment,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report: dict[str, object] = json.loads(result.stdout)
    return report


@pytest.mark.parametrize("kind", KINDS)
def test_no_sandbox_escape_succeeds(kind: str, tmp_path: Path) -> None:
    report = run_program(kind, home=tmp_path)
    if report["walls"] is None:
        pytest.skip(f"this machine builds no walls of {kind}")
    assert report["escaped"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_sandbox_escape_succeeds_for_an_unprivileged_user(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.getbasetemp().parent / f"home-of-{ORDINARY_USER}"
    home.mkdir(exist_ok=True)
    command, python = as_ordinary_user(home)
    report = run_program(kind, home=home, python=python, command=command)
    if report["walls"] is None:
        pytest.skip(f"this machine builds no walls of {kind} for an ordinary user")
    assert report["escaped"] == []


def test_many_sandbox_escapes_succeed_without_isolation(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The attempts are real: as an ordinary user without walls, many succeed."""
    home = tmp_path_factory.getbasetemp().parent / f"home-of-{ORDINARY_USER}"
    home.mkdir(exist_ok=True)
    command, python = as_ordinary_user(home)
    try:
        report = run_program("nothing", home=home, python=python, command=command)
    finally:
        Path("/dev/shm/relax-escape").unlink(missing_ok=True)
    escaped = report["escaped"]
    assert isinstance(escaped, list)
    assert len([line for line in escaped if line.startswith("ESCAPED")]) > len(ESCAPES) // 4


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
    "files of all together": """
import time
for n in range(99):
    open(f'file{n}', 'wb').write(bytes(8_000_000))
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
        r"programs are isolated by .*; 11 known escapes tried, none succeeds", check_isolation()
    )


def test_doctor_names_the_sandbox_escapes_that_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        isolation_check, "ESCAPES", {"add numbers": "1 + 1", "divide by zero": "1 / 0"}
    )
    with pytest.raises(CheckFailed, match=r"a program isolated by .* can add numbers$"):
        check_isolation()


CONFINED = """
import os, socket, sys
from relax_events.sandbox.confined import confine
secret, port = sys.argv[1], int(sys.argv[2])
confine()
ways = {
    "read": lambda: open(secret).read(),
    "write": lambda: open(secret, "w"),
    "connect": lambda: socket.create_connection(("127.0.0.1", port), 2),
    "fork": os.fork,
    "execute": lambda: os.execv("/bin/true", ["true"]),
    "signal": lambda: os.kill(os.getppid(), 0),
}
for name, way in ways.items():
    try:
        way()
    except OSError:
        continue
    print(name)
import decimal, json.tool
print("still works")
"""


def test_confined_decoder_process_has_no_access_to_files_network_or_processes(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("of the account")
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [
            sys.executable,
            "-c",
            CONFINED,
            str(tmp_path / "secret"),
            str(server.getsockname()[1]),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (result.returncode, result.stdout) == (0, "still works\n"), result.stderr


def test_decoder_runs_confined() -> None:
    decoder = Decoder(MediaConfig())
    with pytest.raises(MediaError):
        decoder.inspect(b"no image", Modality.IMAGE, location="test")
    status = Path(f"/proc/{decoder.pid}/status").read_text()
    assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
    assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE)
