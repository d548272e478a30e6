"""Which names tests take from a solution, and what is said where they may not."""

from __future__ import annotations

import io
import math
import sys
from collections import Counter
from typing import Any

import pytest

from relax_events.sandbox.inside import entry

assert entry  # it makes the modules of its folder importable by their names

from names_in_code import find_names, list_imports  # noqa: E402
from readable_names import choose_definitions  # noqa: E402
from run_tests import NotForTests, execute_tests  # noqa: E402
from to_solution import ToSolution  # noqa: E402


class Defined:
    """An object of a solution that says to be defined in a module."""

    def __init__(self, home: str | None = None) -> None:
        self._home = home


def choose(tests: str, **defined: Any) -> dict[str, Any]:
    return choose_definitions(defined, find_names(compile(tests, "tests.py", "exec")))


@pytest.mark.parametrize(
    ("tests", "names", "chosen"),
    [
        ("assert f(1) == 2", "f g", "f g"),
        ("assert abs(f(1)) == 2", "f abs", "f"),
        ("assert sum(1, 2) == 3", "sum", "sum"),
        ("assert sum(f(1)) == 3", "sum", ""),
        ("assert abs(gcd(4, 6)) == 2", "gcd abs", "gcd"),
        ("assert math.isclose(f(1), 2)", "f math", "f"),
        ("assert string(1) == 2", "string", "string"),
        ("assert string(eval('f(1)')) == 2", "string f", "f"),
        ("import sys\nassert string(sys.modules['solution'].f(1)) == 2", "string f", "f"),
        ("import math\nassert math.isclose(f(1), 2)", "f math", "f"),
        ("def check(candidate): pass\ncheck(f)", "f check", "f"),
        ("check(f)", "f check", "f"),
        ("check(3)", "check", "check"),
        ("ok = f(1)\nassert ok", "f ok", "f"),
        ("try:\n    f(1)\nexcept ValueError:\n    ok = 1\nassert ok", "f ok", "f"),
        ("g = f\ndef f(x): return g(x)", "f g", "f"),
        ("def run():\n    global ok\n    ok = f(1)\nrun()\nassert ok", "f ok run", "f"),
        ("assert [f(x) for x in y]", "f x y", "f x y"),
        ("class A:\n    y = 1\n    z = y", "y z", "y z"),
        ("from solution import f\nassert f(1) == g(1)", "f g", ""),
        ("from solution import *\nassert abs(f(1)) == g(1)", "f g abs", "f g"),
        ("def run():\n    import solution\n    return solution.f(1)", "f g", ""),
    ],
)
def test_tests_read_only_what_does_not_judge(tests: str, names: str, chosen: str) -> None:
    assert set(choose(tests, **dict.fromkeys(names.split(), Defined()))) == set(chosen.split())


def test_tests_get_their_own_object_where_the_solution_imports_a_library() -> None:
    tests = "assert math.isclose(f(1), pi) and Counter(f(2)) == Counter(g(1))"
    defined = {"math": Defined("module"), "pi": math.pi, "Counter": Defined("collections")}
    chosen = choose(tests, f=Defined(), g=Defined(), **defined)
    assert (chosen["math"], chosen["pi"], chosen["Counter"]) == (math, math.pi, Counter)
    defined = {"math": Defined(), "pi": 3.0, "Counter": Defined("solution")}
    assert set(choose(tests, f=Defined(), g=Defined(), **defined)) == {"f", "g"}


def test_imports_are_found_outside_of_functions_alone() -> None:
    source = (
        "x = 'é'; import math\nif x:\n    from collections import (\n        Counter,\n"
        "        deque as d,\n    )\ndef f():\n    import json\ntext = 'import os'\n"
    )
    assert list(list_imports(compile(source, "tests.py", "exec"), source)) == [
        "import math",
        "from collections import (\n        Counter,\n        deque as d,\n    )",
    ]


def test_names_after_many_constants_and_names_are_found() -> None:
    source = "\n".join(f"a{number} = f({number}, b{number})" for number in range(700))
    names = find_names(compile(source, "tests.py", "exec"))
    assert names.bound == {f"a{number}" for number in range(700)}
    assert names.first_read == {"f", *(f"b{number}" for number in range(700))}


def test_test_that_reads_a_dropped_name_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "solution", None)
    defined = {"f": lambda x: 0, "math": Defined()}
    connection = ToSolution(io.BytesIO(), io.BytesIO(), serves=())
    with pytest.raises(NotForTests, match=r"the tests read 'math', .*; import or define 'math'"):
        execute_tests("assert math.isclose(f(1), 2)", defined, connection)
