"""Runs what tests define for a test runner: unittest's cases, and functions called `test...`.

Without this, tests that are written for a runner would pass for every program.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from names_in_code import TestNames

NEEDS_RUNNER = 0x20 | 0x80 | 0x200
"""The flags of the code of generators, coroutines and asynchronous generators."""


class NeverCalled(Exception):
    """The tests define what tests the solution, and don't call it."""


def forget_unittest_main(names: TestNames) -> None:
    """Let `unittest.main()` do nothing: it would end this process. The cases run afterwards."""
    if "unittest" in names.imported:
        import unittest

        unittest.main = lambda *_, **__: None  # type: ignore[assignment]


def run_collected(scope: dict[str, Any], names: TestNames) -> None:
    """Run what a test runner would find: cases, and `check` or `test...` that is not called.

    Raises:
        AssertionError: A case failed, or all were skipped.
        NeverCalled: A function holds tests, takes arguments, and is not called.
    """
    if "unittest" in names.imported:
        _run_cases(scope)
    for name, value in _list_unused(scope, names):
        if isinstance(value, types.FunctionType) and (name == "check" or name.startswith("test")):
            _call(name, value)
        elif isinstance(value, type) and name.startswith("Test") and not _is_case(value):
            for method in [one for one in dir(value) if one.startswith("test")]:
                if isinstance(bound := getattr(value(), method), types.MethodType):
                    _call(f"{name}.{method}", bound)


def require_calls(scope: dict[str, Any], names: TestNames) -> None:
    """Fail if tests that called nothing of the solution define what they never use.

    Raises:
        NeverCalled: They do; they would pass for every solution.
    """
    for name, value in _list_unused(scope, names):
        if isinstance(value, (type, types.FunctionType)):
            raise NeverCalled(f"the tests define {name}, never use it, and test nothing else")


def _list_unused(scope: dict[str, Any], names: TestNames) -> list[tuple[str, Any]]:
    unused = names.bound - names.loaded
    return [(name, value) for name, value in scope.items() if name in unused]


def _call(name: str, function: types.FunctionType | types.MethodType) -> None:
    code, is_bound = function.__code__, isinstance(function, types.MethodType)
    num_required = code.co_argcount - len(function.__defaults__ or ()) - is_bound
    if num_required > 0 or code.co_flags & NEEDS_RUNNER:
        raise NeverCalled(
            f"the tests define {name} with {num_required} arguments, or as a coroutine or "
            "generator, and never call it; call it in the tests, or name the function under test "
            "in metadata.entry_point"
        )
    function()


def _is_case(value: object) -> bool:
    unittest = sys.modules.get("unittest")
    return unittest is not None and isinstance(value, type) and issubclass(value, unittest.TestCase)


def _run_cases(scope: dict[str, Any]) -> None:
    import unittest

    cases = [one for one in scope.values() if _is_case(one) and one.__module__ == "__main__"]
    load, result = unittest.TestLoader().loadTestsFromTestCase, unittest.TestResult()
    suite = unittest.TestSuite(map(load, cases))
    if not suite.countTestCases():
        return
    suite.run(result)
    if not result.wasSuccessful() or result.testsRun <= len(result.skipped):
        raise AssertionError(f"{result}: {[*result.failures, *result.errors]}")
