"""The library stays within the limits of `tests/sizes.toml`."""

from __future__ import annotations

from pathlib import Path

from tests import sizes

PROCESS_STARTS = {
    "relax_events/confinement/child.py": "the children of the pool",
    "relax_events/engines/sglang/process.py": "SGLang's server",
    "relax_events/packages/gateway/program.py": "an agent's program, which is handed descriptors",
    "relax_events/packages/gateway/program_guard.py": "the guard that ends an agent's program with it",
    "relax_events/kafka/embedded/process.py": "the embedded broker",
    "relax_events/launcher/own_process.py": "the fork server, and relax run from Python, which live as long as a run",
    "relax_events/launcher/fork_server.py": "workers, forked",
    "relax_events/packages/dashboard/run_page.py": "the page of a run",
    "relax_events/sandbox/inside/entry.py": "programs within the sandbox",
    "relax_events/sandbox/runner.py": "the sandbox's first process, which is handed descriptors",
}
"""The files that may start a process, and which process that is."""


def write_library(root: Path, **files: str) -> None:
    """Write modules below `relax_events`; two underscores stand for a folder."""
    for name, text in files.items():
        path = root / "relax_events" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    text = '"""A module."""\n\n# a comment\ndef add(\n    a,\n):\n    """Add.\n\n    More.\n    """\n    return """x\ny"""\n'
    assert sizes.count_code_lines(text) == 5


def test_chain_of_imports_is_counted_by_module_and_by_room(tmp_path: Path) -> None:
    write_library(
        tmp_path,
        a__one="from relax_events.a import two",
        a__two="from relax_events.b.three import x",
        b__three="import relax_events.c.four",
        c__four="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import relax_events.d",
        d="from relax_events.c import five",
        c__five="from relax_events import d",
    )
    modules = sizes.read_modules(tmp_path)
    names = frozenset(module.name for module in modules)
    graph = {module.name: sizes.find_imports(module, names) for module in modules}
    assert sizes.count_longest_chain(graph) == 4
    assert sizes.count_floors(modules, graph) == 3  # a, b, and the circle of c and d


def test_config_keys_and_unclear_names_are_counted(tmp_path: Path) -> None:
    write_library(
        tmp_path,
        config__engine="class EngineConfig:\n    a: int = 1\n    b: ClassVar[int] = 2\n    c: str\n",
        config__rule="class Rule:\n    a: int\n",
        data="def rows_of(given):\n    found = wanted = given\n    found = 1\n    foundation = found\n",
    )
    modules = sizes.read_modules(tmp_path)
    assert sizes.count_config_keys(modules) == 2
    assert sizes.count_unclear_names(modules) == 4  # given, found, wanted, rows_of


def test_measure_above_far_below_or_without_its_limit_is_a_violation() -> None:
    limits = {"whole": {"files": 800, "code_lines": 2000, "floors": 19, "gone": 1}}
    remedy = "lower the limits: python -m tests.sizes --lower"
    measures = {"whole": {"files": 801, "code_lines": 1959, "floors": 18, "new": 3}}
    assert sizes.find_violations(measures, limits) == [
        "whole.files is 801, above its limit of 800",
        f"whole.code_lines is 1959, below its limit of 2000; {remedy}",
        f"whole.floors is 18, below its limit of 19; {remedy}",
        "whole.new is 3 and has no limit in tests/sizes.toml",
        "whole.gone has a limit, but is no more",
    ]
    for size in (1962, 2000):
        assert not sizes.find_violations({"code_lines": {"x": size}}, {"code_lines": {"x": 2000}})


def test_limits_are_lowered_and_never_raised() -> None:
    before = {"whole": {"files": 8, "floors": 8}, "code_lines": {"data": 1020, "kafka": 1000}}
    measures = {"whole": {"files": 7, "floors": 9}, "code_lines": {"data": 400, "kafka": 999}}
    text = sizes.lower_limits(measures, before)
    assert sizes.read_limits(text) == {
        "whole": {"files": 7, "floors": 8},
        "code_lines": {"data": 410, "kafka": 1000},
    }


def test_raised_and_new_limits_are_named() -> None:
    before = {"whole": {"files": 7}}
    assert sizes.find_raised(before, {"whole": {"files": 8}}) == ["whole.files"]
    assert sizes.find_raised(before, {"code_lines": {"new": 1}}) == ["code_lines.new"]
    assert not sizes.find_raised(before, {"whole": {"files": 7}})


def test_library_is_within_its_limits() -> None:
    violations = sizes.find_violations(
        sizes.measure(sizes.ROOT), sizes.read_limits(sizes.LIMITS.read_text())
    )
    assert not violations, "\n".join(violations)


def test_only_named_files_start_processes() -> None:
    files = {
        str(path.relative_to(sizes.ROOT))
        for path in (sizes.ROOT / "relax_events").rglob("*.py")
        if path.relative_to(sizes.ROOT).parts[1] != "attacks"  # it starts what it attacks
        and sizes.PROCESS_START.search(path.read_text())
    }
    assert files == PROCESS_STARTS.keys()
