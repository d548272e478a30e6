"""Samples and scores arrive in any order, none is held for ever, and memory is bounded."""

from __future__ import annotations

import pytest
from event_samples import published, rolled_out, scored

from relax_events.events.types import PolicyVersionPublished, SampleRolledOut, SampleScored
from relax_events.history.run_log import DecodedRecord
from relax_events.history.samples import reader as sample_tail
from relax_events.history.samples.filter import SampleFilter
from relax_events.history.samples.reader import SCORE_SECONDS, LiveSamples
from relax_events.history.samples.view import SampleLine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def live(clock: Clock) -> LiveSamples:
    return LiveSamples(SampleFilter(), newest_version=0, clock=clock)


def take(
    live: LiveSamples, event: SampleRolledOut | SampleScored | PolicyVersionPublished
) -> SampleLine | None:
    return live.add(DecodedRecord(event, "topic[0]@0", 1))


def test_sample_is_emitted_with_its_score_in_either_order(live: LiveSamples) -> None:
    assert take(live, rolled_out(index=0)) is None
    first = take(live, scored(index=0, reward=0.25))
    assert take(live, scored(index=1, reward=0.75)) is None
    second = take(live, rolled_out(index=1))
    assert first is not None
    assert second is not None
    assert [(line.sample_id, line.reward) for line in (first, second)] == [
        ("000000-0000-0/0", 0.25),
        ("000000-0000-0/1", 0.75),
    ]
    assert list(live.pop_overdue()) == []


def test_generations_of_a_sample_are_matched_separately(live: LiveSamples) -> None:
    take(live, rolled_out(version=0))
    assert take(live, scored(version=1)) is None
    line = take(live, scored(version=0))
    assert line is not None
    assert line.policy_version == 0


def test_sample_is_emitted_without_its_score_after_a_timeout(
    live: LiveSamples, clock: Clock
) -> None:
    take(live, rolled_out())
    clock.now += SCORE_SECONDS - 1
    assert list(live.pop_overdue()) == []
    clock.now += 1
    assert [line.reward for line in live.pop_overdue()] == [None]
    assert take(live, scored()) is None, "it was given already"


def test_oldest_sample_is_emitted_when_too_many_wait(
    live: LiveSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_tail, "MAX_WAITING", 2)
    for index in range(3):
        take(live, rolled_out(index=index, of=3))
    assert [line.sample_id for line in live.pop_overdue()] == ["000000-0000-0/0"]


def test_oldest_scores_without_a_sample_are_dropped(
    live: LiveSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_tail, "MAX_WAITING", 2)
    for index in range(3):
        take(live, scored(index=index))
    assert take(live, rolled_out(index=0, of=3)) is None
    assert take(live, rolled_out(index=2, of=3)) is not None


def test_sample_that_does_not_match_the_filter_is_not_emitted(clock: Clock) -> None:
    live = LiveSamples(SampleFilter(rewards=(0.5, 1)), newest_version=0, clock=clock)
    take(live, rolled_out(index=0))
    assert take(live, scored(index=0, reward=0.25)) is None
    take(live, rolled_out(index=1))
    assert take(live, scored(index=1, reward=0.5)) is not None


def test_staleness_follows_the_newest_version(live: LiveSamples) -> None:
    take(live, published(3))
    take(live, published(2))
    take(live, rolled_out(version=1))
    line = take(live, scored(version=1))
    assert line is not None
    assert (line.staleness, line.outcome) == (2, "open")
