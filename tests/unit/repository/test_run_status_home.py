"""The status of a run is decided in one place: it was decided in three, with other limits."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
HOME = ROOT / "relax_events" / "projections" / "run_status.py"


def find_decisions(source: str) -> list[int]:
    """Return the lines where the status `interrupted` is named other than in a comparison."""
    tree = ast.parse(source)
    compared = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for part in (node.left, *node.comparators)
        if isinstance(part, ast.Attribute)
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and node.value == "interrupted")
        or (
            isinstance(node, ast.Attribute)
            and node.attr == "INTERRUPTED"
            and id(node) not in compared
        )
    ]


def test_run_status_is_decided_in_one_file() -> None:
    files = [*(ROOT / "relax_events").rglob("*.py"), *(ROOT / "workers").rglob("*.py")]
    decisions = {
        str(path.relative_to(ROOT)): lines
        for path in files
        if path != HOME and (lines := find_decisions(path.read_text("utf-8")))
    }
    assert decisions == {}, "ask relax_events/projections/run_status.py"


def test_a_second_decision_is_noticed() -> None:
    assert find_decisions('x = "running" if alive else "interrupted"') == [1]
    assert find_decisions("return RunStatus.INTERRUPTED") == [1]
    assert find_decisions("if status is RunStatus.INTERRUPTED: pass") == []
    assert find_decisions(HOME.read_text("utf-8"))
