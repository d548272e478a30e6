"""Names a Python function as a run file does, for a reward worker in another process: by the file
of its module, or by a file that is written from its source.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from relax_events.errors import ConfigError

INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib"))


def name_reward(function: Callable[..., Any], file: Path) -> tuple[str, str]:
    """Return what `reward.function` says, and the text of the file that it names; the text is empty
    for a function of a module that lies in a file of its own.

    Args:
        function: Defined by `def` or `async def`, anywhere.
        file: Where the text is to be written.
    Raises:
        ConfigError: The other process can't have the function; the text says why.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(function, FunctionType) or name == "<lambda>":
        what = "a lambda" if name == "<lambda>" else f"a {type(function).__name__}"
        raise _refuse(name, f"it is {what}; define it by def")
    module = sys.modules.get(function.__module__)
    if module is None or module.__name__ == "__main__" or vars(module).get(name) is not function:
        return f"{file}:{name}", _SourceFile(name).write(function)
    path = getattr(module, "__file__", None) or ""
    if "." not in module.__name__ and path.endswith(".py"):
        return f"{Path(path).resolve()}:{name}", ""
    return f"{file}:{name}", _join([_import_name(module, name, name)], [])


class _SourceFile:
    """The text of a function and of what it uses of its module: functions, classes, constants and
    imports.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._names: set[str] = set()
        self._imports: list[str] = []
        self._definitions: list[str] = []

    def write(self, function: FunctionType) -> str:
        """Return the text.

        Raises:
            ConfigError: Something has no text.
        """
        self._define(self._name, function, function.__globals__)
        return _join(self._imports, self._definitions)

    def _define(self, name: str, value: Any, namespace: Mapping[str, Any]) -> None:
        """Write a function or a class, behind what it uses."""
        if isinstance(value, FunctionType) and value.__code__.co_freevars:
            variables = ", ".join(value.__code__.co_freevars)
            raise _refuse(
                self._name,
                f"{name} uses {variables} of the function around it; pass constants by "
                "reward.options, or define them at the top level",
            )
        try:
            source = textwrap.dedent(inspect.getsource(value))
        except (OSError, TypeError):
            raise _refuse(self._name, f"the source of {name} is in no file or cell") from None
        self._names.add(name)
        for used in _list_globals(source):
            if used in namespace and used not in self._names:
                self._add(used, namespace[used], namespace)
        alias = f"{name} = {value.__name__}\n" if name != value.__name__ else ""
        self._definitions.append(source + alias)

    def _add(self, name: str, value: Any, namespace: Mapping[str, Any]) -> None:
        """Write a name of the module."""
        self._names.add(name)
        module_name = namespace.get("__name__")
        origin = sys.modules.get(getattr(value, "__module__", None) or "")
        attribute = getattr(value, "__name__", "")
        if isinstance(value, ModuleType):
            self._imports.append(_import_name(value, "", name))
        elif isinstance(value, FunctionType | type) and value.__module__ == module_name:
            self._define(name, value, namespace)
        elif vars(origin or builtins).get(attribute) is value:
            self._imports.append(_import_name(origin or builtins, attribute, name))
        elif isinstance(value, re.Pattern):
            self._imports.append(
                f"import re as _re\n{name} = _re.compile{(value.pattern, value.flags)}"
            )
        elif _is_literal(value):
            self._imports.append(f"{name} = {value!r}")
        else:
            raise _refuse(
                self._name, f"it uses {name}, a {type(value).__name__}, which has no text"
            )


def _list_globals(source: str) -> dict[str, None]:
    """Return the names that a text takes from its module."""

    def visit(table: symtable.SymbolTable) -> Iterator[str]:
        is_module = table.get_type() == "module"
        yield from (
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (is_module or symbol.is_global())
        )
        for inner in table.get_children():
            yield from visit(inner)

    names = visit(symtable.symtable(source, "reward", "exec"))
    return dict.fromkeys(name for name in names if not hasattr(builtins, name))


def _import_name(module: ModuleType, attribute: str, name: str) -> str:
    """Return the line that imports a module, or a name of it.

    A module outside of the installed packages is found by its folder, since the other process may
    search others.
    """
    path = Path(getattr(module, "__file__", None) or INSTALLED[0]).resolve()
    if any(path.is_relative_to(folder) for folder in INSTALLED):
        return (
            f"from {module.__name__} import {attribute} as {name}"
            if attribute
            else f"import {module.__name__} as {name}"
        )
    is_package = path.name == "__init__.py"
    root = path.parents[module.__name__.count(".") + is_package]
    value = f"import_module({module.__name__!r}){f'.{attribute}' if attribute else ''}"
    return (
        "import sys\nfrom importlib import import_module\n"
        f"sys.path.append({str(root)!r})\n{name} = {value}"
    )


def _join(imports: list[str], definitions: list[str]) -> str:
    head = '"""The reward function that was passed to relax_events.train."""'
    return "\n\n\n".join(["\n".join([head, "", *imports]), *definitions]).rstrip() + "\n"


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False


def _refuse(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"reward function {name} can't reach the reward worker, which is another process: {why}; "
        f"or write it into a file and pass reward='path/to/file.py:{name}'"
    )
