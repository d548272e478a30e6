"""The gate's list names existing tests, and none that is excluded by default."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.gate import CHOSEN, COSTLY, is_in_gate

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("name", CHOSEN + COSTLY)
def test_gate_entries_exist(name: str) -> None:
    file, _, function = name.partition("[")[0].partition("::")
    text = (TESTS / file).read_text()
    functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert function in functions or (not function and ("def test_" in text or ".TestCase" in text))


def test_gate_selects_whole_files_and_single_tests_with_their_parameters() -> None:
    assert is_in_gate("fault/test_killed_roles.py::test_anything[one]")
    assert is_in_gate(
        "fault/test_large_things.py::test_oversize_record_is_rejected_by_the_broker[prompt.groups]"
    )
    assert not is_in_gate(
        "fault/test_large_things.py::test_lost_and_corrupt_objects_fail_only_their_prompt_groups"
    )
    assert not is_in_gate("fault/test_killed_roles_more.py::test_anything")


def test_gate_selects_fast_tests_and_excludes_slow_ones() -> None:
    assert is_in_gate("unit/test_anything.py::test_one")
    assert not is_in_gate("unit/engines/test_engine_invariance.py::test_anything[qwen3]")
    assert is_in_gate("e2e/test_bad_input.py::test_taken_metrics_port_is_named")
    assert not is_in_gate(
        "e2e/test_bad_input.py::test_run_whose_rewards_all_fail_ends_with_the_reasons"
    )
    machine = "property/test_worker_machine.py::test_guarantees_hold_under_random_interleavings_and_crashes"
    assert is_in_gate(f"{machine}[WorkerMachine]")
    assert not is_in_gate(f"{machine}[OverlapMachine]")
