"""Rescoring with a reward function for whole prompt groups: how samples are gathered, and which are
scored again. The log is a fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from event_samples import rolled_out, sample_key

from relax_events.config import RewardConfig
from relax_events.events.parts import FinishReason
from relax_events.events.types import SampleRolledOut, SampleScored
from relax_events.ops.rescoring import KeptScores, read_completions
from relax_events.rewards.pool import RewardItem
from relax_events.rewards.scores import Score
from relax_events.rewards.scoring import build_reward_item
from relax_events.rewards.trial import Completion, FunctionScorer

pytestmark = pytest.mark.unit
A, B = "000000-0000-0", "000000-0001-0"


class Function:
    """Counts its requests by prompt group."""

    name, digest, takes_prompt_group = "rank", "d", True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def score_fetched(self, batch: Sequence[Completion]) -> list[Score]:
        self.asked += [one.item.sample_id for one in batch]
        return [Score(1.0, {}) for _ in batch]

    def fetch(self, completion: Completion) -> Completion:
        return completion

    def describe(self) -> None:
        """See `FunctionScorer.describe`; nothing is described here."""


def rescore(
    samples: list[SampleRolledOut], scored: list[SampleScored]
) -> tuple[list[str], list[str]]:
    """Return the samples that the function scored, and those whose scores were written."""
    function, written = Function(), []

    def read(_: Any, kind: type) -> list[SimpleNamespace]:
        events = samples if kind is SampleRolledOut else scored
        return [SimpleNamespace(event=event) for event in events]

    plan = SimpleNamespace(topic=lambda entity: entity, partition=lambda *_: 0)
    log: Any = SimpleNamespace(
        read=read,
        full_ranges=lambda *_: {},
        offset_ranges=lambda *_: {("rollout.samples", 0): (0, 9)},
        newest_version=0,
        plan=plan,
    )
    producer: Any = SimpleNamespace(
        write=lambda records: written.extend(record.value for record in records)
    )
    codec: Any = SimpleNamespace(encode=lambda event: event.sample_id)
    scorer: Any = function
    kept = KeptScores(log, scorer, entity="reward.scores.x", producer=producer, codec=codec)
    for batch in read_completions(log, (0, 0), [scorer]):
        assert all(isinstance(result, Score) for result in kept.score(batch))
    return function.asked, written


def test_complete_prompt_groups_are_rescored_first_and_incomplete_ones_last() -> None:
    samples = [rolled_out(A, 0), rolled_out(B, 0), rolled_out(A, 0), rolled_out(A, 1)]
    asked, written = rescore(samples, [])
    assert asked == written == [f"{A}/0", f"{A}/1", f"{B}/0"]


def test_partly_rescored_prompt_group_writes_only_its_missing_scores() -> None:
    known = SampleScored(
        key=sample_key(A),
        reward=0.5,
        reward_name="rank",
        reward_digest="d",
    )
    done = [
        SampleScored(
            key=sample_key(B, index),
            reward=0.5,
            reward_name="rank",
            reward_digest="d",
        )
        for index in (0, 1)
    ]
    asked, written = rescore(
        [rolled_out(A, 0), rolled_out(B, 0), rolled_out(B, 1), rolled_out(A, 1)], [known, *done]
    )
    assert asked == [f"{A}/0", f"{A}/1"]
    assert written == [f"{A}/1"]


def test_lost_and_late_samples_are_rescored_by_no_function() -> None:
    asked: list[str] = []

    def score_batch(items: Sequence[RewardItem]) -> list[Score]:
        asked.extend(item.sample_id for item in items)
        return [Score(1.0, {}) for _ in items]

    function: Any = FunctionScorer.__new__(FunctionScorer)
    function._config, function.score_batch = RewardConfig(on_timeout=-1.0), score_batch
    samples = [
        rolled_out(A, index, of=3, finish_reason=reason)
        for index, reason in enumerate((FinishReason.LATE, FinishReason.STOP, FinishReason.LOST))
    ]
    batch = [Completion(build_reward_item(sample), sample) for sample in samples]
    late, finished, lost = function.score_fetched(batch)
    assert (late, finished, asked) == (Score(-1.0, {}), Score(1.0, {}), [f"{A}/1"])
    assert str(lost) == f"sample {A}/2 was lost: it has no reward"
    function._config = RewardConfig(on_timeout="none")
    assert str(function.score_fetched(batch[:1])[0]) == f"sample {A}/0 was late: it has no reward"
