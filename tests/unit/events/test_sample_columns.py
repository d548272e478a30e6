"""Samples of a prompt group share a record where they can, and are read as they were written."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from event_samples import changed, ended, evaluated, ready, rolled_out, scored

from relax_events.errors import CorruptRecord
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ChatMessage, FinishReason, MediaRef, ObjectRef, StoredArray
from relax_events.events.parts import VersionSegment as Segment
from relax_events.events.sample_columns import join_one, join_samples, split_samples
from relax_events.events.types import (
    Sample,
    SampleColumns,
    SampleEvaluated,
    SampleReady,
    SampleRolledOut,
    SampleScored,
)

CODEC = EventCodec()
GROUP, OTHER_GROUP = "000003-0001-2", "000003-0002-0"
BYTES_OF_TOKEN = 4 + 1 + 4
BYTES_OF_LENGTH = 4
STORED = StoredArray("<i4", (4,), ObjectRef("memory:///x", bytes(32), 16))
MEDIA = MediaRef("memory:///x", bytes(32), "image/png", 1)


def rollout(index: int, num_tokens: int = 4, **changes: Any) -> Sample:
    """Make a sample none of whose fields has its default, and whose own fields differ from its
    neighbours'."""
    values = {
        "samples_per_prompt": 8,
        "generation_digest": "d1",
        "policy_version": 3,
        "min_policy_version": 3,
        "max_policy_version": 4 + index,
        "version_segments": [Segment(3, index), Segment(4, 1, kept_cache=True)],
        "tokens": np.arange(num_tokens, dtype=np.int32) + 100 * index,
        "loss_mask": np.full(num_tokens, index % 2, np.uint8),
        "rollout_logprobs": np.linspace(-1 - index, 0, num_tokens, dtype=np.float32),
        "temperature": 0.7,
        "finish_reason": list(FinishReason)[-1 - index % 4],
        "completion": f"text {index}",
        "turns": [ChatMessage.of_text("tool", str(number)) for number in range(index)],
        "answer": "42",
        "metadata": '{"level": 1}',
        "error": f"reason {index}",
        "worker_id": "rollout-3",
        "rolled_out_at": 10 + index,
    }
    sample: Sample = changed(rolled_out(GROUP, index), **values | changes)
    return sample


def score(index: int, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "samples_per_prompt": 8,
        "max_policy_version": index,
        "reward": None if index == 1 else index / 2,
        "components": {"format": 1.0} if index else {},
        "reward_digest": "e2",
        "error": "timed out" if index == 1 else None,
        "judge_response": f"verdict {index}",
        "seconds": 0.1 * index,
        "scored_at": 10 + index,
    }
    sample: Sample = changed(scored(GROUP, index, generation="d1"), **values | changes)
    return sample


def evaluation(index: int, num_tokens: int = 4, **changes: Any) -> Sample:
    values = np.linspace(-1 - index, 0, num_tokens, dtype=np.float32)
    own: dict[str, Any] = {
        "samples_per_prompt": 8,
        "values": values,
        "model_version": 5,
        "computed_at": 10 + index,
    }
    sample: Sample = changed(evaluated(GROUP, index, model_role="actor"), **own | changes)
    return sample


def prepared(index: int, num_tokens: int = 4, **changes: Any) -> Sample:
    """Make a sample as the trainer gets it, with the log-probabilities of two of four models."""
    values: dict[str, Any] = {
        "samples_per_prompt": 8,
        "generation_digest": "d1",
        "max_policy_version": index,
        "tokens": np.arange(num_tokens, dtype=np.int32) + 100 * index,
        "loss_mask": np.full(num_tokens, index % 2, np.uint8),
        "rollout_logprobs": np.linspace(-1 - index, 0, num_tokens, dtype=np.float32),
        "ref_logprobs": np.linspace(-2 - index, 0, num_tokens, dtype=np.float32),
        "teacher_logprobs": np.linspace(-3 - index, 0, num_tokens, dtype=np.float32),
        "advantages": np.full(num_tokens, index / 3, np.float32),
        "reward": None if index == 1 else index / 3,
        "components": {"format": 1.0} if index else {},
        "temperature": 0.7,
        "finish_reason": list(FinishReason)[index % 4],
        "version_segments": [Segment(0, index)],
        "ready_at": 10 + index,
    }
    sample: Sample = changed(ready(GROUP, index), **values | changes)
    return sample


KINDS: dict[type[Sample], Callable[..., Sample]] = {
    SampleRolledOut: rollout,
    SampleScored: score,
    SampleEvaluated: evaluation,
    SampleReady: prepared,
}
every_kind = pytest.mark.parametrize(("kind", "make"), KINDS.items())


def plain(event: Any) -> dict[str, Any]:
    """Return an event's fields in a form that can be compared, arrays with their types."""
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    arrays = {
        name: (value.dtype.str, value.shape, value.tobytes())
        for name, value in fields.items()
        if isinstance(value, np.ndarray)
    }
    return {"event": type(event).__name__} | fields | arrays


def indices(events: list[SampleColumns]) -> list[list[int]]:
    """Return the indexes of the samples of each record."""
    return [event.sample_index for event in events]


def test_every_kind_of_sample_is_tested() -> None:
    assert KINDS.keys() == set(typing.get_args(Sample))


@every_kind
def test_samples_come_back_from_one_record_as_they_were(
    kind: type, make: Callable[..., Sample]
) -> None:
    samples = [make(index) for index in (2, 0, 1, 7)]
    if kind is not SampleScored:
        samples += [make(5, 1), make(6, 0), make(3, 9)]
    (joined,) = join_samples(samples)
    assert type(joined).__name__ == kind.__name__.replace("Sample", "Samples")
    decoded = CODEC.decode(CODEC.encode(joined))
    assert list(map(plain, split_samples(decoded))) == list(map(plain, samples))


@every_kind
def test_single_sample_is_a_record_of_one_entry(kind: type, make: Callable[..., Sample]) -> None:
    sample = make(0)
    (alone,) = join_samples([sample])
    assert alone.sample_index == [0]
    assert CODEC.encode(sample) == CODEC.encode(alone) == CODEC.encode(join_one(sample))
    (back,) = split_samples(CODEC.decode(CODEC.encode(sample)))
    assert type(back) is kind
    assert plain(back) == plain(sample)
    assert list(join_samples([])) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_group_id": OTHER_GROUP},
        {"generation_digest": "d2"},
        {"policy_version": 2},
        {"attempt": 1},
        {"temperature": 1.0},
        {"messages": [ChatMessage.of_text("user", "say ho")]},
        {"num_prompt_tokens": 1},
        {"answer": "43"},
        {"metadata": "{}"},
        {"worker_id": "rollout-4"},
    ],
    ids=str,
)
def test_samples_that_differ_in_what_a_record_shares_are_kept_apart(
    changes: dict[str, Any],
) -> None:
    group = changes.get("prompt_group_id", GROUP)
    others = [rollout(index, **changes, sample_id=f"{group}/{index}") for index in (2, 3)]
    events = list(join_samples([rollout(0), rollout(1), *others]))
    assert indices(events) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (score, {"reward_name": "other"}),
        (score, {"reward_digest": "e3"}),
        (evaluation, {"model_role": "teacher"}),
        (evaluation, {"model_version": 6}),
        (evaluation, {"values": np.zeros(4)}),
        (prepared, {"temperature": 1.0}),
        (prepared, {"values": np.zeros(4, np.float32)}),
        (prepared, {"values": np.zeros(4)}),
        (prepared, {"ref_logprobs": None}),
        (prepared, {"ref_logprobs": None, "actor_logprobs": np.zeros(4, np.float32)}),
    ],
)
def test_samples_that_differ_in_their_source_or_their_arrays_are_kept_apart(
    make: Callable[..., Sample], changes: dict[str, Any]
) -> None:
    other = [make(2, **changes), make(3, **changes)]
    assert indices(list(join_samples([make(0), make(1), *other]))) == [[0, 1], [2, 3]]
    assert indices(list(join_samples([*other, make(0), make(1)]))) == [[2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (20, [[0, 1, 2, 3]]),
        (19, [[0, 1, 2], [3]]),
        (16, [[0, 1, 2], [3]]),
        (15, [[0, 1], [2, 3]]),
        (10, [[0, 1], [2, 3]]),
        (9, [[0], [1], [2], [3]]),
        (0, [[0], [1], [2], [3]]),
    ],
)
def test_arrays_of_a_record_stay_within_the_bound(max_tokens: int, expected: list[Any]) -> None:
    samples = [rollout(index, num) for index, num in enumerate([4, 6, 6, 4])]
    num_samples = max(map(len, expected))
    bound = max_tokens * BYTES_OF_TOKEN + num_samples * BYTES_OF_LENGTH
    assert indices(list(join_samples(samples, max_array_bytes=bound))) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": STORED},
        {"rollout_logprobs": STORED},
        {"tokens": np.zeros((4, 1), np.int32)},
        {"loss_mask": np.zeros(3, np.uint8)},
    ],
    ids=str,
)
def test_sample_whose_arrays_are_not_along_its_tokens_has_a_record_for_itself(
    changes: dict[str, Any],
) -> None:
    lone = rollout(2, **changes)
    samples = [rollout(0), rollout(1), lone, rollout(3), rollout(4)]
    events = list(join_samples(samples))
    assert indices(events) == [[0, 1], [2], [3, 4]]
    (back,) = split_samples(CODEC.decode(CODEC.encode(events[1])))
    assert plain(back) == plain(lone)
    assert indices(list(join_samples([lone, lone]))) == [[2], [2]]


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (rollout, {"topk_ids": np.zeros((4, 2), np.int32)}),
        (rollout, {"topk_ids": np.zeros((0, 2), np.int32)}),
        (rollout, {"routed_experts": np.zeros((4, 1, 2), np.uint8)}),
        (rollout, {"environment_rewards": np.zeros(1)}),
        (rollout, {"path_lengths": [3, 1], "path_media": [[], [MEDIA]]}),
        (score, {"turn_rewards": np.zeros(2)}),
        (score, {"token_rewards": np.zeros(2)}),
        (evaluation, {"topk_ids": np.zeros((4, 2), np.int32)}),
        (evaluation, {"topk_logprobs": STORED}),
        (prepared, {"turn_rewards": np.zeros(0)}),
        (prepared, {"topk_teacher_logprobs": np.zeros((4, 2), np.float32)}),
        (prepared, {"media": [MEDIA]}),
    ],
)
def test_fields_that_few_samples_have_lie_in_the_same_record(
    make: Callable[..., Sample], changes: dict[str, Any]
) -> None:
    samples = [make(0), make(1), make(2, **changes), make(3)]
    (joined,) = join_samples(samples)
    back = split_samples(CODEC.decode(CODEC.encode(joined)))
    assert list(map(plain, back)) == list(map(plain, samples))


def test_arrays_that_few_samples_have_count_for_the_bound() -> None:
    topk = np.zeros((4, 100), np.int32)
    samples = [rollout(index, topk_ids=topk) for index in range(4)]
    assert indices(list(join_samples(samples, max_array_bytes=4000))) == [[0, 1], [2, 3]]


def test_other_events_are_returned_as_they_are() -> None:
    event = ended()
    (same,) = split_samples(event)
    assert same is event


def malformed(make: Callable[..., Sample], field: str, value: Any) -> Any:
    (joined,) = join_samples([make(0), make(1)])
    return changed(joined, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lengths", np.array([4, 4, 0], np.int32)),
        ("lengths", np.array([8], np.int32)),
        ("lengths", np.array([[4], [4]], np.int32)),
        ("lengths", np.array([9, -1], np.int32)),
        ("lengths", np.array([4, 4], np.float32)),
        ("lengths", np.array([True, True])),
        ("lengths", StoredArray("<i4", (2,), STORED.reference)),
        ("sample_index", [0]),
    ],
)
def test_lengths_that_are_not_one_for_each_sample_are_corrupt(field: str, value: Any) -> None:
    num_samples = len(value) if field == "sample_index" else 2
    event = malformed(rollout, field, value)
    text = f"SamplesRolledOut of {GROUP} needs a length of each of its {num_samples} samples"
    with pytest.raises(CorruptRecord, match=f"^{text}$"):
        split_samples(event)


@pytest.mark.parametrize(
    ("make", "field", "value", "text"),
    [
        (rollout, "lengths", np.array([4, 5]), r"tokens .*9.*\[8\]"),
        (rollout, "lengths", np.array([4, 3]), r"tokens .*7.*\[8\]"),
        (rollout, "lengths", np.array([2**31 - 1] * 2, np.int32), r"tokens .*4294967294.*\[8\]"),
        (rollout, "lengths", np.array([2**64 - 1, 9], np.uint64), r"tokens .*\[8\]"),
        (rollout, "tokens", np.zeros(7, np.int32), r"tokens .*8.*\[7\]"),
        (rollout, "loss_mask", np.zeros((8, 1)), r"loss_mask .*\[8, 1\]"),
        (rollout, "tokens", StoredArray("<i4", (8,), STORED.reference), r"tokens .*\[8\]"),
        (evaluation, "values", np.zeros(0), r"values .*8.*\[0\]"),
        (prepared, "teacher_logprobs", np.zeros(9), r"teacher_logprobs .*8.*\[9\]"),
        (prepared, "reward", STORED, "reward must"),
        (prepared, "reward", np.zeros((2, 1)), "reward must"),
        (prepared, "reward", np.zeros(2, np.int64), "reward must"),
    ],
)
def test_arrays_that_do_not_fit_the_samples_are_corrupt(
    make: Callable[..., Sample], field: str, value: Any, text: str
) -> None:
    event = malformed(make, field, value)
    with pytest.raises(CorruptRecord, match=f"^{type(event).__name__} of {GROUP}: {text}"):
        split_samples(event)


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (rollout, "completion", ["a"]),
        (rollout, "version_segments", [[], [], []]),
        (rollout, "max_policy_version", []),
        (score, "reward", [1.0]),
        (score, "seconds", np.zeros(3)),
        (score, "sample_index", [0]),
        (evaluation, "computed_at", [1, 2, 3]),
        (prepared, "reward", np.zeros(1)),
    ],
)
def test_fields_of_different_numbers_of_samples_are_corrupt(
    make: Callable[..., Sample], field: str, value: Any
) -> None:
    event = malformed(make, field, value)
    with pytest.raises(CorruptRecord, match=f"^{type(event).__name__} of {GROUP}.* samples"):
        split_samples(event)


@every_kind
def test_event_without_samples_is_corrupt(kind: type, make: Callable[..., Sample]) -> None:
    (joined,) = join_samples([make(0), make(1)])
    fields = {field.name: getattr(joined, field.name) for field in dataclasses.fields(joined)}
    emptied = {
        name: value[:0]
        for name, value in fields.items()
        if isinstance(value, list | np.ndarray) and name != "messages"
    }
    del kind
    with pytest.raises(CorruptRecord, match=f"^{type(joined).__name__} of {GROUP}"):
        split_samples(changed(joined, **emptied))
