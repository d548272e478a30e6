"""Targets of an offset reset: versions, named offsets, times; and its warnings."""

from __future__ import annotations

from typing import Any

import pytest
from event_samples import published

from relax_events.errors import ConfigError
from relax_events.events.parts import TopicOffset
from relax_events.ops.offset_reset import (
    OffsetMove,
    ResetPlan,
    ResetTarget,
    find_version_offsets,
    parse_offsets,
    parse_time_ms,
)
from relax_events.topics import TopicPlan

PLAN = TopicPlan(
    run_id="r",
    max_staleness=1,
    partitions_per_version=1,
    queue_partitions=2,
    replication_factor=1,
    compression="none",
)
ROLLED = PLAN.topic("rollout.samples")
PLACES = [(ROLLED, partition) for partition in range(3)]


def test_version_offsets_are_the_starts_of_its_slot_and_of_later_versions() -> None:
    events = [
        published(version, start_offsets=[TopicOffset(ROLLED, version % 3, 10 * (version // 3))])
        for version in range(8)
    ]
    ends = dict.fromkeys(PLACES, 99)
    assert find_version_offsets(PLAN, events, PLACES, version=4, ends=ends) == {
        (ROLLED, 0): 20,
        (ROLLED, 1): 10,
        (ROLLED, 2): 10,
    }
    # No version from 6 on has owned slot 2 yet: all its records are older.
    assert find_version_offsets(PLAN, events, PLACES, version=6, ends=ends) == {
        (ROLLED, 0): 20,
        (ROLLED, 1): 20,
        (ROLLED, 2): 99,
    }


def test_version_that_was_not_published_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy version 3 was not published; the newest is 1"):
        find_version_offsets(PLAN, [published(0), published(1)], PLACES, version=3, ends={})


def test_prompt_queue_cannot_be_reset_to_a_version() -> None:
    with pytest.raises(ConfigError, match="prompt groups are not ordered by version"):
        find_version_offsets(
            PLAN, [published(0)], [(PLAN.topic("prompt.groups"), 0)], version=0, ends={}
        )


def test_reset_offsets_accept_short_and_full_topic_names() -> None:
    texts = ["rollout.samples[2]@17", f"{ROLLED}[0]@3"]
    assert parse_offsets(PLAN, PLACES, texts) == {(ROLLED, 2): 17, (ROLLED, 0): 3}


@pytest.mark.parametrize(
    "text",
    [
        "rollout.samples@17",
        "rollout.samples[x]@1",
        "rollout.samples[9]@1",
        "reward.scores[0]@1",
        "relax.other.rollout.samples[0]@1",
    ],
)
def test_reset_offset_of_an_unread_partition_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="--to-offset"):
        parse_offsets(PLAN, PLACES, [text])


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("1970-01-01T00:00:01Z", 1000),
        ("1970-01-01T00:00:01", 1000),
        ("1970-01-01T01:00:01+01:00", 1000),
        ("1970-01-02", 86_400_000),
    ],
)
def test_time_is_iso_8601_and_utc_without_zone(text: str, milliseconds: int) -> None:
    assert parse_time_ms(text) == milliseconds


def test_invalid_reset_time_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match="'yesterday' is no time; write it like 2026-01-31T12:00:00Z"
    ):
        parse_time_ms("yesterday")


@pytest.mark.parametrize(
    "given", [{}, {"version": 1, "to_end": True}, {"offsets": ["a[0]@1"], "time_ms": 3}]
)
def test_reset_requires_exactly_one_target(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a reset needs one of --to-version"):
        ResetTarget(**given)


def test_reset_plan_flags_trainer_resets_and_skipped_records_as_risks() -> None:
    back, ahead = OffsetMove(PLACES[0], 9, 2, -7), OffsetMove(PLACES[1], 2, 9, 7)
    assert ResetPlan("reward", "g", [back]).dangers == []
    assert ResetPlan("reward", "g", [back, ahead]).dangers == ["skip"]
    assert ResetPlan("trainer", "g", [back]).dangers == ["trainer"]
