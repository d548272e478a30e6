"""Programs against tests, in the sandbox: what passes, what fails, and what must not get out."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_events.errors import EnvironmentProblem, RewardError
from relax_events.rewards.verifiers import sandbox
from relax_events.rewards.verifiers.code import code, python_block
from relax_events.rewards.verifiers.code import tests_of as read_tests
from relax_events.rewards.verifiers.sandbox import Limits, Sandbox, Verdict, Walls, find_walls

pytestmark = pytest.mark.unit


def judge(program: str, metadata: dict[str, Any], *, answer: str = "", **options: Any) -> dict[str, float]:
    return code(f"Here it is:\n```python\n{program}\n```\n", answer=answer, metadata=metadata, prompt="", **options)


DOUBLE = "print(2 * int(input()))"
IN_AND_OUT = {"inputs": ["4\n", "-1", "0"], "outputs": ["8\n", "-2", "0"]}


@pytest.mark.parametrize(
    ("program", "metadata"),
    [
        ("def f(x):\n    return x + 1", {"tests": ["assert f(1) == 2", "assert f(-1) == 0"]}),
        ("def f(x):\n    return x + 1", {"test_list": ["assert f(1) == 2"]}),
        ("def f(x):\n    return x + 1", {"test": "for x in range(9):\n    assert f(x) == x + 1"}),
        (DOUBLE, IN_AND_OUT),
        (DOUBLE, {"tests": [{"input": "4", "output": "8"}]}),
        ("def f(x, y):\n    return (y, x)", {"inputs": [[1, "a"]], "outputs": [["a", 1]], "fn_name": "f"}),
        ("class Solution:\n    def f(self, x):\n        return x", {"inputs": [[[3]]], "outputs": [[3]], "fn_name": "f"}),
        ("import sys\nprint('3 4  ')\nsys.exit(0)", {"inputs": [""], "outputs": ["3  4\n\n"]}),
    ],
)
def test_code_passes_its_tests(program: str, metadata: dict[str, Any]) -> None:
    assert judge(program, metadata) == {"reward": 1.0, "passed": 1.0, "has_code": 1.0}


@pytest.mark.parametrize(
    "program", ["def f(x):\n    return x", "def g(x):\n    return x", "1 / 0", "def f(:", "import os\nos._exit(0)", "import sys\nsys.exit(0)", ""]
)
def test_code_that_is_wrong_or_leaves_early_gets_nothing(program: str) -> None:
    assert judge(program, {"tests": ["assert f(1) == 2"]}) == {"reward": 0.0, "passed": 0.0, "has_code": 1.0}


def test_code_gives_the_share_of_tests_when_asked() -> None:
    program = "print(abs(2 * int(input())))"
    assert judge(program, IN_AND_OUT, partial=True) == {"reward": pytest.approx(2 / 3), "passed": pytest.approx(2 / 3), "has_code": 1.0}
    assert judge(program, IN_AND_OUT)["reward"] == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "9**9**9**9",
        "bytearray(10**10)",
        "import ctypes\nctypes.string_at(0)",
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    ],
)
def test_code_that_runs_into_a_limit_is_a_counted_failure(program: str) -> None:
    with pytest.raises(RewardError, match=r"the program ran into a limit of the sandbox: 0\.7 s"):
        judge(program, {"tests": ["pass"]}, test_seconds=0.7)
    assert not [process for process in psutil.process_iter(["cmdline"]) if "sandbox_program" in " ".join(process.info["cmdline"] or ())]


def test_code_that_runs_into_a_limit_is_worth_what_the_options_say() -> None:
    assert judge("while True: pass", {"tests": ["pass"]}, test_seconds=0.3, limit_reward=-1.0)["reward"] == -1.0


def test_code_finds_tests_in_the_reference_answer() -> None:
    assert judge("x = 1", {}, answer='["assert x == 1"]')["reward"] == 1.0
    assert judge(DOUBLE, {}, answer='{"inputs": ["2"], "outputs": ["5"]}')["reward"] == 0.0


@pytest.mark.parametrize("metadata", [{}, {"tests": []}, {"tests": [3]}, {"inputs": ["1"], "outputs": []}])
def test_code_without_tests_is_a_failure(metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"the sample has no tests; see metadata\.tests"):
        judge("x = 1", metadata)


def test_code_without_a_block_gets_nothing() -> None:
    assert code("x = 1", answer="", metadata={"tests": ["pass"]}, prompt="") == {"reward": 0.0, "passed": 0.0, "has_code": 0.0}


def test_last_python_block_behind_the_reasoning_counts() -> None:
    text = "<think>\n```python\na\n```\n</think>\n```py\nb\n```\n```python\nc\n```\n```bash\nd\n```\n"
    assert python_block(text) == "c\n"
    assert python_block("```\ne\n```") == "e\n"
    assert python_block("```rust\ne\n```") is None


def test_calls_are_compared_as_json() -> None:
    (test,) = read_tests({"inputs": [3], "outputs": ["it's"], "fn_name": "f"})
    assert "assert json.loads(json.dumps(function(*json.loads('[3]')))) == json.loads" in test


def test_sandbox_has_no_network_no_environment_and_ends_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "x")
    left_behind = "987654"
    solution = (
        "import os, socket, subprocess\n"
        "assert 'SECRET_OF_THE_WORKER' not in os.environ\n"
        f"subprocess.Popen(['sleep', '{left_behind}'], start_new_session=True)\n"
        "open('mine', 'w').write('kept here')\n"
        "others = [name for name in os.listdir('/proc') if name.isdigit() and int(name) > 20]\n"
        "try:\n    socket.create_connection(('127.0.0.1', 9), timeout=1)\nexcept OSError as error:\n    print(error.errno, len(others))\n"
    )
    with Sandbox(solution, Limits()) as box:
        verdict, printed = box.run_with_input("")
    assert verdict is Verdict.PASSED
    if "--mount-proc" in find_walls().command:
        assert printed == "101 0\n"  # the network is unreachable, even the own machine's, and no other process is to be seen
    deadline = time.monotonic() + 5
    while any(process.info["cmdline"] == ["sleep", left_behind] for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline
    assert not list(Path(tempfile.gettempdir()).glob("relax-sandbox-*/mine"))


def test_sandbox_that_can_not_be_set_up_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "find_walls", lambda: Walls(("false",), True, None))
    with pytest.raises(RewardError, match=r"the sandbox could not be set up within 30 s \(exit code "):
        judge("x = 1", {"tests": ["pass"]})


def test_sandbox_without_namespaces_ends_the_programs_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "find_walls", lambda: Walls((), False, None))
    assert judge(DOUBLE, IN_AND_OUT)["reward"] == 1.0
    with pytest.raises(RewardError, match="ran into a limit"):
        judge("import subprocess\nsubprocess.run(['sleep', '987655'])", {"tests": ["pass"]}, test_seconds=0.7)
    left = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "987655"]]
    assert psutil.wait_procs(left, timeout=5)[1] == []  # it is killed, and may take a moment to go


def test_walls_of_an_ordinary_user_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, ...]] = []
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sandbox, "_leads_to_python", lambda command: tried.append(command) or len(tried) == 3)
    assert find_walls.__wrapped__() == Walls((), False, None)
    assert tried[0] == (*tried[1], "--mount-proc")
    assert tried[1][:3] == ("unshare", "--user", "--map-current-user")


def test_root_that_can_not_become_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 0)
    monkeypatch.setattr(sandbox, "_leads_to_python", lambda _: False)
    with pytest.raises(EnvironmentProblem, match="as root, programs can only be judged as another user"):
        find_walls.__wrapped__()


def test_sandbox_bounds_what_a_program_writes() -> None:
    with Sandbox("while True: print('x' * 10_000)", Limits(seconds=5)) as box:
        verdict, printed = box.run_with_input("")
    assert verdict is not Verdict.PASSED
    assert len(printed) <= 16 * 1024**2
