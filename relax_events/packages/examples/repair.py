"""Small Python functions with a wrong body: problems for a coding agent, with hidden tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

BODIES = {
    "the sum of a and b": "a + b",
    "the difference of a and b": "a - b",
    "the product of a and b": "a * b",
    "the larger of a and b": "max(a, b)",
    "the smaller of a and b": "min(a, b)",
    "a divided by b, rounded down": "a // b",
    "what a divided by b leaves": "a % b",
    "a to the power of b": "a ** b",
}
"""The right body of each function, by the description of its result."""
NUM_HIDDEN_TESTS, NUM_CALLS = 2, 3
"""Hidden tests of a problem, and calls in each of them."""
SHARE_OF_RIGHT_BODIES = 0.2
"""Share of right bodies in the warm-up's turns; the others are any of the bodies."""
MAX_ARGUMENT = 9
FAILED = "A test fails."


def make_bug(generator: np.random.Generator) -> tuple[str, str, dict[str, Any]]:
    """Make a wrong function, with a visible test for the agent, and the hidden ones as the answer,
    which the agent never sees.
    """
    purpose = str(generator.choice(list(BODIES)))
    body, bodies = BODIES[purpose], list(BODIES.values())
    wrong = str(generator.choice([one for one in bodies if one != body]))
    shape = (NUM_HIDDEN_TESTS * NUM_CALLS + 1, 2)
    arguments = generator.integers(2, MAX_ARGUMENT + 1, shape).tolist()
    visible, *calls = (write_test(body, a, b) for a, b in arguments)
    hidden = ["\n".join(calls[start::NUM_HIDDEN_TESTS]) for start in range(NUM_HIDDEN_TESTS)]
    tries = [
        body if generator.random() < SHARE_OF_RIGHT_BODIES else str(generator.choice(bodies))
        for _ in range(2)
    ]
    turns, replies = [write_function(tries[0])], []
    if not passes(tries[0], visible):
        turns.append(write_function(tries[1]))
        replies.append({"role": "user", "content": FAILED})
    prompt = f"f must return {purpose}:\n{write_function(wrong)}"
    files = {"f.py": write_function(wrong).strip("`").removeprefix("python\n")}
    metadata = {"visible_test": visible, "files": files, "turns": turns, "replies": replies}
    return prompt, orjson.dumps({"tests": hidden}).decode(), metadata


def write_function(body: str) -> str:
    """Return the function as a Python block."""
    return f"```python\ndef f(a, b):\n    return {body}\n```"


def write_test(body: str, a: int, b: int) -> str:
    """Return a test of the function with a right body."""
    return f"assert f({a}, {b}) == {compute(body, a, b)}"


def passes(body: str, test: str) -> bool:
    """Return whether a function with a known body passes a test."""
    call, _, expected = test.removeprefix("assert f(").partition(") == ")
    a, b = map(int, call.split(", "))
    return compute(body, a, b) == int(expected)


def compute(body: str, a: int, b: int) -> int:
    """Return the result of a known body."""
    results = {
        "a + b": a + b,
        "a - b": a - b,
        "a * b": a * b,
        "max(a, b)": max(a, b),
        "min(a, b)": min(a, b),
        "a // b": a // b,
        "a % b": a % b,
        "a ** b": int(a**b),
    }
    return results[body]
