"""The join returns each prompt group once and complete, in any order of arrival, and never commits
past a record that is still needed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
from event_samples import evaluated, rolled_out, scored
from hypothesis import given
from hypothesis import strategies as st

from relax_events.events.types import SampleEvaluated, SampleRolledOut, SampleScored
from relax_events.kafka.records import Record
from relax_events.runtime.join import JoinedGroup, PromptGroupJoin

Sample = SampleRolledOut | SampleScored | SampleEvaluated
LOGPROB_ROLES = frozenset({"reference", "actor"})
KEYS = [("000000-0000-0", 0), ("000000-0001-0", 0), ("000000-0001-0", 1), ("000001-0000-0", 1)]


def events_of(group_id: str, version: int) -> list[tuple[str, Sample]]:
    """All that belongs to one generation of a prompt group of two samples, with the topics."""
    events: list[tuple[str, Sample]] = []
    for index in range(2):
        events.append(("rollout.samples", rolled_out(group_id, index, version=version)))
        events.append(("reward.scores", scored(group_id, index, version=version)))
        events += [
            (f"{name}.logprobs", evaluated(group_id, index, version=version, model_role=name))
            for name in sorted(LOGPROB_ROLES)
        ]
    return events


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[Record, Sample]]:
    """Draw any order of all records of several prompt groups, some of them twice."""
    events = [event for key in KEYS for event in events_of(*key)]
    events += draw(st.lists(st.sampled_from(events), max_size=10))
    offsets: dict[tuple[str, int], int] = {}
    placed = []
    for topic, event in draw(st.permutations(events)):
        topic_partition = (topic, event.policy_version)
        offsets[topic_partition] = offsets.get(topic_partition, -1) + 1
        headers = {"policy-version": str(event.policy_version)}
        placed.append(
            (
                Record(
                    topic,
                    topic_partition[1],
                    offsets[topic_partition],
                    event.prompt_group_id,
                    b"",
                    headers,
                    0,
                ),
                event,
            )
        )
    return placed


def generated_twice(digest: str, *, num_samples: int = 2) -> list[tuple[str, Sample]]:
    """The events of one of two generations of a prompt group under the same ids; each value
    identifies its generation."""
    number = {"a": 1, "b": 2}[digest]
    events: list[tuple[str, Sample]] = []
    for index in range(num_samples):
        tokens = np.array([5, 6, 7, number], np.int32)
        events.append(
            ("rollout.samples", rolled_out(index=index, tokens=tokens, generation_digest=digest))
        )
        events.append(
            ("reward.scores", scored(index=index, reward=float(number), generation=digest))
        )
        for name in sorted(LOGPROB_ROLES):
            one = dataclasses.replace(
                evaluated(index=index, model_role=name, generation=digest),
                values=np.full(4, number, np.float32),
            )
            events.append((f"{name}.logprobs", one))
    return events


@given(st.data())
def test_group_with_two_generations_is_joined_from_one_of_them(
    data: st.DataObject,
) -> None:
    """The first worker may have died after one of its samples; either way nothing of one generation
    is compared with the other's."""
    events = generated_twice("a", num_samples=data.draw(st.integers(1, 2))) + generated_twice("b")
    join, offsets, complete = PromptGroupJoin(logprob_roles=LOGPROB_ROLES), Counter[str](), []
    for topic, event in data.draw(st.permutations(events)):
        group = join.add(
            Record(
                topic, 0, offsets[topic], event.prompt_group_id, b"", {"policy-version": "0"}, 0
            ),
            [event],
        )
        offsets[topic] += 1
        if group is not None:
            complete.append(group)
            join.close(group)
    assert len(complete) == 1
    group = complete[0]
    number = {"a": 1, "b": 2}[group.generation_digest]
    assert {int(np.asarray(sample.tokens)[3]) for sample in group.samples.values()} == {number}
    assert {group.scores[sample.sample_id].reward for sample in group.samples.values()} == {
        float(number)
    }
    assert {
        float(np.asarray(one.values)[0])
        for name in LOGPROB_ROLES
        for one in group.logprobs[name].values()
    } == {number}
    assert join.num_dropped == sum(
        event.key.generation_digest != group.generation_digest for _, event in events
    )
    assert join.num_open == 0
    assert marks_of(join) == {(topic, 0): end for topic, end in offsets.items()}


def marks_of(join: PromptGroupJoin) -> dict[tuple[str, int], int]:
    return {(mark.topic, mark.partition): mark.offset for mark in join.pending_offsets()}


@given(arrivals())
def test_each_generation_is_complete_exactly_once_in_any_order(
    sequence: list[tuple[Record, Sample]],
) -> None:
    join = PromptGroupJoin(logprob_roles=LOGPROB_ROLES)
    complete: list[JoinedGroup] = []
    for record, event in sequence:
        if (group := join.add(record, [event])) is not None:
            complete.append(group)
            join.close(group)
    assert sorted((group.prompt_group_id, group.policy_version) for group in complete) == sorted(
        KEYS
    )
    for group in complete:
        assert [sample.key.sample_index for sample in group.ordered_samples()] == [0, 1]
        assert group.scores.keys() == group.samples.keys()
        assert all(group.logprobs[name].keys() == group.samples.keys() for name in LOGPROB_ROLES)
    assert join.num_open == 0


@given(arrivals())
def test_low_watermark_stays_below_open_groups_and_reaches_the_end_when_all_are_closed(
    sequence: list[tuple[Record, Sample]],
) -> None:
    join = PromptGroupJoin(logprob_roles=LOGPROB_ROLES)
    seen: list[tuple[Record, tuple[str, int]]] = []
    finished: set[tuple[str, int]] = set()
    previous: dict[tuple[str, int], int] = {}
    for record, event in sequence:
        key = (event.prompt_group_id, event.policy_version)
        if key not in finished:
            seen.append((record, key))
        if (group := join.add(record, [event])) is not None:
            join.close(group)
            finished.add(key)
        marks = marks_of(join)
        assert all(marks[topic_partition] >= mark for topic_partition, mark in previous.items())
        assert all(
            record.offset >= marks[record.topic, record.partition]
            for record, key in seen
            if key not in finished
        )
        previous = marks
    ends: dict[tuple[str, int], int] = {}
    for record, _ in sequence:
        ends[record.topic, record.partition] = record.offset + 1
    assert marks_of(join) == ends


@given(arrivals(), st.data())
def test_crash_at_any_point_loses_no_group(
    sequence: list[tuple[Record, Sample]], data: st.DataObject
) -> None:
    """A successor that starts at the committed offsets completes the prompt groups that the dead worker did not."""
    crash = data.draw(st.integers(0, len(sequence)))
    join, emitted = PromptGroupJoin(logprob_roles=LOGPROB_ROLES), set()
    for record, event in sequence[:crash]:
        if (group := join.add(record, [event])) is not None:
            join.close(group)
            emitted.add((group.prompt_group_id, group.policy_version))
    marks = marks_of(join)
    successor = PromptGroupJoin(logprob_roles=LOGPROB_ROLES)
    for record, event in sequence:
        if (
            record.offset >= marks.get((record.topic, record.partition), 0)
            and (group := successor.add(record, [event])) is not None
        ):
            successor.close(group)
            emitted.add((group.prompt_group_id, group.policy_version))
    assert emitted == set(KEYS)


@given(arrivals())
def test_join_drops_one_partition_and_keeps_the_others(
    sequence: list[tuple[Record, Sample]],
) -> None:
    join = PromptGroupJoin(logprob_roles=LOGPROB_ROLES)
    for record, event in sequence[: len(sequence) // 2]:
        if (group := join.add(record, [event])) is not None:
            join.close(group)
    before = marks_of(join)
    for topic in ("rollout.samples", "reward.scores", "reference.logprobs", "actor.logprobs"):
        join.drop_partition(topic, 1)
    assert marks_of(join) == {
        topic_partition: mark for topic_partition, mark in before.items() if topic_partition[1] != 1
    }
    for record, event in sequence:
        if event.policy_version == 1 and (group := join.add(record, [event])) is not None:
            join.close(group)
    again = marks_of(join)
    assert all(
        again[record.topic, 1] > record.offset
        for record, event in sequence
        if event.policy_version == 1
    )


def record_of(
    offset: int, key: str, *, version: int | None = 0, topic: str = "rollout.samples"
) -> Record:
    return Record(
        topic, 0, offset, key, b"", {} if version is None else {"policy-version": str(version)}, 0
    )


def test_late_records_of_a_poisoned_group_are_ignored() -> None:
    join = PromptGroupJoin(logprob_roles=frozenset())
    assert join.add(record_of(0, "000000-0000-0"), [rolled_out()]) is None
    group = join.fail(record_of(1, "000000-0000-0"), "tokens must be finite")
    assert group is not None
    assert group.failure == "tokens must be finite"
    assert list(group.samples) == ["000000-0000-0/0"]
    join.close(group)
    assert join.fail(record_of(2, "000000-0000-0"), "again") is None
    assert join.add(record_of(3, "000000-0000-0"), [rolled_out(index=1)]) is None
    assert marks_of(join) == {("rollout.samples", 0): 4}


def test_expired_groups_are_those_below_the_window() -> None:
    join = PromptGroupJoin(logprob_roles=frozenset())
    for offset, (group_id, version) in enumerate(KEYS):
        join.add(
            record_of(offset, group_id, version=version), [rolled_out(group_id, version=version)]
        )
    assert [
        (group.prompt_group_id, group.has_all_samples) for group in join.evict_older_than(1)
    ] == [
        ("000000-0000-0", False),
        ("000000-0001-0", False),
    ]
    for group in join.evict_older_than(1):
        join.close(group)
    assert join.evict_older_than(1) == []
    assert marks_of(join) == {("rollout.samples", 0): 2}


def test_evaluations_of_other_samples_do_not_complete_a_group() -> None:
    join = PromptGroupJoin(logprob_roles=frozenset({"reference"}))
    for index in range(2):
        join.add(record_of(index, "g"), [rolled_out(index=index)])
        join.add(record_of(index, "g", topic="reward.scores"), [scored(index=index)])
    join.add(record_of(0, "g", topic="reference.logprobs"), [evaluated(index=0)])
    assert join.add(record_of(1, "g", topic="reference.logprobs"), [evaluated(index=7)]) is None
    assert join.add(record_of(2, "g", topic="reference.logprobs"), [evaluated(index=1)]) is not None


def test_skipped_record_advances_the_watermark() -> None:
    join = PromptGroupJoin(logprob_roles=frozenset())
    join.skip(record_of(4, "g"))
    assert marks_of(join) == {("rollout.samples", 0): 5}
