"""Runs the tests in a process that the solution can't access; results arrive as copies.

Values of builtin types are compared in this process by the rules of their type. An object of one of
the solution's classes stays in the solution's process, see `remote_object`. What else the tests
read is their own, see `readable_names`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import types
from collections.abc import Mapping
from typing import Any

from collected_tests import forget_unittest_main, require_calls, run_collected
from exchange import description
from names_in_code import find_names, list_imports
from readable_names import choose_definitions, explain_missing
from to_solution import ToSolution

MAX_REASON_BYTES = 1000
"""Fewer than a pipe takes at once."""


class NotForTests(Exception):
    """The tests read a name for which the solution may not answer."""


def run_tests(tests_path: str, requests: int, answers: int, verdict: int) -> None:
    """Run tests against a served solution; write to `verdict` 1 if all pass, else 0 and why not."""
    with os.fdopen(requests, "rb") as reading, os.fdopen(answers, "wb") as writing:
        solution = ToSolution(reading, writing, serves=("call",))
        try:
            defined = solution.receive_definitions()
            with open(tests_path, encoding="utf-8", errors="replace") as file:
                execute_tests(file.read(), defined, solution)
        except BaseException as error:
            os.write(verdict, b"0" + _explain(error).encode(errors="replace")[:MAX_REASON_BYTES])
            raise
        os.write(verdict, b"1")
        os._exit(0)  # no destructor or exit handler calls the solution again


def execute_tests(tests: str, defined: Mapping[str, Any], solution: ToSolution) -> None:
    """Execute tests as a script, with what they may read of a solution's definitions.

    Imports of the tests run first, and no definition replaces what they bind.

    Args:
        tests: Python source.
        defined: What the solution defines, by name.
        solution: The connection to its process.
    Raises:
        NotForTests: They read another name that the solution defines. NeverCalled: They define
            what tests the solution, and don't call it. Exception: They fail.
    """
    code = compile(tests, "tests.py", "exec", dont_inherit=True, optimize=0)
    names = find_names(code)
    chosen = choose_definitions(defined, names)
    sys.modules["solution"] = module = types.ModuleType("solution")
    shared = [name for name in chosen if chosen[name] is defined[name]]
    vars(module).update({**defined, "__all__": shared})
    scope: dict[str, Any] = {"__name__": "__main__"}
    forget_unittest_main(names)
    for statement in list_imports(code, tests):
        with contextlib.suppress(Exception):  # it raises again in its place
            exec(statement, scope)  # noqa: S102
    scope |= {name: value for name, value in chosen.items() if name not in scope}
    try:
        exec(code, scope)  # noqa: S102 the tests come from the data
        run_collected(scope, names)
        if not solution.num_calls:
            require_calls(scope, names)
    except NameError as error:
        if reason := explain_missing(error.name, defined):
            raise NotForTests(reason) from error
        raise


def _explain(error: BaseException) -> str:
    """Return an exception's name, its text, and the line of the tests that it left."""
    fields = description(error)
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "tests.py"
    ]
    place = f" in line {lines[-1]} of the tests" if lines else ""
    return (
        f"{fields['name']}{place}: {fields['text']}"
        if fields["text"]
        else f"{fields['name']}{place}"
    )
