"""Dead-letter commands: which dead letters a command selects, what it requeues, and its output."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_events.cli.deadletter import hex_lines
from relax_events.errors import ConfigError
from relax_events.kafka.records import Record
from relax_events.ops.dead_letters import (
    DeadLetter,
    Selection,
    parse_dead_letter,
    raw_copy,
    require_origin,
    resolution_record,
)
from relax_events.topics import TopicPlan

PLAN = TopicPlan(
    "run",
    max_staleness=1,
    partitions_per_version=2,
    queue_partitions=4,
    replication_factor=1,
    compression="none",
)
HEADERS = {
    "policy-version": "3",
    "traced": "yes",
    "origin-topic": "relax.run.rollout.samples",
    "origin-partition": "5",
    "origin-offset": "77",
    "error-class": "PoisonSample",
    "error-text": "reward must be finite",
    "worker-id": "reward-0",
}
RECORD = Record(
    "relax.run.reward.dead-letters", 0, 12, "000001-0000-0", b"value", HEADERS, 1_700_000_000_000
)
LETTER = parse_dead_letter("reward", RECORD)
OTHER = replace(LETTER, role="trainer", offset=3, error_class="CorruptRecord")
DONE = replace(LETTER, offset=14, resolution="dropped")
LETTERS = [LETTER, OTHER, DONE]


def names(entries: list[DeadLetter]) -> list[str]:
    return [entry.id for entry in entries]


def test_dead_letter_is_parsed_from_its_headers() -> None:
    assert (LETTER.id, LETTER.origin, LETTER.num_bytes) == (
        "reward@12",
        "relax.run.rollout.samples[5]@77",
        5,
    )
    assert (LETTER.error_class, LETTER.error_text, LETTER.worker_id, LETTER.key) == (
        "PoisonSample",
        "reward must be finite",
        "reward-0",
        "000001-0000-0",
    )


def test_dead_letter_with_missing_or_invalid_headers_is_still_listed() -> None:
    strange = parse_dead_letter(
        "reward", replace(RECORD, headers={"origin-partition": "x", "origin-offset": "-1"})
    )
    assert (strange.origin_topic, strange.origin_partition, strange.origin_offset) == ("", -1, -1)


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [
        (Selection(all_roles=True), ["reward@12", "trainer@3"]),
        (Selection(all_roles=True, include_resolved=True), ["reward@12", "trainer@3", "reward@14"]),
        (Selection(role="trainer"), ["trainer@3"]),
        (Selection(reason="PoisonSample"), ["reward@12"]),
        (Selection(role="reward", reason="CorruptRecord"), []),
        (Selection(ids=["trainer@3", "reward@12", "trainer@3"]), ["trainer@3", "reward@12"]),
        (Selection(ids=["reward@14"], include_resolved=True), ["reward@14"]),
    ],
    ids=str,
)
def test_dead_letters_are_selected_by_id_role_and_reason(
    selection: Selection, chosen: list[str]
) -> None:
    assert names(selection.choose(LETTERS)) == chosen


@pytest.mark.parametrize(
    ("selection", "text"),
    [
        (
            Selection(),
            "say which dead letters: --id ID, --role ROLE, --reason CLASS or --all",
        ),
        (
            Selection(ids=["reward@13"]),
            "there is no dead letter reward@13; relax deadletter shows",
        ),
        (Selection(ids=["13"]), "'13' is no id of a dead letter; ids look like reward@12"),
        (
            Selection(ids=["reward@14"]),
            "dead letter reward@14 is dropped already; give --resolved to do it once more",
        ),
    ],
    ids=str,
)
def test_invalid_dead_letter_selection_is_rejected(selection: Selection, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        selection.choose(LETTERS)
    assert text in str(refused.value)


def test_raw_copy_restores_the_original_record() -> None:
    out = raw_copy(RECORD)
    assert (out.topic, out.partition, out.key, out.value) == (
        "relax.run.rollout.samples",
        5,
        "000001-0000-0",
        b"value",
    )
    assert out.headers == {"policy-version": "3", "traced": "yes"}


def test_resolution_record_names_the_dead_letter_and_has_no_value() -> None:
    out = resolution_record(PLAN, LETTER, "dropped", "written by a test")
    assert (out.topic, out.partition, out.value) == ("relax.run.reward.dead-letters", 0, None)
    assert out.headers == {
        "resolves": "0@12",
        "resolution": "dropped",
        "resolution-reason": "written by a test",
    }


@pytest.mark.parametrize(
    ("topic", "partition"),
    [
        ("relax.run.control.train-steps", 0),
        ("relax.other.rollout.samples", 0),
        ("relax.run.advantage.samples", 0),
        ("relax.run.prompt.groups", 0),
        ("relax.run.rollout.samples", 6),
        ("relax.run.rollout.samples", -1),
        ("relax.run.reward.dead-letters", 0),
        ("", 0),
    ],
)
def test_dead_letter_with_forged_origin_is_rejected(topic: str, partition: int) -> None:
    with pytest.raises(ConfigError, match=r"dead letter reward@12 names its origin as .*; drop it"):
        require_origin(replace(LETTER, origin_topic=topic, origin_partition=partition), PLAN)


@pytest.mark.parametrize(
    ("role", "topic", "partition"),
    [
        ("reward", "relax.run.rollout.samples", 5),
        ("rollout", "relax.run.prompt.groups", 3),
        ("trainer", "relax.run.advantage.samples", 0),
        ("trainer", "relax.run.prompt.end-requests", 0),
    ],
)
def test_origin_that_the_role_consumes_is_accepted(role: str, topic: str, partition: int) -> None:
    require_origin(replace(LETTER, role=role, origin_topic=topic, origin_partition=partition), PLAN)


def test_bytes_are_shown_as_hexadecimal_and_text() -> None:
    assert hex_lines(b"relax\x00\xffevents, the log!") == [
        "000000  72 65 6c 61 78 00 ff 65 76 65 6e 74 73 2c 20 74  relax..events, t",
        "000010  68 65 20 6c 6f 67 21                             he log!",
    ]
