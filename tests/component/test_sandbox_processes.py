"""Processes in a sandbox: their number is bounded whatever else their user runs, and the kernel
kills them first when memory runs out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from escape_program import KINDS, walls_of
from ordinary_user import ORDINARY_USER, as_ordinary_user

from relax_events.sandbox import Limits, Sandbox, Verdict
from relax_events.sandbox.runner import Runner

ROOT = Path(__file__).parents[2]
NUM_ELSEWHERE = 100
ELSEWHERE = f"""
import threading, time
for _ in range({NUM_ELSEWHERE}):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("up", flush=True)
time.sleep(600)
"""
STARTED = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    print(count)
"""
INSIDE = f"""
from escape_program import walls_of
from relax_events.sandbox import Limits, Sandbox
found = walls_of("landlock")
if found:
    with Sandbox({STARTED!r}, Limits(seconds=20), isolation=found) as sandbox:
        print(*sandbox.run_with_input(""))
else:
    print("no walls")
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[None]:
    """Many threads of the ordinary user, outside of the process namespace that the test makes."""
    command, python = as_ordinary_user(tmp_path)
    with subprocess.Popen(
        [*command, python, "-c", ELSEWHERE], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield
        process.kill()


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root makes a process namespace with users of the machine in it"
)
@pytest.mark.usefixtures("elsewhere")
def test_process_limit_ignores_processes_of_the_user_in_other_containers(
    tmp_path: Path,
) -> None:
    command, python = as_ordinary_user(tmp_path)
    paths = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1]),
        str(ROOT),
        *(path for path in sys.path if path.endswith("site-packages")),
    ]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": ":".join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    contained = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        *command,
        python,
        "-c",
        textwrap.dedent(INSIDE),
    ]
    result = subprocess.run(
        contained, capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    if result.stdout == "no walls\n":
        pytest.skip(f"this machine builds no walls of Landlock for user {ORDINARY_USER}")
    assert result.stdout == "passed 32\n\n"


def first_to_go() -> list[psutil.Process]:
    """Return processes of ours that the kernel ends before all others where memory runs out."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()) == 1000:
                found.append(process)
        except OSError:  # it has exited
            continue
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_sandboxed_program_is_the_first_to_be_killed_when_memory_runs_out(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (found := walls_of(kind)) is None:
        pytest.skip(f"this machine builds no walls of {kind}")
    program = "import time\ntime.sleep(600)\n"
    stand, start = threading.Event(), Runner.start

    def start_and_say(*arguments: Any) -> None:
        start(*arguments)
        stand.set()

    monkeypatch.setattr(Runner, "start", start_and_say)
    with (
        ThreadPoolExecutor(1) as pool,
        Sandbox(program, Limits(seconds=60), isolation=found) as sandbox,
    ):
        ending = pool.submit(sandbox.run_with_input, "")
        assert stand.wait(60), "before the walls stand its end is one of the sandbox"
        deadline = time.monotonic() + 60
        while not (going := first_to_go()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(going) == 1
        going[0].kill()
        assert ending.result()[0] is Verdict.OUT_OF_LIMITS
