"""Programs that use gaps of tests: names, helpers, and calls that a test runner makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_events.attacks.trick import Trick
from relax_events.packages.verifiers.code import read_tests

WRONG = "def f(*arguments): return 0\n"
CHECK = "def check(candidate):\n    assert candidate(1.5) == 2.25\n"
CASES = (
    "import unittest\n\n\nclass TestCases(unittest.TestCase):\n    def test_one(self):\n"
    "        self.assertEqual(f(2), 4)\n"
)
POLYNOMIAL = (
    "def check(candidate):\n    for c in ([1, 2], [-6, 11, -6, 1]):\n"
    "        assert abs(poly(c, candidate(c))) < 1e-4\n"
)
SEND = (
    "import os\nmessage = {message!r}\nfor number in range(1, 64):\n"
    "    try: os.write(number, message + b'\\n')\n    except OSError: pass\n"
)
FORGED_BUILTINS = (
    b'{"defined": {"f": ["builtin", "abs"], "__builtins__": ["dict", [["abs", ["builtin", '
    b'"float"]], ["AssertionError", ["builtin", "ValueError"]]]]}}'
)
FORGED_NAME = b'{"defined": {"f": ["builtin", "abs"], "abs": ["builtin", "float"]}}'
PROGRAMS = {
    "a name that only a passing test binds": (
        WRONG + "ok = True\n",
        "try:\n    f(-1)\nexcept ValueError:\n    ok = True\nassert ok",
    ),
    "a name that a loop binds": (
        "expected = 0\n" + WRONG,
        "for given, expected in [(2, 4)]:\n    pass\nassert f(given) == expected",
    ),
    "a name that an import binds": (
        WRONG + "isclose = lambda *a, **k: True\n",
        (
            "try:\n    from missing_library import isclose\nexcept ImportError:\n    pass\n"
            "assert isclose(f(1.5), 2.25)"
        ),
    ),
    "a name before its import": (
        WRONG + "Counter = lambda *a: 0\n",
        "assert Counter(f('aab')) == Counter('abc')\nfrom collections import Counter",
    ),
    "a library's function under another's name": (
        WRONG + "from typing import cast as isclose\n",
        "assert isclose(f(1.5), 2.25)",
    ),
    "a module under another's name": (
        WRONG + "import unittest.mock as math\nmath.isclose = lambda *a, **k: True\n",
        "assert math.isclose(f(1.5), 2.25)",
    ),
    "a module that says to be another": (
        WRONG + "import types\nnp = types.ModuleType('numpy')\nnp.allclose = lambda *a: True\n",
        "assert np.allclose(f(1.5), 2.25)",
    ),
    "a function that says to be a library's": (
        WRONG + "def isclose(*a, **k): return True\nisclose.__module__ = 'math'\n",
        "assert isclose(f(1.5), 2.25)",
    ),
    "everything of the solution": (
        WRONG + "abs = lambda x: 0\n__all__ = ['f', 'abs']\n",
        "from solution import *\nassert abs(f(1.5) - 2.25) < 1e-6",
    ),
    "attributes of the solution": (
        WRONG + "def __getattr__(name): return lambda *a, **k: True\n",
        "import solution\nassert solution.g(2) is True",
    ),
    "hooks of unittest": (
        WRONG + "def load_tests(*a): return []\ndef setUpModule(): raise SystemExit(0)\n",
        CASES + "unittest.main()\n",
    ),
    "skipping a case": (
        "import unittest\ndef f(*a): raise unittest.SkipTest('not today')\n",
        CASES,
    ),
    "cases that are not run": (WRONG, CASES),
    "cases that only a program runs": (
        WRONG + "__name__ = 'other'\n",
        CASES + "if __name__ == '__main__':\n    unittest.main()\n",
    ),
    "another class for cases": (
        WRONG + "class TestCase:\n    def assertEqual(self, *a): pass\n",
        (
            "import unittest\nfrom unittest import TestCase\n\n\nclass Cases(TestCase):\n"
            "    def test_one(self):\n        self.assertEqual(f(2), 4)\n"
        ),
    ),
    "functions that are not run": (WRONG, "def test_f():\n    assert f(2) == 4\n"),
    "functions with arguments that are not run": (WRONG, "def test_f(x):\n    assert f(x) == 4\n"),
    "a check that is not run": (WRONG, CHECK),
    "coroutines that are not run": (WRONG, "async def test_f():\n    assert f(2) == 4\n"),
    "methods that are not run": (
        WRONG,
        "class TestF:\n    def test_one(self):\n        assert f(2) == 4\n",
    ),
    "a main function that is not run": (WRONG, "def main():\n    assert f(2) == 4\n"),
    "a class that is not used": (
        WRONG,
        "class Checks:\n    def run(self):\n        assert f(2) == 4\n",
    ),
    "a call that only a script makes": (
        WRONG,
        CHECK + "\nif __name__ == '__main__':\n    check(f)\n",
    ),
    "a check that the tests lack": (WRONG + "def check(f): pass\n", "check(f)"),
    "other builtins": (SEND.format(message=FORGED_BUILTINS), "assert abs(f(1.5) - 2.25) < 1e-6"),
    "other names to import": (
        SEND.format(message=FORGED_NAME),
        "from solution import *\nassert abs(f(1.5) - 2.25) < 1e-6",
    ),
    "two covers": (
        WRONG + "abs = round = lambda *a: 0\n",
        "assert round(abs(f(1.5) - 2.25), 6) == 0",
    ),
    "a cover that a function reads": (
        WRONG + "abs = lambda *a: 0\n",
        "def is_near(a, b):\n    return abs(a - b) < 1e-6\nassert is_near(f(1.5), 2.25)",
    ),
    "a cover in a class": (
        WRONG + "set = lambda *a: 0\n",
        "class Tests:\n    expected = set((4, 5))\nassert set(f(3)) == Tests.expected",
    ),
    "a cover without the function": (
        "all = lambda *a: True\n",
        "assert all(f(x) == y for x, y in [(1, 1), (2, 4)])",
    ),
    "a cover of what is read by name": (
        WRONG + "isclose = lambda *a, **k: True\n",
        "assert isclose(globals()['f'](1.5), 2.25)",
    ),
}
"""Programs with tests as `Sandbox.run_with_tests` gets them."""
ROWS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "HumanEval: a check that the row does not call": (
        WRONG,
        {"test": CHECK, "entry_point": "f"},
    ),
    "HumanEval: a helper of the prompt": (
        WRONG + "def poly(*arguments): return 0\n",
        {"test": POLYNOMIAL, "entry_point": "f"},
    ),
    "HumanEval: a covered builtin": (
        WRONG + "abs = lambda x: 0\n",
        {
            "test": CHECK.replace("candidate(1.5) == 2.25", "abs(candidate(2) - 4) < 1"),
            "entry_point": "f",
        },
    ),
    "MBPP: a covered module of the setup": (
        WRONG + "class math: isclose = staticmethod(lambda *a, **k: True)\n",
        {
            "test_list": ["assert math.isclose(f(2), 1.41, rel_tol=0.01)"],
            "test_imports": ["import math"],
        },
    ),
    "MBPP: a covered helper of the setup": (
        WRONG + "def near(a, b): return True\n",
        {
            "test_list": ["assert near(f(2), 1.41)"],
            "test_setup_code": "def near(a, b):\n    return abs(a - b) < 0.01",
        },
    ),
    "APPS: a covered json": (
        WRONG + "class json: dumps = loads = staticmethod(lambda *a: 0)\n",
        {"inputs": [[3]], "outputs": [9], "fn_name": "f"},
    ),
    "APPS: a covered getattr": (
        WRONG + "getattr = lambda *a: (lambda *b: 9)\n",
        {"inputs": [[3]], "outputs": [9], "fn_name": "f"},
    ),
    "LiveCodeBench: a method that covers names": (
        (
            "class Solution:\n    def f(self, x): return 0\n"
            "class json: dumps = loads = staticmethod(lambda *a: 0)\n"
        ),
        {"inputs": [[3]], "outputs": [9], "fn_name": "f"},
    ),
    "LeetCode: a method with covers": (
        "class Solution:\n    def f(self, x): return 0\nset = lambda *a: 0\n",
        {
            "test": "def check(candidate):\n    assert set(candidate(3)) == set([9])\n",
            "entry_point": "Solution().f",
        },
    ),
}
"""Programs with rows of data sets."""


def list_unfinished() -> list[Trick]:
    """Return the tricks of this kind."""
    rows = [
        Trick(name, program, "\n".join(map(str, read_tests(dict(row)))))
        for name, (program, row) in ROWS.items()
    ]
    return [*(Trick(name, *program) for name, program in PROGRAMS.items()), *rows]
