"""Programs that are right, also where they define names that tests use; all must pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_events.attacks.trick import Trick
from relax_events.packages.verifiers.code import read_tests

SQUARE = "def f(x):\n    return x * x\n"
CHECK = "def check(candidate):\n    assert abs(candidate(1.5) - 2.25) < 1e-6\n"
CASES = (
    "import unittest\n\n\nclass TestCases(unittest.TestCase):\n    def test_one(self):\n"
    "        self.assertEqual(f(2), 4)\n"
)
STACK = (
    "class Stack:\n    def __init__(self):\n        self.held = []\n"
    "    def push(self, one):\n        self.held.append(one)\n        return self\n"
    "    def pop(self):\n        return self.held.pop()\n"
    "    def count(self, one):\n        return self.held.count(one)\n"
    "    def isdisjoint(self, other):\n        return not set(self.held) & set(other.held)\n"
    "    def __len__(self):\n        return len(self.held)\n"
)
PROGRAMS = {
    "a plain function": (SQUARE, "assert f(3) == 9"),
    "its own abs": (
        "def abs(x):\n    return -x if x < 0 else x\ndef f(x):\n    return abs(x) ** 2\n",
        "assert abs(f(-1.5) - 2.25) < 1e-6",
    ),
    "its own max, bound to a number": (
        (
            "max = 0\nfor one in [3, 9]:\n    max = one if one > max else max\n"
            "def f(x):\n    return max * x\n"
        ),
        "assert max(f(1), 2) == 9 and f(2) == 18",
    ),
    "its own set, list and dict": (
        "list, dict, set = [1, 2], {'a': 1}, {3}\ndef f():\n    return list + [dict['a'], *set]\n",
        "assert set(f()) == set([1, 2, 3]) and list(f()) == [1, 2, 1, 3]",
    ),
    "its own gcd": (
        (
            "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n"
            "def f(a, b):\n    return a * b // gcd(a, b)\n"
        ),
        "from math import gcd\nassert f(4, 6) == 12 == 24 // gcd(4, 6)",
    ),
    "its own Counter": (
        (
            "class Counter(dict):\n    def __init__(self, items):\n"
            "        for one in items: self[one] = self.get(one, 0) + 1\n"
            "def f(text):\n    return dict(Counter(text))\n"
        ),
        "from collections import Counter\nassert f('aab') == Counter('aab')",
    ),
    "its own check": (
        "def check(x):\n    return x > 0\ndef f(x):\n    return x if check(x) else 0\n",
        "def check(candidate):\n    assert candidate(3) == 3 and candidate(-3) == 0\n\ncheck(f)",
    ),
    "its own candidate and expected": (
        "candidate = expected = 7\n" + SQUARE,
        (
            "def check(candidate):\n    assert candidate(3) == 9\n\n"
            "for given, expected in [(2, 4)]:\n    assert f(given) == expected\ncheck(f)"
        ),
    ),
    "a function called sum, as in MBPP 126": (
        "def sum(a, b):\n    return len([n for n in range(1, min(a, b)) if a % n == b % n == 0])\n",
        "assert sum(10, 15) == 2",
    ),
    "a function called check, as in MBPP": (
        "def check(n):\n    return 2 * int(str(n)[::-1]) == n + 1\n",
        "assert check(70) == False\nassert check(73) == True",
    ),
    "a function called gcd": (
        "def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)\n",
        "assert gcd(12, 18) == 6 and abs(gcd(2, 3)) == 1",
    ),
    "a class called Counter": (
        (
            "class Counter:\n    def __init__(self):\n        self.value = 0\n"
            "    def add(self, n=1):\n        self.value += n\n        return self.value\n"
        ),
        "counter = Counter()\ncounter.add()\nassert counter.add(3) == 4 and counter.value == 4",
    ),
    "a function called string": (
        "def string(words):\n    return ' '.join(words)\n",
        "assert string(['a', 'b']) == 'a b'",
    ),
    "a function called values": (
        "def values(n):\n    return [*range(n)]\ndef serve(n):\n    return n + 1\n",
        "assert values(3) == [0, 1, 2] and serve(1) == 2",
    ),
    "a module that the tests take from the program": (
        "import math\ndef f(x):\n    return math.sqrt(x)\n",
        "assert math.isclose(f(2), 1.41421, rel_tol=1e-4)",
    ),
    "names that the tests take from the program's imports": (
        (
            "from math import isclose, pi\nfrom collections import Counter, deque\n"
            "from datetime import datetime\nfrom typing import List\n"
            "def f(text: List[str]):\n    return dict(Counter(text))\n"
            "def area(r):\n    return pi * r * r\n"
        ),
        (
            "assert Counter(f('aab')) == Counter('aba') and isclose(area(2), 4 * pi)\n"
            "first: List[int] = [1]\nassert deque(first)[0] == datetime(2020, 1, 1).day"
        ),
    ),
    "NumPy that the tests take from the program": (
        "import numpy as np\ndef f(x):\n    return np.sqrt(np.array(x))\n",
        "assert np.allclose(f([4.0, 9.0]), [2.0, 3.0]) and f([4.0]).shape == (1,)",
    ),
    "NumPy that the tests import": (
        "import numpy\nnp = 3\ndef f(x):\n    return numpy.array(x) * np\n",
        "import numpy as np\nnp.testing.assert_allclose(f([4.0, 9.0]), [12.0, 27.0])",
    ),
    "imports in a block": (
        SQUARE + "math = 3\n",
        "try:\n    import math\nexcept ImportError:\n    raise\nassert math.isclose(f(1.5), 2.25)",
    ),
    "imports in a function": (
        SQUARE + "math = 3\n",
        (
            "def check(candidate):\n    import math\n"
            "    assert math.isclose(candidate(1.5), 2.25)\n"
            "check(f)"
        ),
    ),
    "all names of the program": (
        SQUARE + "abs = 3\ndef g(x):\n    return x + 1\n",
        "from solution import *\nassert abs(f(-3) - g(8)) == 0",
    ),
    "the module of the program": (
        "def abs(x):\n    return 3\n" + SQUARE,
        (
            "import solution\nfrom solution import f as square\n"
            "assert abs(square(-3)) == 9 and solution.abs(1) == 3"
        ),
    ),
    "a function that the tests wrap": (
        SQUARE,
        "plain = f\ndef f(x):\n    return plain(x) + 1\nassert f(2) == 5",
    ),
    "a function in a loop of builtins": (
        SQUARE,
        (
            "for x, expected in zip(range(4), [0, 1, 4, 9]):\n    assert f(x) == expected\n"
            "assert all(isinstance(f(x), int) for x in range(3)) and sum(map(f, range(3))) == 5\n"
            "assert sorted(map(f, [3, 1])) == [1, 9] and len(str(f(4))) == 2"
        ),
    ),
    "a stack": (
        STACK,
        (
            "s, other = Stack(), Stack()\ns.push(1).push(2)\nassert s.pop() == 2 and len(s) == 1\n"
            "assert s.count(1) == 1 and s.push(3).count(3) == 1 and s.isdisjoint(other)"
        ),
    ),
    "a generator": (
        "def f(n):\n    yield from range(n)\n",
        (
            "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6\nend = f(0)\n"
            "try:\n    next(end)\n    assert False\nexcept StopIteration:\n    pass"
        ),
    ),
    "an exception of its own": (
        "class Refused(ValueError): pass\ndef f(x):\n    if x < 0: raise Refused('negative')\n",
        (
            "try:\n    f(-1)\nexcept ValueError as error:\n    assert str(error) == 'negative'\n"
            "else:\n    raise AssertionError"
        ),
    ),
    "a named tuple with a count": (
        (
            "from collections import namedtuple\nItem = namedtuple('Item', 'name count')\n"
            "def f(name):\n    return Item(name, 2)\n"
        ),
        "assert f('a').count == 2 and f('a') == ('a', 2)",
    ),
    "cases of unittest": (SQUARE, CASES + "\n\nunittest.main()\n"),
    "cases of unittest without main": (SQUARE, CASES),
    "methods of pytest": (
        SQUARE,
        "class TestF:\n    def test_one(self):\n        assert f(2) == 4\n",
    ),
    "data of a class": (
        SQUARE,
        (
            "class TestF:\n    test_values = [2, 3]\n    def test_one(self):\n"
            "        assert f(self.test_values[0]) == 4\n"
        ),
    ),
    "a case that only helps": (
        SQUARE,
        (
            "import unittest\n\n\nclass Case(unittest.TestCase): pass\n\n\n"
            "Case().assertAlmostEqual(f(1.5), 2.25)"
        ),
    ),
    "a script": (SQUARE, CHECK + "\nif __name__ == '__main__':\n    check(f)\n"),
    "a helper that is not used": (SQUARE, "def near(a, b): pass\nassert f(2) == 4"),
    "a constant": ("LIMIT = 3\n", "assert LIMIT == 3"),
    "a function called solution": (
        "def solution(x):\n    return x * x\n",
        "assert solution(3) == 9 and len(str(solution(4))) == 2",
    ),
    "functions of pytest": (SQUARE, "def test_one():\n    assert f(2) == 4\n"),
    "functions of pytest that are called": (
        SQUARE,
        "def test_one(x):\n    assert f(x) == x ** 2\n\nfor x in range(3):\n    test_one(x)",
    ),
    "annotations of the future": (
        SQUARE,
        (
            "from __future__ import annotations\ndef g(x: Missing) -> int:\n    return f(x)\n"
            "assert g(2) == 4"
        ),
    ),
}
"""Programs with tests as `Sandbox.run_with_tests` gets them."""
ROWS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "HumanEval": (SQUARE, {"test": CHECK, "entry_point": "f"}),
    "HumanEval with the call": (SQUARE, {"test": CHECK + "\ncheck(f)", "entry_point": "f"}),
    "HumanEval with a module of the prompt": (
        "import math\n" + SQUARE,
        {
            "test": "def check(candidate):\n    assert math.fabs(candidate(2) - 4) < 1e-6\n",
            "entry_point": "f",
        },
    ),
    "a row whose function is called solution": (
        "def solution(x):\n    return x * x\n",
        {"test": CHECK, "entry_point": "solution"},
    ),
    "HumanEval with a helper in the setup": (
        "def near(a, b): return 3\n" + SQUARE,
        {
            "test": "def check(candidate):\n    assert near(candidate(1.5), 2.25)\n",
            "test_setup_code": "def near(a, b):\n    return abs(a - b) < 1e-6\n",
            "entry_point": "f",
        },
    ),
    "HumanEval with a function called sorted": (
        "def sorted(x):\n    return x[::-1]\n",
        {
            "test": "def check(candidate):\n    assert candidate([1, 2]) == [2, 1]\n",
            "entry_point": "sorted",
        },
    ),
    "MBPP with imports": (
        "class math: pass\n" + SQUARE,
        {"test_list": ["assert math.isclose(f(1.5), 2.25)"], "test_imports": ["import math"]},
    ),
    "APPS": (SQUARE, {"inputs": [[3]], "outputs": [9], "fn_name": "f"}),
    "APPS with a function called round": (
        "def round(x):\n    return x + 1\n",
        {"inputs": [[3]], "outputs": [4], "fn_name": "round"},
    ),
    "LiveCodeBench": (
        (
            "from typing import List\nclass Solution:\n    def sum(self, x: List[int]) -> int:\n"
            "        return sum(x)\n"
        ),
        {"inputs": [[[1, 2]]], "outputs": [3], "fn_name": "sum"},
    ),
    "LeetCode": (
        "class Solution:\n    def f(self, x): return {x, 9}\n",
        {
            "test": "def check(candidate):\n    assert set(candidate(3)) == set([9, 3])\n",
            "entry_point": "Solution().f",
        },
    ),
}
"""Programs with rows of data sets."""


def list_right_programs() -> list[Trick]:
    """Return all right programs; their names are different."""
    rows = [
        Trick(name, program, "\n".join(map(str, read_tests(dict(row)))))
        for name, (program, row) in ROWS.items()
    ]
    return [*(Trick(name, *program) for name, program in PROGRAMS.items()), *rows]
