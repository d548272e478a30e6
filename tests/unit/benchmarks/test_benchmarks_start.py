"""Every benchmark that `python -m benchmarks` runs can be started: it imports, and has a `main`."""

import ast
import importlib
from pathlib import Path

import pytest

MAIN = Path(__file__).parents[3] / "benchmarks" / "__main__.py"
NAMES = [
    alias.name
    for node in ast.walk(ast.parse(MAIN.read_text()))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
]


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_can_be_started(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").main)
