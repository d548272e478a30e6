"""While a trainer waits for the last prompt groups of its step, it trains what it holds once that is
as much as what is missing. Reader, assembler and batch are fakes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relax_events.training.batch.live_batches import LiveBatches

pytestmark = pytest.mark.unit
SAMPLES_PER_PROMPT = 8


class Batch:
    """The step's batch, which counts what it trains."""

    def __init__(self, num_pending: int) -> None:
        self.num_pending, self.trained = num_pending, list[int]()

    def flush(self) -> None:
        self.trained.append(self.num_pending)
        self.num_pending = 0


def train_early(
    num_pending_groups: int,
    *,
    missing: int,
    prompts_per_step: int = 32,
    trains_at_once: bool = True,
) -> list[int]:
    """Return how many samples are trained at once while so many prompt groups are missing."""
    run = SimpleNamespace(
        prompts_per_step=prompts_per_step,
        samples_per_prompt=SAMPLES_PER_PROMPT,
        sample_order="fifo",
    )
    worker: Any = SimpleNamespace(config=SimpleNamespace(run=run))
    opener: Any = SimpleNamespace(ranks=None, trains_at_once=trains_at_once)
    unused: Any = None
    batches = LiveBatches(
        worker, unused, opener, assembler=unused, intake=unused, commits=unused, turns=unused
    )
    batch: Any = Batch(SAMPLES_PER_PROMPT * num_pending_groups)
    batches._batch = batch
    batches._train_early(missing)
    trained: list[int] = batch.trained
    return trained


@pytest.mark.parametrize(
    ("pending", "missing", "trained"),
    [(16, 16, [128]), (15, 16, []), (8, 8, [64]), (4, 4, [32]), (3, 1, []), (4, 1, [32])],
)
def test_as_much_as_is_missing_and_at_least_an_eighth_of_the_step_is_trained_early(
    pending: int, missing: int, trained: list[int]
) -> None:
    assert train_early(pending, missing=missing) == trained


def test_step_of_few_prompt_groups_is_divided_at_prompt_groups() -> None:
    assert train_early(1, missing=1, prompts_per_step=2) == [8]
    assert train_early(0, missing=1, prompts_per_step=1) == []


def test_nothing_is_trained_early_where_the_whole_step_is_computed_at_once() -> None:
    assert train_early(31, missing=1, trains_at_once=False) == []
