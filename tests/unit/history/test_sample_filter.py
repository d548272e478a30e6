"""Which samples a filter matches, and which partitions and offsets can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from event_samples import ended, rolled_out, scored

from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage, Outcome
from relax_events.events.types import PromptGroupEnded
from relax_events.history.run_log import DecodedRecord
from relax_events.history.samples.filter import UNBOUNDED, SampleFilter, VersionRange, parse_bounds
from relax_events.history.samples.view import SampleView
from relax_events.topics import TopicPlan

PLAN = TopicPlan(
    "looked-at",
    max_staleness=1,
    partitions_per_version=2,
    queue_partitions=4,
    replication_factor=1,
    compression="none",
)
# crc32 is odd, so it is in shard 1 of 2: python3 -c "import zlib;
# print(zlib.crc32(b'000004-0000-0') % 2)"
GROUP = "000004-0000-0"


def view(
    *, reward: float | None = 1.0, end: PromptGroupEnded | None = None, **changes: Any
) -> SampleView:
    score = None if reward is None else scored(reward=reward)
    return SampleView(rolled_out(**changes), "topic[0]@0", 1, score, end)


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("", UNBOUNDED),
        ("3", (3, 3)),
        ("3..7", (3, 7)),
        ("..0.2", (-math.inf, 0.2)),
        ("0.9..", (0.9, math.inf)),
        ("-1..-0.5", (-1, -0.5)),
    ],
)
def test_numeric_bounds_are_parsed(text: str, bounds: tuple[float, float]) -> None:
    assert parse_bounds(text, flag="--reward") == bounds


@pytest.mark.parametrize("text", ["..", "7..3", "high", "1..x", "nan", "1..2..3"])
def test_invalid_bounds_are_rejected_with_examples(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--version must be a number or a span such as 3\.\.7, \.\.0\.2 or 0\.9\.\., got",
    ):
        parse_bounds(text, flag="--version")


def extent(
    wanted: SampleFilter, ends: Mapping[str, DecodedRecord[PromptGroupEnded]] | None = None
) -> VersionRange:
    return wanted.version_range(PLAN, ends or {}, newest_version=9)


def test_empty_filter_covers_all_versions() -> None:
    assert extent(SampleFilter()) == VersionRange(range(10))


def test_version_range_is_limited_to_published_versions() -> None:
    assert extent(SampleFilter(versions=(3, 7))) == VersionRange(range(3, 8))
    assert extent(SampleFilter(versions=(8, math.inf))) == VersionRange(range(8, 10))
    assert extent(SampleFilter(versions=(11, 12))) == VersionRange(range(0))


def test_train_step_filter_covers_only_versions_of_its_window() -> None:
    assert extent(SampleFilter(train_step=5)) == VersionRange(range(4, 6))
    assert extent(SampleFilter(train_step=0)) == VersionRange(range(1))


def test_open_prompt_group_is_searched_from_the_first_version_of_its_window() -> None:
    assert extent(SampleFilter(sample_id=f"{GROUP}/3")) == VersionRange(range(3, 10), shard=1)
    assert extent(SampleFilter(prompt_group_id=GROUP)) == VersionRange(range(3, 10), shard=1)


def test_trained_prompt_group_is_searched_in_the_version_of_its_outcome() -> None:
    ends = {GROUP: DecodedRecord(ended(GROUP, Outcome.TRAINED, version=4), "outcomes[0]@0", 1)}
    assert extent(SampleFilter(prompt_group_id=GROUP), ends) == VersionRange(range(4, 5), shard=1)


def test_failed_prompt_group_is_searched_in_all_later_versions() -> None:
    ends = {GROUP: DecodedRecord(ended(GROUP, Outcome.FAILED, version=4), "outcomes[0]@0", 1)}
    assert extent(SampleFilter(prompt_group_id=GROUP), ends) == VersionRange(range(3, 10), shard=1)


@pytest.mark.parametrize("name", ["tea", "000004-0001", "4-1-0", "000004-0001-0/x/y"])
def test_invalid_sample_id_is_rejected_with_an_example(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match="is not a prompt group id; an example is 000012-0003-0; sample ids like 000012-0003-0/5",
    ):
        SampleFilter(sample_id=name)


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        (SampleFilter(), True),
        (SampleFilter(versions=(2, 2)), True),
        (SampleFilter(versions=(3, math.inf)), False),
        (SampleFilter(rewards=(0.9, math.inf)), True),
        (SampleFilter(rewards=(-math.inf, 0.2)), False),
        (SampleFilter(worker_id="rollout-1"), True),
        (SampleFilter(worker_id="rollout-0"), False),
        (SampleFilter(contains="lemon"), True),
        (SampleFilter(contains="spell"), True),
        (SampleFilter(contains="tea"), False),
        (SampleFilter(sample_id="000000-0000-0/0"), True),
        (SampleFilter(sample_id="000000-0000-0/1"), False),
        (SampleFilter(prompt_group_id="000000-0001-0"), False),
        (SampleFilter(train_step=2), True),
        (SampleFilter(train_step=1), False),
        (SampleFilter(versions=(2, 2), contains="tea"), False),
    ],
    ids=str,
)
def test_sample_matches_when_all_conditions_hold(wanted: SampleFilter, matches: bool) -> None:
    end = ended(outcome=Outcome.TRAINED, version=2)
    messages = [ChatMessage.of_text("user", "spell it")]
    assert (
        wanted.matches(
            view(end=end, version=2, worker_id="rollout-1", completion="a lemon", messages=messages)
        )
        is matches
    )


def test_sample_without_reward_matches_no_reward_range() -> None:
    assert SampleFilter().matches(view(reward=None))
    assert not SampleFilter(rewards=(-5, 5)).matches(view(reward=None))


def test_trained_sample_has_step_and_staleness() -> None:
    end = ended(outcome=Outcome.TRAINED, version=2)
    trained = view(end=end, version=2)
    assert (trained.outcome, trained.train_step, trained.staleness(9)) == ("trained", 2, 0)
    assert (view(version=2).outcome, view(version=2).train_step, view(version=2).staleness(9)) == (
        "open",
        None,
        7,
    )


def test_untrained_generation_of_a_trained_sample_is_superseded() -> None:
    other = view(end=ended(outcome=Outcome.TRAINED, version=2), version=3)
    assert (other.outcome, other.train_step) == ("superseded", None)
