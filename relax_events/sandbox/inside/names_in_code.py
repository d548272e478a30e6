"""Finds the names that the code of tests reads, binds and imports."""

from __future__ import annotations

from collections.abc import Iterator
from opcode import EXTENDED_ARG, opmap
from types import CodeType
from typing import Any

INDIRECT = frozenset({"eval", "exec", "globals", "locals", "vars", "compile", "__import__"})
"""Functions by which tests may read a name that does not stand in their code."""
LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
NAME_STEPS = {
    opmap[name]: name
    for name in (*LOADS, "STORE_NAME", "STORE_GLOBAL", "IMPORT_NAME", "LOAD_CONST")
    if name in opmap
}
"""Instructions that read or bind a name; `dis` is several times slower."""


class TestNames:
    """The global names in the code of tests.

    Attributes:
        first_read: Read, and not bound before.
        loaded: Read anywhere.
        bound: Bound by an assignment, a definition or an import.
        imported: Top-level names of imported modules, also of modules that functions import.
        imports_all: Whether they import all names of the solution.
    """

    def __init__(self) -> None:
        self.first_read: set[str] = set()
        self.loaded: set[str] = set()
        self.bound: set[str] = set()
        self.imported: set[str] = set()
        self.imports_all = False


def find_names(code: CodeType) -> TestNames:
    """Return the global names of tests, given their compiled code.

    A function's reads count after all names of the module are bound, because it is called later.
    """
    names, nested = TestNames(), [code]
    while nested:
        body = nested.pop(0)
        nested += [one for one in body.co_consts if isinstance(one, CodeType)]
        names.first_read -= _follow(body, names, set() if body is not code else names.bound)
    return names


def _follow(body: CodeType, names: TestNames, local: set[str]) -> set[str]:
    """Add the names of a module, class or function; return the names that a function binds
    globally.

    Args:
        body: Its code.
        names: The names so far.
        local: The names of its own scope.
    """
    constant, bound_by_function = None, set()
    for _, step, value in _list_name_steps(body):
        if step == "LOAD_CONST":
            constant = value
        elif step == "STORE_NAME":
            local.add(value)
        elif step == "STORE_GLOBAL":
            bound_by_function.add(value)
        elif step == "IMPORT_NAME":
            names.imported.add(value.partition(".")[0])
            names.imports_all |= value == "solution" and constant == ("*",)
        elif value in INDIRECT or not value.startswith("__"):
            names.loaded.add(value)
            if value not in names.bound and value not in local:
                names.first_read.add(value)
    names.bound |= bound_by_function
    return bound_by_function


def _list_name_steps(body: CodeType) -> Iterator[tuple[int, str, Any]]:
    """Yield the index of each instruction of `NAME_STEPS`, its name, and its name or constant."""
    code, extended = body.co_code, 0
    for index in range(0, len(code), 2):
        operation, argument = code[index], code[index + 1] | extended
        extended = argument << 8 if operation == EXTENDED_ARG else 0
        if step := NAME_STEPS.get(operation):
            if step == "LOAD_GLOBAL":
                argument >>= 1  # the lowest bit says whether it is called
            table = body.co_consts if step == "LOAD_CONST" else body.co_names
            yield index // 2, step, table[argument]


def list_imports(code: CodeType, source: str) -> Iterator[str]:
    """Yield the import statements of a module that stand in no function or class."""
    lines, positions = source.encode(errors="replace").split(b"\n"), None
    for index, step, _ in _list_name_steps(code):
        if step == "IMPORT_NAME":
            positions = positions or list(code.co_positions())
            first, last, start, end = positions[index]
            if first and last and end is not None:
                text = b"\n".join([*lines[first - 1 : last - 1], lines[last - 1][:end]])
                yield text[start:].decode(errors="replace")
