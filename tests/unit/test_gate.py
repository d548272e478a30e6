"""The list of the gate names tests that are there, and none that is left out by default."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.gate import GATE, is_in_gate

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", GATE)
def test_gate_names_what_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((TESTS / file).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function in functions or (not function and any(found.startswith("test_") for found in functions))


def test_gate_takes_whole_files_and_single_tests_with_their_parameters() -> None:
    assert is_in_gate("fault/test_poison.py::test_anything[one]")
    assert is_in_gate("fault/test_large_things.py::test_oversize_record_is_refused_by_the_broker[prompt.groups]")
    assert not is_in_gate("fault/test_large_things.py::test_lost_and_altered_objects_cost_their_prompt_groups_alone")
    assert not is_in_gate("fault/test_poison_more.py::test_anything")
