"""The verdict belongs to the tests: no wrong program passes, whatever it defines, and right programs
do, also where they define the same names for their own use.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from relax_events.attacks.covered_names import FUNCTIONS, MODULES
from relax_events.attacks.right_programs import list_right_programs
from relax_events.attacks.trick import Trick
from relax_events.attacks.verdict_tricks import list_tricks
from relax_events.packages.verifiers.code import code, explain_code
from relax_events.sandbox import Limits, Sandbox, Verdict, require_isolation

SHELL = Path(__file__).parents[2] / "configs" / "agents" / "sandboxed_shell.py"
TRICKS, RIGHT_PROGRAMS = list_tricks(), list_right_programs()
LIMITS = Limits(seconds=20)


def names_of(tricks: list[Trick]) -> list[str]:
    return [trick.name for trick in tricks]


def test_tricks_are_many_and_different() -> None:
    assert len(set(names_of(TRICKS))) == len(TRICKS) > 150
    assert len({(trick.program, trick.tests) for trick in TRICKS}) == len(TRICKS)
    assert len(set(names_of(RIGHT_PROGRAMS))) == len(RIGHT_PROGRAMS) > 25
    covered = {trick.name.partition(" as ")[0] for trick in TRICKS}
    assert covered >= {*FUNCTIONS, *MODULES}


@pytest.mark.parametrize("trick", TRICKS, ids=names_of(TRICKS))
def test_wrong_program_does_not_pass(trick: Trick) -> None:
    with Sandbox(trick.program, LIMITS, isolation=require_isolation()) as sandbox:
        assert sandbox.run_with_tests(trick.tests) is Verdict.FAILED


@pytest.mark.parametrize("right", RIGHT_PROGRAMS, ids=names_of(RIGHT_PROGRAMS))
def test_right_program_passes_whatever_names_it_uses(right: Trick) -> None:
    with Sandbox(right.program, LIMITS, isolation=require_isolation()) as sandbox:
        assert sandbox.run_with_tests(right.tests) is Verdict.PASSED


def score(program: str, metadata: dict[str, Any]) -> float:
    completion = f"```python\n{program}\n```"
    return code(completion, answer="", metadata=metadata, prompt="", test_seconds=20.0)["reward"]


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def f(x):\n    return x * x", 1.0),
        ("def f(x):\n    return 0\nabs = lambda x: 0", 0.0),
        ("def g(x):\n    return x * x", 0.0),
    ],
)
def test_code_calls_the_check_of_a_row_with_its_entry_point(program: str, reward: float) -> None:
    test = "def check(candidate):\n    assert abs(candidate(1.5) - 2.25) < 1e-6\n"
    assert score(program, {"test": test, "entry_point": "f"}) == reward


@pytest.mark.parametrize(
    ("program", "tests", "why"),
    [
        ("def f(x): return 9", ["assert f(3) == 9"], r"all tests pass"),
        (
            "def f(x): return 0",
            ["assert f(0) == 0", "y = 9\nassert f(3) == y"],
            r"test 2 of 2 failed: AssertionError in line 2 of the tests",
        ),
        (
            "class math: isclose = max\ndef f(x): return 1",
            ["assert math.isclose(f(3), 9)"],
            r"test 1 of 1 failed: NotForTests: the tests read 'math', .*",
        ),
        (
            "def f(x): return 9",
            ["def test(x): assert f(3) == 9"],
            r".*: NeverCalled: .*entry_point",
        ),
        ("import os\ndef f(x): os._exit(0)", ["assert f(3) == 9"], r"test 1 of 1 failed: Gone.*"),
    ],
)
def test_explanation_names_the_test_that_fails_and_why(
    program: str, tests: list[str], why: str
) -> None:
    completion = f"```python\n{program}\n```"
    explanation = explain_code(
        completion, answer="", metadata={"tests": tests}, prompt="", test_seconds=20.0
    )
    assert re.fullmatch(why, explanation.why)
    assert explanation.answer == program + "\n"


def hidden_tests(text: str, *, tests: list[str]) -> dict[str, float]:
    spec = importlib.util.spec_from_file_location("sandboxed_shell", SHELL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    action = f"```mswea_bash_command\ncat > f.py << 'END'\n{text}\nEND\n```"
    scores: dict[str, float] = module.hidden_tests(
        "",
        answer=orjson.dumps({"tests": tests}).decode(),
        metadata={"files": {"f.py": "def f(x):\n    return x\n"}},
        prompt="",
        turns=[{"role": "assistant", "content": action}],
    )
    return scores


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("def f(x):\n    return x * x", 1.0),
        ("def abs(x):\n    return 7\ndef f(x):\n    return x * x", 1.0),
        ("def f(x):\n    return x\nabs = lambda x: 0", 0.0),
        ("import builtins\nbuiltins.abs = abs = lambda x: 0\nf = abs", 0.0),
    ],
)
def test_file_that_an_agent_writes_does_not_decide_its_hidden_tests(
    text: str, reward: float
) -> None:
    tests = ["assert abs(f(1.5) - 2.25) < 1e-6", "assert abs(f(-3) - 9) < 1e-6"]
    assert hidden_tests(text, tests=tests) == {
        "reward": reward,
        "passed": reward,
        "has_code": 1.0,
        "num_actions": 1.0,
    }
