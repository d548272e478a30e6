"""Finds and loads plugins: roles, engines, trainer backends, optimizers, rewards, environments,
algorithms, trackers, exporters of samples, and the page and the report of a run.

A plugin is an installed entry point, or `path/to/file.py:Name`, which needs no package.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from relax_events.errors import ConfigError

ROLES = "relax_events.roles"
ENGINES = "relax_events.engines"
TRAINER_BACKENDS = "relax_events.trainer_backends"
REWARDS = "relax_events.rewards"
ENVIRONMENTS = "relax_events.environments"
DRIVERS = "relax_events.drivers"
ALGORITHMS = "relax_events.algorithms"
TRACKERS = "relax_events.trackers"
OPTIMIZERS = "relax_events.optimizers"
PROMPT_SOURCES = "relax_events.prompt_sources"
EXPORTERS = "relax_events.exporters"
PAGES, REPORTS = "relax_events.pages", "relax_events.reports"
CLASS, FUNCTION = type, Callable
NAMES = {CLASS: "class", FUNCTION: "function"}


def select_named(function: Callable[..., Any], offered: Iterable[str]) -> tuple[str, ...]:
    """Return the offered keyword arguments that a function names, or all if it takes any: a user's
    function needs to name only the arguments that it reads.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return tuple(name for name in offered if takes_any or name in parameters)


@dataclass(frozen=True, slots=True)
class FilePlugin:
    """A class, function or other object in a Python file that has not been loaded yet."""

    path: Path
    attribute: str
    what: str
    accepts: Any = CLASS

    def load(self) -> Any:
        """Run the file and return the object of this name.

        Raises:
            ConfigError: The file fails to load, or does not define the object.
        """
        module = load_file(self.path, what=self.what)
        target = getattr(module, self.attribute, None)
        if not isinstance(target, self.accepts):
            defined = ", ".join(self._defined(module)) or "none"
            raise ConfigError(
                f"{self.what}: {self.path} has no {describe_kind(self.accepts)} "
                f"{self.attribute!r}, only {defined}"
            )
        return target

    def _defined(self, module: ModuleType) -> list[str]:
        """List the names of this kind that the file itself defines, without its imports."""
        members = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, self.accepts) and not name.startswith("_")
        }
        return [
            name
            for name, value in members.items()
            if not callable(value) or value.__module__ == module.__name__
        ]


def describe_kind(accepts: Any) -> str:
    """Return a readable name for a kind of plugin."""
    return NAMES.get(accepts) or str(accepts.__name__)


def find_plugin(
    group: str, name: str, *, what: str, accepts: Any = CLASS
) -> EntryPoint | FilePlugin:
    """Return an installed entry point, or the plugin of a file given as `path/to/file.py:Name`,
    without loading it.

    Args:
        group: An entry-point group of this module.
        name: The plugin's name.
        what: How error texts refer to the plugin, for example `engine.name = 'vroom'`.
        accepts: What the file must define under the name: a `CLASS`, a `FUNCTION`, or an object of
            this class.
    Raises:
        ConfigError: No plugin of that name is installed (the text lists the installed ones), or the
            file does not exist.
    """
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py") and attribute:
        if not Path(path).is_file():
            example = f"path/to/file.py:{'Class' if accepts is CLASS else describe_kind(accepts)}"
            where = "" if Path(path).is_absolute() else f" in the working directory {Path.cwd()}"
            raise ConfigError(
                f"{what}: file {path} does not exist{where}; give {example}, or the name of an "
                "installed one"
            )
        return FilePlugin(Path(path), attribute, what, accepts)
    offered = list_installed(group)
    if name not in offered:
        close = difflib.get_close_matches(name, sorted(offered), n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"{what} is not installed; installed are {', '.join(sorted(offered))}{meant}"
        )
    return offered[name]


def find_missing_import(plugin: EntryPoint | FilePlugin) -> str | None:
    """Return the first package that a plugin's module imports and that is not installed. The module
    is parsed, not run.

    Args:
        plugin: A plugin as found. Imports inside functions are not checked.
    """
    if isinstance(plugin, FilePlugin):
        path, siblings = plugin.path, {file.stem for file in plugin.path.parent.glob("*.py")}
    else:
        spec = importlib.util.find_spec(plugin.module)
        if spec is None or spec.origin is None:
            return plugin.module
        path, siblings = Path(spec.origin), set[str]()
    module_names: list[str] = []
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Import):
            module_names += [name.name for name in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            module_names.append(statement.module)
    packages = dict.fromkeys(name.partition(".")[0] for name in module_names)
    return next(
        (
            name
            for name in packages
            if name not in siblings and importlib.util.find_spec(name) is None
        ),
        None,
    )


@cache
def list_installed(group: str) -> dict[str, EntryPoint]:
    """Return the installed entry points of a group, by name. Cached, because each look-up reads a
    file of every installed package.
    """
    return {entry.name: entry for entry in entry_points(group=group)}


def load_installed(group: str) -> list[Any]:
    """Load all entry points of a group; those of a package whose files are gone are left out."""
    loaded = []
    for entry in list_installed(group).values():
        try:
            loaded.append(entry.load())
        except ModuleNotFoundError as error:
            if error.name is None or not f"{entry.module}.".startswith(f"{error.name}."):
                raise
    return loaded


class UncachedLoader(SourceFileLoader):
    """A source loader without the bytecode cache, which misses a change within one second that
    keeps the file size.
    """

    def get_code(self, fullname: str) -> CodeType:
        """See `importlib.abc.InspectLoader`."""
        return self.source_to_code(self.get_data(self.path), self.path)


def load_file(path: Path, *, what: str) -> ModuleType:
    """Run a user's Python file as a module of its own; it can import the files in its folder.

    Args:
        path: The file.
        what: How error texts refer to the file, for example `reward file`.
    Raises:
        ConfigError: The file is missing, not Python, or fails to load; the text names the line.
    """
    name = f"relax_user_{path.stem}"
    sys.path.append(str(path.resolve().parent))
    if path.suffix != ".py":
        raise ConfigError(f"{what} {path} is not a Python file; its name must end in .py")
    loader = UncachedLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "a file that is given with its loader has a spec"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(
            f"{what} {path} has a syntax error in line {error.lineno}: {error.msg}"
        ) from None
    except Exception as error:  # The user's module may raise any exception.
        raise ConfigError(
            f"{what} {path} failed to load: {type(error).__name__}: {error}"
        ) from error
    return module
