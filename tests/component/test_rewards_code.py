"""The code reward: programs against tests in the sandbox; which pass, which fail, and what must not
leave it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from escapes import programs_left

from relax_events.attacks.options import UNPROTECTED
from relax_events.errors import ConfigError, EnvironmentProblem, RewardError
from relax_events.packages.verifiers.code import code, python_block
from relax_events.packages.verifiers.code import read_tests as read_tests
from relax_events.rewards.registry import load_reward
from relax_events.sandbox import (
    Isolation,
    Limits,
    Sandbox,
    Verdict,
    find_isolation,
    probing,
    require_isolation,
)

pytestmark = pytest.mark.unit


def score(
    program: str, metadata: dict[str, Any], *, answer: str = "", **options: Any
) -> dict[str, float]:
    return code(
        f"Here it is:\n```python\n{program}\n```\n",
        answer=answer,
        metadata=metadata,
        prompt="",
        **options,
    )


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
        (
            "def f(x, y):\n    return (y, x)",
            {"inputs": [[1, "a"]], "outputs": [["a", 1]], "fn_name": "f"},
        ),
        (
            "class Solution:\n    def f(self, x):\n        return x",
            {"inputs": [[[3]]], "outputs": [[3]], "fn_name": "f"},
        ),
        ("import sys\nprint('3 4  ')\nsys.exit(0)", {"inputs": [""], "outputs": ["3  4\n\n"]}),
        ("print(round(1 / 3, 6))", {"inputs": [""], "outputs": ["0.333333333333"]}),
        ("print([round(1 / 3, 6), 2])", {"inputs": [""], "outputs": ["[0.333333333333, 2]"]}),
        (
            "def f(x):\n    return [round(x / 3, 7), 2**100]",
            {"inputs": [[1]], "outputs": [[1 / 3, 2**100]], "fn_name": "f"},
        ),
    ],
)
def test_code_passes_its_tests(program: str, metadata: dict[str, Any]) -> None:
    assert score(program, metadata) == {"reward": 1.0, "passed": 1.0, "has_code": 1.0}


@pytest.mark.parametrize("metadata", [{"tests": ["assert f(1) == 2"]}, IN_AND_OUT])
def test_code_is_scored_when_worker_files_are_private_to_its_user(
    metadata: dict[str, Any],
) -> None:
    """As root a program becomes another user, who must be able to read it."""
    before = os.umask(0o077)
    try:
        assert (
            score("def f(x):\n    return x + 1" if "tests" in metadata else DOUBLE, metadata)[
                "reward"
            ]
            == 1.0
        )
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("program", "metadata"),
    [
        ("print(0.34)", {"inputs": [""], "outputs": ["0.333333333333"]}),
        ("print([0.34, 2])", {"inputs": [""], "outputs": ["[0.333333333333, 2]"]}),
        ("print(10**30 + 1)", {"inputs": [""], "outputs": [str(10**30)]}),
        (
            "def f(x):\n    return [x / 3, 2**100 + 1]",
            {"inputs": [[1]], "outputs": [[1 / 3, 2**100]], "fn_name": "f"},
        ),
    ],
)
def test_code_fails_for_another_number(program: str, metadata: dict[str, Any]) -> None:
    assert score(program, metadata)["reward"] == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "def f(x):\n    return x",
        "def g(x):\n    return x",
        "1 / 0",
        "def f(:",
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "",
    ],
)
def test_code_that_is_wrong_or_exits_early_gets_zero_reward(program: str) -> None:
    assert score(program, {"tests": ["assert f(1) == 2"]}) == {
        "reward": 0.0,
        "passed": 0.0,
        "has_code": 1.0,
    }


def test_tests_in_a_reference_answer_keep_each_digit() -> None:
    answer = json.dumps({"inputs": [[1]], "outputs": [2**100], "fn_name": "f"})
    assert score("def f(x):\n    return x * 2**100", {}, answer=answer)["reward"] == 1.0
    assert score("def f(x):\n    return 2**100 + 1", {}, answer=answer)["reward"] == 0.0


def test_code_reward_is_the_share_of_passed_tests_if_partial_is_set() -> None:
    program = "print(abs(2 * int(input())))"
    assert score(program, IN_AND_OUT, partial=True) == {
        "reward": pytest.approx(2 / 3),
        "passed": pytest.approx(2 / 3),
        "has_code": 1.0,
    }
    assert score(program, IN_AND_OUT)["reward"] == 0.0


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
def test_code_that_exceeds_a_sandbox_limit_is_a_reward_failure(program: str) -> None:
    with pytest.raises(RewardError, match=r"the program exceeded a limit of the sandbox: 0\.7 s"):
        score(program, {"tests": ["pass"]}, test_seconds=0.7)
    assert not programs_left()


def test_code_that_exceeds_a_sandbox_limit_gets_the_configured_limit_reward() -> None:
    assert (
        score("while True: pass", {"tests": ["pass"]}, test_seconds=0.3, limit_reward=-1.0)[
            "reward"
        ]
        == -1.0
    )


def test_code_reward_reads_tests_from_the_reference_answer() -> None:
    assert score("x = 1", {}, answer='["assert x == 1"]')["reward"] == 1.0
    assert score(DOUBLE, {}, answer='{"inputs": ["2"], "outputs": ["5"]}')["reward"] == 0.0


@pytest.mark.parametrize(
    "metadata", [{}, {"tests": []}, {"tests": [3]}, {"inputs": ["1"], "outputs": []}]
)
def test_code_reward_without_tests_is_a_failure(metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"the sample has no tests; see metadata\.tests"):
        score("x = 1", metadata)


def test_completion_without_a_code_block_gets_zero_reward() -> None:
    assert code("x = 1", answer="", metadata={"tests": ["pass"]}, prompt="") == {
        "reward": 0.0,
        "passed": 0.0,
        "has_code": 0.0,
    }


def test_last_python_block_after_the_reasoning_is_used() -> None:
    text = (
        "<think>\n```python\na\n```\n</think>\n```py\nb\n```\n```python\nc\n```\n```bash\nd\n```\n"
    )
    assert python_block(text) == "c\n"
    assert python_block("```\ne\n```") == "e\n"
    assert python_block("```rust\ne\n```") is None


def test_function_call_results_are_compared_as_json() -> None:
    (test,) = read_tests({"inputs": [3], "outputs": ["it's"], "fn_name": "f"})
    assert "result = json.loads(json.dumps(function(*json.loads('[3]'))))\n" in test
    assert "assert are_close(result, json.loads('\"it\\'s\"'))\n" in test


def test_sandbox_has_no_network_or_environment_and_ends_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "x")
    left_behind = "987654"
    solution = (
        "import os, socket, subprocess\n"
        "assert 'SECRET_OF_THE_WORKER' not in os.environ\n"
        f"subprocess.Popen(['sleep', '{left_behind}'], start_new_session=True)\n"
        "open('mine', 'w').write('kept here')\n"
        "try:\n    socket.create_connection(('127.0.0.1', 9), timeout=1)\nexcept "
        "PermissionError as error:\n    print('refused')\n"
    )
    with Sandbox(solution, Limits(), isolation=require_isolation()) as sandbox:
        verdict, printed = sandbox.run_with_input("")
    assert verdict is Verdict.PASSED
    assert printed == "refused\n"
    deadline = time.monotonic() + 60
    while any(
        process.info["cmdline"] == ["sleep", left_behind]
        for process in psutil.process_iter(["cmdline"])
    ):
        assert time.monotonic() < deadline
    assert not list(Path(tempfile.gettempdir()).glob("relax-sandbox-*/*/mine"))


def test_sandbox_that_can_not_be_set_up_is_a_failure() -> None:
    with (
        Sandbox("x = 1", Limits(), isolation=Isolation(("false",), has_namespaces=True)) as sandbox,
        pytest.raises(RewardError, match="could not be set up"),
    ):
        sandbox.run_with_input("")


def test_programs_are_not_run_without_file_isolation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "find_isolation", lambda: Isolation(filters=True))
    with pytest.raises(
        EnvironmentProblem,
        match=r"nothing isolates them from files .*reward\.options\.allow_unprotected = true",
    ):
        score("x = 1", {"tests": ["pass"]})
    assert require_isolation(allow_unprotected=True) == Isolation(filters=True)


@pytest.mark.parametrize("value", UNPROTECTED)
def test_only_true_gives_up_the_isolation(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(probing, "find_isolation", lambda: Isolation(filters=True))
    with pytest.raises(EnvironmentProblem, match="nothing isolates them from files"):
        require_isolation(allow_unprotected=value)
    with pytest.raises(ConfigError, match=r"reward\.options\.allow_unprotected: .* valid boolean"):
        load_reward("code", options={"allow_unprotected": value})


def test_programs_are_not_run_without_network_isolation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "find_isolation", lambda: Isolation(landlock=7))
    with pytest.raises(EnvironmentProblem, match=r"from the network .* and other processes"):
        require_isolation()


@pytest.mark.parametrize(
    ("user", "remedy"), [(0, "run it as a user other than root"), (1000, "install bubblewrap")]
)
def test_machine_where_no_interpreter_starts_in_isolation_is_rejected(
    user: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "_works", lambda _: False)
    monkeypatch.setattr(probing.os, "geteuid", lambda: user)
    with pytest.raises(EnvironmentProblem, match=f"does not start in any isolation; {remedy}"):
        find_isolation.__wrapped__()


DEFINITIONS = """
from collections import Counter, namedtuple
import functools
Point = namedtuple('Point', 'x y')
class Refused(ValueError): pass
class Stack:
    limit = 2
    def __init__(self, *held): self.held = list(held)
    def push(self, one):
        if len(self.held) >= self.limit: raise Refused('full')
        self.held.append(one)
        return self
    def __len__(self): return len(self.held)
    def __iter__(self): return iter(self.held)
    def __getitem__(self, index): return self.held[index]
    def __eq__(self, other): return isinstance(other, Stack) and self.held == other.held
    def __repr__(self): return f'Stack({self.held})'
def same(x): return x
def sort(values): values.sort()
def count(text): return Counter(text)
def upto(n): yield from range(n)
def apply(function, *values): return [function(one) for one in values]
def adder(n): return lambda x: x + n
def point(): return Point(1, 2)
@functools.cache
def cached(x): return x
CONSTANT = {'a': (1, [2.5])}
"""


@pytest.mark.parametrize(
    "test",
    [
        (
            "value = (1, [2, {'a': {3}}], None, True, 1.5, b'x', 10**2000, 1j)\nassert "
            "same(value) == value"
        ),
        (
            "assert same({(1, 2): frozenset([3])}) == {(1, 2): frozenset([3])} and "
            "type(same((1,))) is tuple and same(float('inf')) > 1e308"
        ),
        (
            "from datetime import date as d\nfrom fractions import Fraction as F\nfor x in (F(1, "
            "3), d(2020, 1, 2)): assert same(x) == x"
        ),
        "values = [3, 1, 2]\nsort(values)\nassert values == [1, 2, 3]",
        "assert count('aab') == {'a': 2, 'b': 1} and count('aab').most_common(1) == [('a', 2)]",
        "assert list(upto(3)) == [0, 1, 2] and sum(upto(4)) == 6 and next(upto(1)) == 0",
        "assert apply(lambda x: x * 2, 1, 2) == [2, 4] and apply(str, 1) == ['1']",
        "assert adder(2)(3) == 5 and cached(4) == 4 and CONSTANT['a'][1] == [2.5]",
        "assert point() == (1, 2) and point().x == 1",
        (
            "s = Stack(1)\ns.push(2)\nassert len(s) == 2 and list(s) == [1, 2] and s[0] == 1 and "
            "2 in s and str(s) == 'Stack([1, 2])'"
        ),
        (
            "assert Stack(1) == Stack(1) and Stack(1) != Stack(2) and Stack() != 0 and "
            "isinstance(Stack(), Stack) and not Stack()"
        ),
        (
            "s = Stack(1, 2)\ntry:\n    s.push(3)\nexcept Refused as error:\n    assert "
            "str(error) == 'full'\nelse:\n    assert False"
        ),
        "try:\n    Stack(1, 2).push(3)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "from solution import same as f\nimport solution\nassert f(1) == solution.same(1) == 1",
        "def check(candidate):\n    assert candidate(7) == 7\ncheck(same)",
        (
            "s = Stack()\ns.limit = 1\nassert s.limit == 1 and Stack.limit == 2 and apply(len, "
            "s.push(1)) == [1]"
        ),
    ],
)
def test_tests_use_what_a_solution_defines(test: str) -> None:
    with Sandbox(DEFINITIONS, Limits(seconds=20), isolation=require_isolation()) as sandbox:
        assert sandbox.run_with_tests(test) is Verdict.PASSED


@pytest.mark.parametrize(
    "test",
    [
        "assert same(1) == 2",
        "assert same((1,)) == [1]",
        "assert Stack() == []",
        "sort(3)",
        "missing(1)",
        "1 / 0",
        "assert same(",
    ],
)
def test_sandbox_reports_failed_tests(test: str) -> None:
    with Sandbox(DEFINITIONS, Limits(seconds=20), isolation=require_isolation()) as sandbox:
        assert sandbox.run_with_tests(test) is Verdict.FAILED


def test_sandbox_limits_the_output_of_a_program() -> None:
    with Sandbox(
        "while True: print('x' * 10_000)", Limits(seconds=5), isolation=require_isolation()
    ) as sandbox:
        verdict, printed = sandbox.run_with_input("")
    assert verdict is not Verdict.PASSED
    assert len(printed) <= 16 * 1024**2
