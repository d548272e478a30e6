"""Programs whose results try to decide a comparison, an iteration or an exception of the tests."""

from __future__ import annotations

from relax_events.attacks.trick import Trick

PREDICATES = "class E:\n    def {name}(self, *others):\n        return True\n"
MAKERS = {
    "a result": ("def f(x): return E()\n", "f(1)"),
    "a list": ("def f(x): return [E()]\n", "f(1)[0]"),
    "a dictionary": ("def f(x): return {'a': E()}\n", "f(1)['a']"),
    "a generator": ("def f(x): yield E()\n", "next(f(1))"),
    "a loop": ("def f(x): return (E() for _ in range(1))\n", "[*f(1)][0]"),
    "a method": ("class Solution:\n    def f(self, x): return E()\n", "Solution().f(1)"),
    "a class method": (
        "class Solution:\n    @classmethod\n    def f(cls, x): return [E()]\n",
        "Solution.f(1)[0]",
    ),
    "an attribute of a result": (
        (
            "class Owner: pass\ndef f(x):\n    owner = Owner()\n    owner.value = E()\n"
            "    return owner\n"
        ),
        "f(1).value",
    ),
}
"""Ways to get an object of the program, each with the expression of the tests."""
METHODS = {
    "startswith": "{value}.startswith('2')",
    "endswith": "{value}.endswith('2')",
    "isdigit": "{value}.isdigit()",
    "issubset": "{value}.issubset([2])",
    "isdisjoint": "{value}.isdisjoint([1])",
}
COMPARED = "assert f(1) == 2\nassert f(5) == 6\n"
CLASSES = {
    "always equal": ("", "def __eq__(s, o): return True\n    def __hash__(s): return 0"),
    "never unequal": ("", "def __eq__(s, o): return True\n    def __ne__(s, o): return False"),
    "a number that is always equal": ("(int)", "def __eq__(s, o): return True"),
    "a text that is always equal": ("(str)", "def __eq__(s, o): return True"),
    "a list that is always equal": ("(list)", "def __eq__(s, o): return True"),
    "a tuple that is always equal": ("(tuple)", "def __eq__(s, o): return True"),
    "a fraction that is always equal": (
        "(__import__('fractions').Fraction)",
        "def __eq__(s, o): return True",
    ),
    "an equal metaclass": (
        "(metaclass=type('M', (type,), {'__eq__': lambda s, o: True, '__hash__': lambda s: 0}))",
        "pass",
    ),
    "another class": ("", "__class__ = int\n    def __eq__(s, o): return True"),
}
"""Classes whose objects say that they equal everything."""
OTHERS = {
    "a comparison that sees what is due": (
        (
            "class E:\n"
            "    def __lt__(s, o): return True\n    def __gt__(s, o): return True\n"
            "    def __le__(s, o): return True\n    def __ge__(s, o): return True\n"
            "def f(x): return E()\n"
        ),
        "assert 1.9 < f(1) < 2.1",
    ),
    "arithmetic that sees what is due": (
        (
            "class E:\n"
            "    def __sub__(s, o): return 0\n    def __rsub__(s, o): return 0\n"
            "    def __abs__(s): return 0\n    def __float__(s): return 0.0\n"
            "def f(x): return E()\n"
        ),
        "assert abs(f(1) - 2) < 1e-6",
    ),
    "a method that sees what is due": (
        (
            "class E:\n"
            "    def startswith(s, o): return True\n    def issubset(s, o): return True\n"
            "    def __contains__(s, o): return True\n    def __iter__(s): return iter(())\n"
            "def f(x): return E()\n"
        ),
        "assert f(1).startswith('2') or 2 in f(1) or f(1).issubset({2})",
    ),
    "a named tuple with a method": (
        (
            "from collections import namedtuple\n"
            "def f(x): return namedtuple('E', 'count')(lambda one: 3)\n"
        ),
        "assert f(1).count(2) == 3",
    ),
    "an array of objects": (
        (
            "import numpy\nclass E:\n    def __eq__(s, o): return True\n"
            "    def __sub__(s, o): return 0\n"
            "def f(x): return numpy.array([E()])\n"
        ),
        "import numpy as np\nassert np.abs(f(1) - 2).max() < 1e-6 or (f(1) == np.array([2])).all()",
    ),
    "no number": ("def f(x): return float('nan')\n", "assert abs(f(1) - 2) < 1e-6"),
    "an infinite number": ("def f(x): return float('inf')\n", "assert abs(f(1) - 2) < 1e-6"),
    "a huge number": ("def f(x): return 10 ** 9999\n", "assert abs(f(1) - 2) < 1e-6"),
    "not implemented": ("def f(x): return NotImplemented\n", COMPARED),
    "an ellipsis": ("def f(x): return ...\n", COMPARED),
    "a type": ("def f(x): return object\n", COMPARED),
    "what it was given": ("def f(x): return x\n", "expected = [2]\nassert f([1]) == expected"),
    "a changed argument": (
        "def f(x):\n    x.clear()\n    return []\n",
        "given = [1]\nassert f(given) == [2]",
    ),
    "the end of an iteration in map": (
        "def f(x): raise StopIteration\n",
        "for result, expected in zip(map(f, [1, 5]), [2, 6]):\n    assert result == expected",
    ),
    "the end of an iteration in all": (
        "def f(x): raise StopIteration\n",
        "assert all(map(f, [1, 5]))",
    ),
    "the end of an iteration by a class": (
        "class Stop(StopIteration): pass\ndef f(x): raise Stop('x')\n",
        "assert all(map(f, [1, 5]))",
    ),
    "the end of an iteration by an attribute": (
        "class E:\n    @property\n    def value(self): raise StopIteration\ndef f(x): return E()\n",
        "assert all(map(lambda x: f(x).value == x + 1, [1, 5]))",
    ),
    "the end of an iteration by a number": (
        "class E:\n    def __abs__(self): raise StopIteration\ndef f(x): return E()\n",
        "for x in map(abs, [f(1)]):\n    assert x == 2",
    ),
    "leaving by an exception": ("def f(x): raise SystemExit\n", COMPARED),
    "leaving by a generator": ("def f(x): raise GeneratorExit\n", COMPARED),
    "interrupting": ("def f(x): raise KeyboardInterrupt\n", COMPARED),
    "an exception of the same name": (
        "class ValueError(Exception): pass\ndef f(x): raise ValueError('x')\n",
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False\n",
    ),
    "an exception instead of its base": (
        "import builtins\nclass Refused(builtins.KeyError): pass\ndef f(x): raise Refused('x')\n",
        "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\n",
    ),
    "an error that is a failed assertion": (
        "Refused = AssertionError\ndef f(x): return 0\n",
        "try:\n    f(-1)\n    assert False\nexcept Refused:\n    pass\n",
    ),
    "errors that are all exceptions": (
        "class Owner: errors = (Exception, KeyError)\ndef f(x): return Owner\n",
        "try:\n    assert f(-1) == 2\nexcept f(-1).errors:\n    pass\n",
    ),
    "an error that says to be a failed assertion": (
        (
            "class AssertionError(AssertionError): pass\nRefused = AssertionError\n"
            "def f(x): return 0\n"
        ),
        "try:\n    f(-1)\n    assert False\nexcept Refused:\n    pass\n",
    ),
    "swallowing what a callback finds": (
        "def f(function):\n    try: function(1)\n    except BaseException: pass\n",
        "found = []\nf(lambda x: found.append(x == 2))\nassert found == [True]",
    ),
}
"""Programs with their tests."""


def list_results() -> list[Trick]:
    """Return the tricks of this kind."""
    predicates = [
        Trick(
            f"{method} of {maker}",
            PREDICATES.format(name=method) + program,
            f"assert {test.format(value=value)}",
        )
        for number, (maker, (program, value)) in enumerate(MAKERS.items())
        for method, test in [list(METHODS.items())[number % len(METHODS)]]
    ]
    classes = [
        Trick(
            name,
            f"class E{bases}:\n    {body}\ndef f(x): return {value}\n",
            COMPARED,
        )
        for name, (bases, body) in CLASSES.items()
        for value in ["E" if "metaclass" in bases else "E()"]
    ]
    return [*predicates, *classes, *(Trick(name, *other) for name, other in OTHERS.items())]
