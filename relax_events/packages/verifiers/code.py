"""Rewards for programs: run them against tests in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context
from typing import Any

from relax_events.api.events import format_json, parse_json
from relax_events.api.rewards import (
    Explanation,
    Limits,
    RewardError,
    Sandbox,
    Verdict,
    require_isolation,
    reward,
)
from relax_events.packages.verifiers.answer_extraction import final_text

FENCE = re.compile(r"^```[ \t]*(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
PYTHON = ("python", "python3", "py", "")
TEST_SECONDS, MEMORY_BYTES = 4.0, 512 * 1024**2
TEST_KEYS = ("tests", "test_list", "test")
SETUP_KEYS = ("test_imports", "test_setup_code")
DEFINES_CHECK = re.compile(r"^def check\(", re.MULTILINE)
NUMBER = re.compile(
    r"(?<![\w.])[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?+(?!\w|\.\w)", re.ASCII
)
INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
TOLERANCE = "1e-6"
RESULT_COMPARISON = f"""
def are_close(result, expected):
    if isinstance(expected, list) and isinstance(result, list):
        return len(result) == len(expected) and all(map(are_close, result, expected))
    if isinstance(expected, dict) and isinstance(result, dict):
        return result.keys() == expected.keys() and all(
            are_close(result[key], expected[key]) for key in expected
        )
    if result == expected or {{type(result), type(expected)}} not in ({{float}}, {{int, float}}):
        return result == expected
    scale = max(1, abs(expected)) if isinstance(expected, float) else 1
    return abs(result - expected) <= {TOLERANCE} * scale
"""
CALLS_CHECK = re.compile(r"^[^#\n]*(?<!def )\bcheck\(", re.MULTILINE)
NO_TESTS = (
    "the sample has no tests; see metadata.tests (statements, or objects with input and output), "
    "or metadata.inputs and metadata.outputs"
)
METADATA = {
    "tests": (
        "a list of statements such as `assert f(1) == 2`, or of objects with `input` and "
        "`output`; `test_list` and `test` do as well"
    ),
    "inputs": "without `tests`: what each test writes to stdin, or the arguments for `fn_name`",
    "outputs": "what is expected on stdout, or as result, for each of the inputs",
    "fn_name": "the function to call with the inputs; without it they go to stdin",
    "entry_point": (
        "the function under test, such as `f` or `Solution().f`: all that tests get of the "
        "program; `check(candidate)` in the tests is called with it"
    ),
    "test_imports": "statements that run before each test, such as imports and helper functions",
    "test_setup_code": "further such statements",
}


def _require_walls(options: Mapping[str, Any]) -> None:
    require_isolation(allow_unprotected=options.get("allow_unprotected") is True)


def explain_code(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    test_seconds: float = TEST_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    allow_unprotected: bool = False,
    **_: Any,
) -> Explanation:
    """Run the tests again, and explain the first that does not pass."""
    program = python_block(completion)
    if program is None:
        return Explanation(answer=None, location="nowhere", why="there is no Python block")
    isolation, why = require_isolation(allow_unprotected=allow_unprotected), "all tests pass"
    tests = _find_tests(metadata, answer)
    with Sandbox(program, Limits(test_seconds, memory_bytes), isolation=isolation) as sandbox:
        for number, test in enumerate(tests, 1):
            if (verdict := _run(sandbox, test)) is not Verdict.PASSED:
                reason = sandbox.reason if isinstance(test, str) else "another output"
                why = f"test {number} of {len(tests)} {verdict}: {reason or 'it says no more'}"
                break
    return Explanation(answer=program, location="the last Python block", why=why)


@reward(
    source="The test forms of MBPP (arXiv 2108.07732) and APPS (arXiv 2105.09938)",
    metadata=METADATA,
    require=_require_walls,
    explain=explain_code,
)
def code(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    test_seconds: float = TEST_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    partial: bool = False,
    limit_reward: float | None = None,
    allow_unprotected: bool = False,
) -> dict[str, float]:
    """Give 1 when the last Python block of the completion passes all tests, else 0; with `partial`
    the share of tests it passes.

    What a program prints is compared token by token: numbers within 1e-6, absolute or relative,
    also in lists; two integers and all else exactly. Results of `fn_name` are compared alike.

    Each test may take `test_seconds` and `memory_bytes`; `reward.timeout_seconds` bounds them all
    together. A program that exceeds a limit, or is killed, is a scoring failure unless
    `limit_reward` gives its reward. The components are `passed`, the share of tests, and
    `has_code`. Tests are found in the metadata, or as JSON of the same form in the reference
    answer.

    If this machine has no sandbox that isolates a program from files, network and processes, no
    program runs; `allow_unprotected` runs it anyway.

    Raises:
        EnvironmentProblem: There is no such sandbox.
        RewardError: The program exceeded a limit.
        ValueError: The sample has no tests.
    """
    tests = _find_tests(metadata, answer)
    program = python_block(completion)
    if program is None:
        return {"reward": 0.0, "passed": 0.0, "has_code": 0.0}
    isolation = require_isolation(allow_unprotected=allow_unprotected)
    with Sandbox(program, Limits(test_seconds, memory_bytes), isolation=isolation) as sandbox:
        num_passed = _num_passed(sandbox, tests, stops_early=not partial)
    if num_passed is None:
        if limit_reward is None:
            raise RewardError(
                f"the program exceeded a limit of the sandbox: {test_seconds:g} s, "
                f"{memory_bytes} bytes or its processes"
            )
        return {"reward": limit_reward, "passed": 0.0, "has_code": 1.0}
    passed = num_passed / len(tests)
    return {
        "reward": passed if partial else float(num_passed == len(tests)),
        "passed": passed,
        "has_code": 1.0,
    }


def _find_tests(metadata: dict[str, Any], answer: str) -> Sequence[str | tuple[str, str]]:
    has_tests = any(key in metadata for key in (*TEST_KEYS, "inputs"))
    return read_tests(metadata if has_tests else _from_answer(answer))


def python_block(completion: str) -> str | None:
    """Return the last Python block after the reasoning, or None; a block without a language counts
    as Python.
    """
    blocks = [
        text
        for language, text in FENCE.findall(final_text(completion))
        if language.lower() in PYTHON
    ]
    return blocks[-1] if blocks else None


def read_tests(metadata: dict[str, Any]) -> Sequence[str | tuple[str, str]]:
    """Return the tests: programs of statements, or pairs of input and expected output.

    Raises:
        ValueError: There are none, or their form is unknown.
    """
    value = next((metadata[key] for key in TEST_KEYS if metadata.get(key)), None)
    tests = [value] if isinstance(value, str) else value
    if isinstance(tests, list):
        read = [_read_test(one) for one in tests]
        return [_complete(one, metadata) if isinstance(one, str) else one for one in read]
    inputs, outputs = metadata.get("inputs"), metadata.get("outputs")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or not inputs
        or len(inputs) != len(outputs)
    ):
        raise ValueError(NO_TESTS)
    if name := metadata.get("fn_name"):
        return [
            _call(str(name), args, result) for args, result in zip(inputs, outputs, strict=True)
        ]
    return [(_text(stdin), _text(stdout)) for stdin, stdout in zip(inputs, outputs, strict=True)]


def _read_test(one: Any) -> str | tuple[str, str]:
    if isinstance(one, str):
        return one
    if isinstance(one, dict) and {"input", "output"} <= one.keys():
        return _text(one["input"]), _text(one["output"])
    raise ValueError(NO_TESTS)


def _complete(test: str, metadata: Mapping[str, Any]) -> str:
    """Put the setup before a test; with an entry point, take nothing else from the program, and
    call the test's `check` with it.
    """
    parts = [_text(metadata[key]) for key in SETUP_KEYS if metadata.get(key)] + [test]
    if entry_point := metadata.get("entry_point"):
        name = re.split(r"\W", str(entry_point), maxsplit=1)[0]
        parts.append(f"from solution import {name}")  # imports run first
        if DEFINES_CHECK.search(test) and not CALLS_CHECK.search(test):
            parts.append(f"check({entry_point})")
    return "\n".join(parts)


def _text(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else "\n".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )


def _call(name: str, args: Any, result: Any) -> str:
    """Return a program that calls a function, or the method of that name of `Solution`, and
    compares as JSON would, floats with a tolerance.
    """
    arguments = format_json(args if isinstance(args, list) else [args])
    return (
        f"import json, solution\n{RESULT_COMPARISON}"
        "owner = solution.Solution() if hasattr(solution, 'Solution') else solution\n"
        f"function = getattr(owner, {name!r})\n"
        f"result = json.loads(json.dumps(function(*json.loads({arguments!r}))))\n"
        f"assert are_close(result, json.loads({format_json(result)!r}))\n"
    )


def _from_answer(answer: str) -> dict[str, Any]:
    try:
        parsed = parse_json(answer)
    except ValueError:
        raise ValueError(NO_TESTS) from None
    return parsed if isinstance(parsed, dict) else {"tests": parsed}


def _num_passed(
    sandbox: Sandbox, tests: Sequence[str | tuple[str, str]], *, stops_early: bool
) -> int | None:
    """Return the number of passed tests, or None if the program exceeded a limit."""
    num_passed = 0
    for test in tests:
        verdict = _run(sandbox, test)
        if verdict is Verdict.OUT_OF_LIMITS:
            return None
        if verdict is Verdict.FAILED and stops_early:
            break
        num_passed += verdict is Verdict.PASSED
    return num_passed


def _run(sandbox: Sandbox, test: str | tuple[str, str]) -> Verdict:
    if isinstance(test, str):
        return sandbox.run_with_tests(test)
    verdict, printed = sandbox.run_with_input(test[0])
    is_right = is_same_output(printed, test[1])
    return Verdict.FAILED if verdict is Verdict.PASSED and not is_right else verdict


def is_same_output(printed: str, expected: str) -> bool:
    """Compare what a program printed line by line, and each line token by token.

    Two numbers are the same within 1e-6, absolute or relative to the expected one, also within a
    list such as `[0.5,1]`. Two integers must have the same digits. A float for an expected integer
    may differ by 1e-6. All else is compared as text.
    """
    printed_lines, expected_lines = _lines(printed), _lines(expected)
    return [len(line) for line in printed_lines] == [len(line) for line in expected_lines] and all(
        _is_same_token(token, expected_token)
        for line, expected_line in zip(printed_lines, expected_lines, strict=True)
        for token, expected_token in zip(line, expected_line, strict=True)
    )


def _is_same_token(token: str, expected: str) -> bool:
    return token == expected or (
        NUMBER.split(token) == NUMBER.split(expected)
        and all(map(_is_same_number, NUMBER.findall(token), NUMBER.findall(expected)))
    )


def _is_same_number(number: str, expected: str) -> bool:
    is_integer = INTEGER.fullmatch(expected) is not None
    if number == expected or (is_integer and INTEGER.fullmatch(number)):
        return number == expected
    exact = Context(len(number) + len(expected) + 10, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])
    value, expected_value = exact.create_decimal(number), exact.create_decimal(expected)
    if not (value.is_finite() and expected_value.is_finite()):
        return False
    tolerance = exact.create_decimal(TOLERANCE)
    difference = exact.abs(exact.subtract(value, expected_value))
    relative = exact.multiply(tolerance, exact.abs(expected_value))
    return difference <= tolerance or (not is_integer and difference <= relative)


def _lines(text: str) -> list[list[str]]:
    """Return the words of each line without trailing empty lines, so that white space is
    ignored.
    """
    return [line.split() for line in text.rstrip().splitlines()]
