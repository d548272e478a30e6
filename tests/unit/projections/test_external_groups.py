"""External prompt groups are recognized by their ids everywhere and have no side effects: they take
no batch slot and count as no failure.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
from event_samples import ended

from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage, Outcome
from relax_events.events.types import PromptGroupIssued
from relax_events.projections.ledger import Ledger
from relax_events.projections.run_state import RunState
from relax_events.runtime.validation import check_issued
from relax_events.staleness import IssuedGroup, is_external
from relax_events.training.batch import assembly
from tests.unit.run_events import at

GUEST = "000003-1000000-0"
OURS = "000003-0001-0"


def issued(prompt_group_id: str = GUEST) -> PromptGroupIssued:
    group = IssuedGroup.parse(prompt_group_id)
    return PromptGroupIssued(
        prompt_group_id=prompt_group_id,
        train_step=group.slot.train_step,
        group_index=group.slot.group_index,
        attempt=group.attempt,
        row=-1,
        required_policy_version=0,
        samples_per_prompt=2,
        messages=[ChatMessage.of_text("user", "say hi")],
        seed=1,
    )


@pytest.mark.parametrize(
    ("prompt_group_id", "expected"),
    [
        (GUEST, True),
        ("000000-999999999999-7", True),
        ("000003-999999-0", False),
        (OURS, False),
        ("external", False),
    ],
)
def test_external_group_is_recognized_by_its_index(prompt_group_id: str, expected: bool) -> None:
    assert is_external(prompt_group_id) is expected


@pytest.mark.parametrize("changes", [{"train_step": 4}, {"group_index": 1}, {"attempt": 1}])
def test_prompt_group_whose_id_names_another_batch_slot_is_poison(changes: dict[str, int]) -> None:
    event = issued()
    assert check_issued(event) is event
    text = (
        f"prompt group {GUEST}: the id must name train_step, group_index and attempt "
        f"({changes.get('train_step', 3)}, "
    )
    with pytest.raises(PoisonSample, match=re.escape(text)):
        check_issued(dataclasses.replace(event, **changes))


def test_failed_external_groups_do_not_count_as_consecutive_failures() -> None:
    state = RunState()
    for index in range(5):
        state.apply(ended(f"000000-{1_000_000 + index}-0", Outcome.FAILED))
    assert (state.num_consecutive_failures, state.outcomes) == (0, {})
    state.apply(ended(OURS, Outcome.FAILED))
    assert (state.num_consecutive_failures, state.outcomes) == (1, {"failed": 1})


def test_ledger_counts_external_groups_separately() -> None:
    ledger = Ledger(max_staleness=1)
    for event in (issued(), issued(OURS)):
        ledger.apply(event, at("prompt.groups"))
    for event in (ended(GUEST, Outcome.FILTERED), ended(OURS, Outcome.FAILED)):
        ledger.apply(event, at("control.prompt-group-outcomes"))
    for _ in range(2):
        totals = ledger.totals()
        assert totals["prompt_groups_external"] == 1
        assert totals["outcomes"] == {
            "issued": 1,
            "trained": 0,
            "filtered": 0,
            "expired": 0,
            "failed": 1,
            "in_flight": 0,
        }
        assert ledger.problems() == []
        for _ in range(2):
            ledger.finalize(100)  # then both are counted and forgotten


def test_evicted_external_group_marks_no_step_as_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """An external producer chooses the step in its id: it may be far ahead of the trainer's."""
    monkeypatch.setattr(assembly, "DEDUP_WINDOW_SIZE", 4)
    decided = assembly.DedupWindow(())
    decided.add("999999-1000000-0")
    for step in range(4):
        decided.add(f"{step:06d}-0000-0")
    assert "000001-0005-0" not in decided
    assert "000000-0005-0" in decided
