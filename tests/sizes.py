"""How large the library is, and the limits that only fall: `python -m tests.sizes [--lower]`.

`sizes.toml` next to this file holds a limit for each measure. CI fails when a measure is above its
limit, and when it is so far below it that the limit should be lowered: `--lower` does that. A
limit is raised by hand, in a commit that also writes an ADR (tests/component/test_commits.py).
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).parent / "sizes.toml"
LIBRARY = ("relax_events", "workers")
RUN_CONFIG_ROOMS = frozenset({"api", "cli", "launcher", "roles", "workers", "config"})
"""Below these rooms a function takes a section of the configuration, not the whole."""
UNCLEAR_NAMES = frozenset({"found", "given", "known", "own", "said", "wanted"})
"""Variables with such a name don't say which noun they hold."""
CONFIG_CLASS = re.compile(r"(Config|Section|Options|Settings)$")
PROCESS_START = re.compile(
    r"\b(Popen|create_subprocess_exec|create_subprocess_shell|posix_spawn|os\.fork)\("
)
NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)

Sizes = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Module:
    """A source file of the library."""

    name: str
    is_package: bool
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The folder or file below `relax_events` or its `packages`, or the folder of the
        workers.
        """
        parts = self.name.split(".")
        if self.is_in_packages:
            return parts[min(2, len(parts) - 1)]
        return parts[1] if parts[0] == "relax_events" and len(parts) > 1 else parts[0]

    @property
    def is_in_packages(self) -> bool:
        """Whether it stands on the core as a package."""
        return self.name.startswith("relax_events.packages")

    @property
    def is_core(self) -> bool:
        """Whether it is neither a package nor what packages import."""
        return not self.is_in_packages and self.room != "api"


def read_modules(root: Path) -> list[Module]:
    """Read the library's files, sorted by path."""
    modules = []
    for path in sorted(path for folder in LIBRARY for path in (root / folder).rglob("*.py")):
        text = path.read_text()
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        modules.append(Module(name, path.name == "__init__.py", text, ast.parse(text)))
    return modules


def count_code_lines(text: str) -> int:
    """Count the lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        for docstring in _find_docstrings(node):
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def _find_docstrings(node: ast.AST) -> Iterator[ast.Expr]:
    body = getattr(node, "body", None)
    for item in body if isinstance(body, list) else ():
        if (
            isinstance(item, ast.Expr)
            and isinstance(item.value, ast.Constant)
            and isinstance(item.value.value, str)
        ):
            yield item


def find_imports(module: Module, names: frozenset[str], *, with_types: bool = False) -> set[str]:
    """Return the library's modules that a file imports when it is loaded or run; imports for the
    type checker count only `with_types`.
    """
    type_checking = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    imports: set[str] = set()
    for node in ast.walk(module.tree):
        if id(node) in type_checking and not with_types:
            continue
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            imports.add(node.module)
            imports.update(f"{node.module}.{alias.name}" for alias in node.names)
    return (imports & names) - {module.name}


def count_longest_chain(graph: Mapping[str, set[str]]) -> int:
    """Return how many modules the longest chain of imports has; a circle counts as one."""
    digraph = nx.DiGraph({name: sorted(targets) for name, targets in graph.items()})
    return nx.dag_longest_path_length(nx.condensation(digraph)) + 1


def count_floors(modules: list[Module], graph: Mapping[str, set[str]]) -> int:
    """Return how many rooms the longest chain of imports between rooms has."""
    rooms = {module.name: module.room for module in modules}
    floors: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, targets in graph.items():
        floors[rooms[name]].update({rooms[target] for target in targets} - {rooms[name]})
    return count_longest_chain(floors)


def count_config_keys(modules: list[Module]) -> int:
    """Count the fields of the configuration's classes."""
    return sum(
        isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
        for module in modules
        if module.room == "config"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and CONFIG_CLASS.search(node.name)
        for item in node.body
    )


def count_unclear_names(modules: list[Module]) -> int:
    """Count the variables and parameters whose name does not say what they hold, in each file
    once, and the functions whose name ends in `_of`.
    """
    return sum(
        len({name for node in ast.walk(module.tree) if (name := _name_variable(node))})
        + sum(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.endswith("_of")
            for node in ast.walk(module.tree)
        )
        for module in modules
    )


def _name_variable(node: ast.AST) -> str:
    name = ""
    if isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        name = node.id
    return name if name.strip("_") in UNCLEAR_NAMES else ""


def list_imports_past_the_api(modules: list[Module]) -> list[tuple[str, str]]:
    """Return each package with a module of the core that it imports other than by the API."""
    names = frozenset(module.name for module in modules)
    core = {module.name for module in modules if module.is_core}
    return sorted(
        {
            (module.room, target)
            for module in modules
            if module.is_in_packages
            for target in find_imports(module, names, with_types=True) & core
            if target != "relax_events"
        }
    )


def count_commands() -> int:
    """Count the commands that `relax` offers, subcommands included and their groups not."""
    from cyclopts import App

    from relax_events.cli.app import app as root

    def count(app: App) -> int:
        children = [app[name] for name in app if not name.startswith("-")]
        return sum(map(count, children)) if children else 1

    return count(root)


def measure(root: Path) -> Sizes:
    """Return each measure by table and name, as `sizes.toml` has them."""
    modules = read_modules(root)
    core = [module for module in modules if module.is_core]
    core_names = frozenset(module.name for module in core)
    graph = {module.name: find_imports(module, core_names) for module in core}
    lines: Counter[str] = Counter()
    for module in modules:
        lines[module.room] += count_code_lines(module.text)
    return {
        "whole": {
            "code_lines": lines.total(),
            "core_code_lines": sum(count_code_lines(module.text) for module in core),
            "files": len(modules),
            "core_files": len(core),
            "import_chain": count_longest_chain(graph),
            "floors": count_floors(core, graph),
            "imports_past_the_api": len(list_imports_past_the_api(modules)),
            "config_keys": count_config_keys(modules),
            "commands": count_commands(),
            "files_that_name_run_config": sum(
                "RunConfig" in module.text and module.room not in RUN_CONFIG_ROOMS
                for module in modules
            ),
            "files_that_start_processes": sum(
                bool(PROCESS_START.search(module.text)) for module in modules
            ),
            "unclear_names": count_unclear_names(modules),
        },
        "code_lines": dict(sorted(lines.items())),
    }


def read_limits(text: str) -> Sizes:
    """Read the limits of `sizes.toml`."""
    return tomllib.loads(text)


def compute_limit(table: str, name: str, size: int) -> int:
    """Return the limit that a measure of this size gets: code lines have room for repairs, of 1 %
    and at least 10 lines; all else has none.
    """
    return size + max(10, size // 100) if "code_lines" in table or "code_lines" in name else size


def find_violations(sizes: Sizes, limits: Sizes) -> list[str]:
    """Return a sentence for each measure that is above its limit, has none, or is far below it."""
    sentences = []
    for table, measures in sizes.items():
        for name, size in measures.items():
            limit = limits.get(table, {}).get(name)
            if limit is None:
                sentences.append(f"{table}.{name} is {size} and has no limit in tests/sizes.toml")
            elif size > limit:
                sentences.append(f"{table}.{name} is {size}, above its limit of {limit}")
            elif 2 * compute_limit(table, name, size) - size < limit:
                sentences.append(
                    f"{table}.{name} is {size}, below its limit of {limit}; "
                    "lower the limits: python -m tests.sizes --lower"
                )
        gone = limits.get(table, {}).keys() - measures.keys()
        sentences += [f"{table}.{name} has a limit, but is no more" for name in sorted(gone)]
    return sentences


def find_raised(before: Sizes, after: Sizes) -> list[str]:
    """Return the limits that are higher than before, or new."""
    return [
        f"{table}.{name}"
        for table, limits in after.items()
        for name, limit in limits.items()
        if limit > before.get(table, {}).get(name, 0)
    ]


def lower_limits(sizes: Sizes, limits: Sizes) -> str:
    """Return the text of `sizes.toml` with each limit lowered to its measure, none raised."""
    lines = ["# Written by `python -m tests.sizes --lower`; see tests/sizes.py.\n"]
    for table, measures in sizes.items():
        lines.append(f"\n[{table}]\n")
        known_limits = limits.get(table, {})
        lines += [
            f"{name} = {min(limit, known_limits.get(name, limit))}\n"
            for name, size in measures.items()
            for limit in [compute_limit(table, name, size)]
        ]
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true", help="lower the limits to the measures")
    sizes = measure(ROOT)
    if parser.parse_args().lower:
        limits = read_limits(LIMITS.read_text()) if LIMITS.exists() else {}
        LIMITS.write_text(lower_limits(sizes, limits))
    limits = read_limits(LIMITS.read_text())
    for table, measures in sizes.items():
        for name, size in measures.items():
            print(f"{table}.{name:32} {size:7} of {limits.get(table, {}).get(name, 0):7}")
    violations = find_violations(sizes, limits)
    print("\n".join(violations), file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
