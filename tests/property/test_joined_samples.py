"""Any samples are the same after they were put into records of prompt groups and taken out again,
and no record holds more than it may.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from event_samples import evaluated, ready, rolled_out, sample_key, scored
from hypothesis import given
from hypothesis import strategies as st

from relax_events.events.codec import EventCodec
from relax_events.events.parts import SampleKey
from relax_events.events.sample_columns import join_samples, split_samples
from relax_events.events.types import Sample, SampleColumns

CODEC = EventCodec()
KEYS = st.builds(
    sample_key,
    st.sampled_from(["000000-0000-0", "000000-0001-0"]),
    st.integers(0, 8),
    of=st.just(9),
    version=st.integers(0, 1),
    generation=st.sampled_from(["", "d1"]),
)
NUM_TOKENS = st.integers(0, 6)


def rollout(key: SampleKey, num_tokens: int, temperature: float, num_paths: int) -> Sample:
    """Make a sample with as many tokens, which branched if there are several paths."""
    return dataclasses.replace(
        rolled_out(),
        key=key,
        tokens=np.arange(num_tokens, dtype=np.int32) + 10 * key.sample_index,
        loss_mask=np.arange(num_tokens).astype(np.uint8),
        rollout_logprobs=np.linspace(-1, 0, num_tokens, dtype=np.float32),
        temperature=temperature,
        path_lengths=[1] * num_paths,
        rolled_out_at=key.sample_index,
    )


def score(key: SampleKey, reward: float | None, num_turns: int) -> Sample:
    turns = np.ones(num_turns) if num_turns else None
    return dataclasses.replace(scored(), key=key, reward=reward, turn_rewards=turns)


def evaluation(key: SampleKey, num_tokens: int, model_version: int) -> Sample:
    values = np.linspace(-1, 0, num_tokens, dtype=np.float32)
    return dataclasses.replace(evaluated(), key=key, model_version=model_version, values=values)


def prepared(key: SampleKey, num_tokens: int, has_reference: bool) -> Sample:
    """Make a sample as the trainer gets it, with or without the reference's log-probabilities."""
    return dataclasses.replace(
        ready(),
        key=key,
        tokens=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.ones(num_tokens, np.uint8),
        rollout_logprobs=np.linspace(-1, 0, num_tokens, dtype=np.float32),
        ref_logprobs=np.zeros(num_tokens, np.float32) if has_reference else None,
        advantages=np.full(num_tokens, 0.5, np.float32),
        reward=key.sample_index / 3,
    )


SAMPLES: st.SearchStrategy[list[Any]] = st.one_of(
    st.lists(
        st.builds(rollout, KEYS, NUM_TOKENS, st.sampled_from([0.7, 1.0]), st.sampled_from([0, 2])),
        max_size=9,
    ),
    st.lists(st.builds(score, KEYS, st.none() | st.floats(0, 1), st.integers(0, 1)), max_size=9),
    st.lists(st.builds(evaluation, KEYS, NUM_TOKENS, st.integers(0, 1)), max_size=9),
    st.lists(st.builds(prepared, KEYS, NUM_TOKENS, st.booleans()), max_size=9),
)


def plain(event: Any) -> list[Any]:
    """Return an event's fields in a form that can be compared, arrays with their types."""
    fields = [getattr(event, field.name) for field in dataclasses.fields(event)]
    return [type(event)] + [
        (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for value in fields
    ]


def num_array_bytes(event: SampleColumns) -> int:
    """Return the bytes of an event's arrays."""
    fields = [getattr(event, field.name) for field in dataclasses.fields(event)]
    arrays = [item for field in fields for item in (field if isinstance(field, list) else [field])]
    return sum(value.nbytes for value in arrays if isinstance(value, np.ndarray))


@given(samples=SAMPLES, max_array_bytes=st.integers(0, 100))
def test_samples_come_back_in_order_from_records_within_the_bound(
    samples: list[Sample], max_array_bytes: int
) -> None:
    events = list(join_samples(samples, max_array_bytes=max_array_bytes))
    read = [
        sample for event in events for sample in split_samples(CODEC.decode(CODEC.encode(event)))
    ]
    assert list(map(plain, read)) == list(map(plain, samples))
    for event in events:
        assert len(event.sample_index) == 1 or num_array_bytes(event) <= max_array_bytes


@given(keys=st.lists(KEYS, min_size=1, max_size=9), num_tokens=st.integers(0, 6))
def test_neighbours_of_one_generation_share_a_record_unless_one_comes_again(
    keys: list[SampleKey], num_tokens: int
) -> None:
    keys = [dataclasses.replace(key, samples_per_prompt=10) for key in keys]
    expected: list[list[SampleKey]] = []
    for key in keys:
        last = expected[-1] if expected else []
        is_same = bool(last) and generation_of(last[0]) == generation_of(key)
        if is_same and key.sample_index not in [other.sample_index for other in last]:
            last.append(key)
        else:
            expected.append([key])
    events = join_samples([rollout(key, num_tokens, 1.0, 0) for key in keys])
    assert [[sample.key for sample in split_samples(event)] for event in events] == expected


def generation_of(key: SampleKey) -> tuple[str, int, str]:
    return key.prompt_group_id, key.policy_version, key.generation_digest
