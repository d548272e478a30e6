"""Decides which names of a solution its tests may read.

Tests read `abs`, `set` or `math` to judge a result. A solution that defines such a name must not
answer for it, so it keeps these names for its own use alone.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from names_in_code import INDIRECT, TestNames

BUILTIN_NAMES = frozenset(dir(builtins))
HARNESS_NAMES = frozenset({"check", "candidate"})
"""Names that published tests define themselves; see HumanEval (arXiv 2107.03374)."""
INDIRECT_MODULES = frozenset({"solution", "builtins", "importlib", "inspect", "sys"})
"""Modules by which tests may read a name that does not stand in their code."""
MODULE_ALIASES = {
    "np": "numpy",
    "pd": "pandas",
    "plt": "matplotlib.pyplot",
    "sp": "scipy",
    "nx": "networkx",
    "tf": "tensorflow",
    "sns": "seaborn",
    "mock": "unittest.mock",
    "npt": "numpy.testing",
}
LIBRARY = {
    "collections": "ChainMap Counter OrderedDict UserDict UserList UserString defaultdict deque "
    "namedtuple",
    "copy": "deepcopy",
    "dataclasses": "asdict astuple dataclass",
    "datetime": "timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "cmp_to_key reduce",
    "heapq": "heapify heappop heappush",
    "itertools": "chain combinations groupby islice permutations starmap zip_longest",
    "math": "fabs fsum inf isclose isfinite isinf isnan nan pi sqrt",
    "numpy": "allclose array_equal ndarray",
    "numpy.testing": "assert_allclose assert_almost_equal assert_array_almost_equal "
    "assert_array_equal assert_equal",
    "operator": "attrgetter itemgetter methodcaller",
    "pytest": "approx raises",
    "random": "randint shuffle",
    "typing": "Any Callable Dict FrozenSet Iterable Iterator List Mapping NamedTuple Optional "
    "Sequence Tuple TypeVar Union",
    "unittest": "TestCase",
}
"""Names that published tests read without importing them, by the module that has them."""
LIBRARY_NAMES = {name: module for module, names in LIBRARY.items() for name in names.split()}
OUR_MODULES = frozenset(path.stem for path in Path(__file__).parent.glob("*.py"))
"""Modules of this folder. The tests can import them, but they are no library."""


def choose_definitions(defined: Mapping[str, Any], names: TestNames) -> dict[str, Any]:
    """Return the definitions of a solution that its tests may read without an import.

    Not among them: names of builtins, of modules and of what tests use from libraries, and names
    that the tests bind. Where the solution only imports a library's object, the tests get their
    own. Tests that read one such name and nothing else test it, so they get the solution's. Tests
    that import from `solution` name what they read, so they get nothing else of it.
    """
    names_all = "solution" in names.imported and not names.imports_all
    tested = _find_tested_name(names)
    chosen: dict[str, Any] = {}
    for name, value in defined.items():
        if name in names.bound and name not in names.first_read:
            continue
        if name == tested or not _is_reserved(name, names.first_read):
            chosen |= {} if names_all else {name: value}
        elif name in names.first_read and name not in BUILTIN_NAMES:
            chosen |= _find_library_object(name, value)
    return chosen


def explain_missing(name: str | None, defined: Collection[str]) -> str | None:
    """Return why the tests may not read a name that the solution defines; None if it does not."""
    if name not in defined:
        return None
    return (
        f"the tests read {name!r}, and take it from the solution, which may not decide what its "
        f"tests use; import or define {name!r} in the tests, or read it as `solution.{name}`"
    )


def _find_tested_name(names: TestNames) -> str | None:
    """Return the only name that the tests read from outside, without builtins if there are
    several; None where they may read others.
    """
    if names.first_read & INDIRECT or names.imported & INDIRECT_MODULES:
        return None
    read = names.first_read if len(names.first_read) == 1 else names.first_read - BUILTIN_NAMES
    return next(iter(read)) if len(read) == 1 else None


def _is_reserved(name: str, read: Collection[str]) -> bool:
    return (
        name in BUILTIN_NAMES
        or name in HARNESS_NAMES
        or name in LIBRARY_NAMES
        or name in MODULE_ALIASES
        or name in sys.stdlib_module_names
        or (name in read and _is_installed(name))
    )


def _is_installed(name: str) -> bool:
    """Return whether the tests can import a module of this name from a package."""
    if name in OUR_MODULES:
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _find_library_object(name: str, value: Any) -> dict[str, Any]:
    """Return the library's object by its name, if the solution's value says to be that one."""
    claimed = getattr(value, "_home", None)
    try:
        if claimed == "module":
            return {name: importlib.import_module(MODULE_ALIASES.get(name, name))}
        home = name if claimed == name else LIBRARY_NAMES.get(name)
        if home is None:
            return {}
        library_object = getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError, OSError):
        return {}
    if type(value) in (int, float, str):
        return {name: library_object} if value == library_object else {}
    is_claimed = claimed is not None and claimed == getattr(library_object, "__module__", None)
    return {name: library_object} if is_claimed else {}
