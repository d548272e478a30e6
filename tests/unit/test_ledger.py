"""The books: what strangers write is counted apart, and what was promised is proven."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from event_samples import committed, ended, published, rolled_out

from relax_events.control.ledger import Ledger, between_commits
from relax_events.events.parts import Outcome
from relax_events.events.types import PromptGroupIssued

OURS, STRANGE = "000000-0000-0", "000900-0000-0"


def issued(group_id: str = OURS) -> PromptGroupIssued:
    return PromptGroupIssued(
        prompt_group_id=group_id, train_step=0, group_index=0, attempt=0, row=0, required_policy_version=0, samples_per_prompt=2, messages=[], seed=1
    )


@pytest.fixture
def ledger() -> Ledger:
    """Return the books of a run of one step that went well."""
    books = Ledger(max_staleness=1)
    step = committed(0, prompt_group_ids=[OURS], sample_ids=[f"{OURS}/0", f"{OURS}/1"], staleness_counts=[2])
    for event in (issued(), rolled_out(OURS, 0), rolled_out(OURS, 1), step, ended(OURS, Outcome.TRAINED), published(0), published(1)):
        books.note(event)
    return books


def test_books_balance_when_all_went_well(ledger: Ledger) -> None:
    figures = ledger.figures()
    assert ledger.problems() == []
    assert figures["outcomes"] == {"issued": 1, "trained": 1, "filtered": 0, "expired": 0, "failed": 0, "in_flight": 0}
    assert (figures["samples_rolled_out"], figures["samples_trained"], figures["samples_foreign"], figures["rollouts_regenerated"]) == (2, 2, 0, 0)


def test_strangers_samples_are_counted_apart_when_they_were_refused(ledger: Ledger) -> None:
    for event in (rolled_out(STRANGE, 0), rolled_out(STRANGE, 0), ended(STRANGE, Outcome.FAILED)):
        ledger.note(event)
    figures = ledger.figures()
    assert ledger.problems() == []
    assert (figures["samples_foreign"], figures["samples_rolled_out"], figures["rollouts_regenerated"]) == (1, 2, 0)
    assert figures["outcomes"]["failed"] == 0


def test_strangers_sample_is_a_broken_promise_when_it_was_trained(ledger: Ledger) -> None:
    for event in (rolled_out(STRANGE, 0), ended(STRANGE, Outcome.TRAINED)):
        ledger.note(event)
    ledger.note(committed(1, prompt_group_ids=[STRANGE], sample_ids=[f"{STRANGE}/0"], staleness_counts=[1]))
    assert [text.partition(":")[0] for text in ledger.problems()] == ["prompt group trained that was never issued"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (committed(1, prompt_group_ids=[OURS], sample_ids=[f"{OURS}/0"], staleness_counts=[1]), "sample trained twice"),
        (committed(1, prompt_group_ids=[], sample_ids=[], staleness_counts=[0, 0, 1]), "staleness above max_staleness = 1"),
        (committed(2, prompt_group_ids=[], sample_ids=[], staleness_counts=[]), "train steps not 0, 1, 2, ..."),
        (published(5), "policy versions not 0, 1, 2, ..."),
        (ended(OURS, Outcome.FAILED), "prompt group ended in two ways"),
        (rolled_out(OURS, 2, of=3, tokens=np.array([1, 2, 3, 4], np.int32)), "sample of a trained prompt group was not trained"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_promise_is_found(ledger: Ledger, change: object, problem: str) -> None:
    ledger.note(change)  # type: ignore[arg-type]
    assert [text.partition(":")[0] for text in ledger.problems()] == [problem]


class GrowingLog:
    """A reader of topics on which a step is committed while their ends are asked for."""

    def __init__(self, *answers: int) -> None:
        self._answers = list(answers)

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        return 0, self._answers.pop(0)


def test_spans_end_before_or_after_a_step_that_is_committed_meanwhile() -> None:
    """The step's record came after the first answer, its outcomes before the second: taken together they would be a lie."""
    reader: Any = GrowingLog(4, 40, 5, 40, 5, 40)
    spans = between_commits(reader, [("steps", 0), ("outcomes", 0)])
    assert spans == {("steps", 0): (0, 5), ("outcomes", 0): (0, 40)}
