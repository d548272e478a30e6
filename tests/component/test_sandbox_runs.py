"""Runs of one sandbox, one after another: nothing of a run reaches the next, whatever it did."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from escape_program import KINDS, walls_of
from escapes import programs_left

from relax_events.sandbox import Isolation, Limits, Sandbox, Verdict

LEFT = f"98765{os.getpid()}"  # of this process: others run the same tests
LEAVES_THINGS = f"""
import os, subprocess, sys
print(os.listdir('.'))
os.makedirs('folder/in/folder')
os.symlink('/usr', 'folder/link')
os.unlink('solution.py')
open('solution.py', 'w').write('print("written by a run before")')
subprocess.Popen(['sleep', '{LEFT}'], start_new_session=True, stdout=subprocess.DEVNULL)
"""
LEAVES_DEEP_FOLDERS = """
import os
print(os.listdir('.'))
for _ in range(1500):
    os.mkdir('d')
    os.chdir('d')
"""
COUNTS = "import json\ncalls = []\ndef f():\n    json.seen = calls\n    calls.append(1)\n    return len(calls)\n"
ATTACKS = """
import os, signal, time
if input() == 'attack':
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        for pid in (os.getppid(), 1):
            try: os.kill(pid, number)
            except OSError: pass
    for number in range(3, 64):
        for pid in ('self', os.getppid()):
            try: os.write(os.open(f'/proc/{pid}/fd/{number}', os.O_WRONLY), b'0')
            except OSError: pass
        try: os.write(number, b'0')
        except OSError: pass
    time.sleep(60)
print('done')
"""
OWNER = """
import sys
from escape_program import walls_of
from relax_events.sandbox import Limits, Sandbox, runner
walls = walls_of(sys.argv[1])  # the search for them starts programs too
start = runner.Runner.start
def start_and_say(one, *arguments):
    start(one, *arguments)
    print(one._process.pid, flush=True)
runner.Runner.start = start_and_say
with Sandbox('import time\\ntime.sleep(600)', Limits(600), isolation=walls) as one:
    one.run_with_input('')
"""


@pytest.fixture(params=KINDS)
def walls(request: pytest.FixtureRequest) -> Isolation:
    found = walls_of(request.param)
    if found is None:
        pytest.skip(f"this machine builds no walls of {request.param}")
    return found


@pytest.fixture
def first_processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process ids of the isolations that are set up."""
    found: list[int] = []

    class Counted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            found.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    return found


def left_running() -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["cmdline"] == ["sleep", LEFT]
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_run_finds_no_file_or_process_of_the_run_before(walls: Isolation) -> None:
    with Sandbox(LEAVES_THINGS, Limits(seconds=60), isolation=walls) as sandbox:
        for _ in range(3):
            assert sandbox.run_with_input("") == (Verdict.PASSED, "['solution.py']\n")
            assert not left_running()


def test_run_finds_no_folder_of_a_run_before_that_python_cannot_delete(walls: Isolation) -> None:
    with Sandbox(LEAVES_DEEP_FOLDERS, Limits(seconds=60), isolation=walls) as sandbox:
        for _ in range(2):
            assert sandbox.run_with_input("") == (Verdict.PASSED, "['solution.py']\n")
    assert not sandbox._folder.exists()


def test_isolation_is_set_up_once_for_all_tests_and_each_meets_a_new_process(
    walls: Isolation, first_processes: list[int]
) -> None:
    with Sandbox(COUNTS, Limits(seconds=60), isolation=walls) as sandbox:
        for _ in range(4):
            assert sandbox.run_with_tests("assert f() == 1") is Verdict.PASSED
            assert sandbox.run_with_tests("assert f() == 2") is Verdict.FAILED
            test = "import json\nassert not hasattr(json, 'seen') and f() + f() == 3"
            assert sandbox.run_with_tests(test) is Verdict.PASSED
    assert len(first_processes) == 2
    assert not programs_left()


def test_isolation_in_which_files_outlive_a_run_is_set_up_for_each_run(
    first_processes: list[int],
) -> None:
    if (found := walls_of("bubblewrap")) is None:
        pytest.skip("this machine builds no walls of bubblewrap")
    program = "import os\nprint(os.listdir('/tmp'))\nopen('/tmp/mine', 'w').close()"
    isolation = dataclasses.replace(found, landlock=0)
    first_processes.clear()  # of the search for the walls
    with Sandbox(program, Limits(seconds=60), isolation=isolation) as sandbox:
        for _ in range(2):
            verdict, printed = sandbox.run_with_input("")
            assert verdict is Verdict.PASSED
            assert "mine" not in printed
    assert len(first_processes) == 2


def test_run_passes_after_one_that_attacked_the_first_process(
    walls: Isolation, first_processes: list[int]
) -> None:
    with Sandbox(ATTACKS, Limits(seconds=5), isolation=walls) as sandbox:
        for _ in range(2):
            assert sandbox.run_with_input("attack") == (Verdict.OUT_OF_LIMITS, "")
            assert sandbox.run_with_input("nothing") == (Verdict.PASSED, "done\n")
            assert sandbox.run_with_input("nothing") == (Verdict.PASSED, "done\n")
    assert len(first_processes) == 3
    assert not programs_left()


@pytest.mark.parametrize("kind", KINDS)
def test_program_ends_with_the_process_that_started_its_sandbox(kind: str) -> None:
    if walls_of(kind) is None:
        pytest.skip(f"this machine builds no walls of {kind}")
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parents[1]), *sys.path]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.environ["PATH"]}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, kind], stdout=subprocess.PIPE, env=environment
    ) as owner:
        assert owner.stdout is not None
        first = psutil.Process(int(owner.stdout.readline()))
        deadline = time.monotonic() + 60
        while not (programs := first.children(recursive=True)):
            assert owner.poll() is None, "the program has ended by itself"
            assert time.monotonic() < deadline, "no program was seen"
            time.sleep(0.05)
        owner.kill()
        owner.wait()
    while [process for process in (first, *programs) if process.is_running()]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
