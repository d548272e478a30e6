"""Splitting into micro-batches, and the packed arrays."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.errors import PoisonSample
from relax_events.events.parts import ObjectRef, StoredArray, VersionSegment
from relax_events.training.batch.packing import (
    MicroBatcher,
    gather_loss_values,
    gather_staleness,
    micro_batch_slices,
    pack,
    require_whole_prompt_groups,
)
from relax_events.training.batch.row_layout import TokenSets
from relax_events.training.batch.truncation import mask_loss
from tests.event_samples import changed
from tests.unit.trainer_samples import make_samples, token_sets


def test_staleness_is_that_of_the_version_that_generated_each_loss_token():
    first, second, third = make_samples(3)
    lengths = [int(np.count_nonzero(sample.loss_mask)) for sample in (first, second, third)]
    split = dataclasses.replace(
        changed(first, min_policy_version=4, max_policy_version=6),
        loss_mask=np.concatenate([np.zeros(len(first.tokens) - 3), np.ones(3)]).astype(np.uint8),
        version_segments=[VersionSegment(4, 1), VersionSegment(6, 2)],
    )
    unsplit = changed(second, min_policy_version=5, max_policy_version=7)
    masked = dataclasses.replace(
        third,
        loss_mask=np.zeros_like(third.loss_mask),
        version_segments=[VersionSegment(0, lengths[2])],
    )
    found = gather_staleness([split, masked, unsplit], trainer_version=7)
    assert found.tolist() == [3, 1, 1] + [2] * lengths[1]


def test_masking_the_loss_cuts_what_belongs_to_loss_tokens():
    first, whole = make_samples(2)
    ids, logprobs = token_sets(np.random.default_rng(0), 6)
    sample = dataclasses.replace(
        changed(first, min_policy_version=4, max_policy_version=6),
        tokens=np.arange(9, dtype=np.int32),
        loss_mask=np.array([0, 1, 1, 1, 0, 0, 1, 1, 1], np.uint8),
        version_segments=[
            VersionSegment(4, 2),
            VersionSegment(5, 1, kept_cache=True),
            VersionSegment(6, 3),
        ],
        topk_ids=ids,
        topk_teacher_logprobs=logprobs,
    )
    cut = mask_loss(sample, np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], bool))
    assert cut.loss_mask.tolist() == [0, 1, 0, 1, 0, 0, 0, 1, 1]
    assert list(cut.version_segments) == [
        VersionSegment(4, 1),
        VersionSegment(5, 1, kept_cache=True),
        VersionSegment(6, 2),
    ]
    assert gather_staleness([cut], trainer_version=7).tolist() == [3, 2, 1, 1]
    kept = [0, 2, 4, 5]
    np.testing.assert_array_equal(cut.topk_ids, ids[kept])
    np.testing.assert_array_equal(cut.topk_teacher_logprobs, logprobs[kept])
    TokenSets.from_samples([cut, whole], num_ids=6, vocab_size=256)
    none = mask_loss(sample, np.zeros(9, bool))
    assert (none.loss_mask.sum(), len(none.version_segments), len(none.topk_ids)) == (0, 0, 0)
    assert mask_loss(sample, np.ones(9, bool)) is sample
    with pytest.raises(PoisonSample, match=r"topk_ids must be 6 loss tokens"):
        mask_loss(dataclasses.replace(sample, topk_ids=ids[:5]), np.zeros(9, bool))


LENGTHS = st.lists(st.integers(1, 30), max_size=40)


def test_pack_order_closes_before_the_budget_is_exceeded():
    assert micro_batch_slices([4, 4, 3, 10, 1], max_tokens=8) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
        slice(4, 5),
    ]


def test_pack_order_gives_nothing_for_no_samples():
    assert micro_batch_slices([], max_tokens=8) == []


@given(lengths=LENGTHS, max_tokens=st.integers(1, 60))
def test_pack_order_covers_all_in_order_within_the_budget(lengths, max_tokens):
    slices = micro_batch_slices(lengths, max_tokens=max_tokens)
    assert [index for part in slices for index in range(len(lengths))[part]] == list(
        range(len(lengths))
    )
    for part in slices:
        assert sum(lengths[part]) <= max_tokens or len(lengths[part]) == 1
    for part, following in pairwise(slices):
        assert sum(lengths[part]) + lengths[following.start] > max_tokens


@given(seed=st.integers(0, 100), max_tokens=st.integers(1, 80))
def test_micro_batcher_cuts_like_pack_order(seed, max_tokens):
    samples = SAMPLES[: seed % len(SAMPLES)]
    batcher = MicroBatcher(max_tokens=max_tokens)
    stream = [batch for sample in samples if (batch := batcher.add(sample))]
    stream += [batch] if (batch := batcher.flush()) else []
    whole = [
        samples[part]
        for part in micro_batch_slices(
            [len(sample.tokens) for sample in samples], max_tokens=max_tokens
        )
    ]
    assert [[sample.sample_id for sample in batch] for batch in stream] == [
        [sample.sample_id for sample in batch] for batch in whole
    ]


@given(seed=st.integers(0, 100), max_tokens=st.integers(1, 80))
def test_micro_batcher_keeps_prompt_groups_whole_within_the_budget(seed, max_tokens):
    samples = SAMPLES[: 2 * (seed % 12)]
    batcher = MicroBatcher(max_tokens=max_tokens, whole_prompt_groups=True)
    batches = [*batcher.feed(iter(samples)), *([batch] if (batch := batcher.flush()) else [])]
    assert [sample for batch in batches for sample in batch] == samples
    for batch in batches:
        require_whole_prompt_groups(batch)
        assert sum(len(sample.tokens) for sample in batch) <= max_tokens or len(batch) == 2
    for batch, following in pairwise(batches):
        assert sum(len(sample.tokens) for sample in [*batch, *following[:2]]) > max_tokens


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0, 2], "prompt group g0 has adjacent samples \\[0\\]"),
        ([1, 0], "prompt group g0 has adjacent samples \\[1, 0\\]"),
        ([0, 1, 3, 2], "prompt group g1 has adjacent samples \\[1, 0\\]"),
        ([0, 2, 1, 3], "prompt group g0 has adjacent samples \\[0\\]"),
        ([0, 1, 2], "prompt group g1 has adjacent samples \\[0\\]"),
    ],
)
def test_incomplete_prompt_group_is_rejected(indices, text):
    with pytest.raises(PoisonSample, match=text):
        require_whole_prompt_groups([SAMPLES[index] for index in indices])


def test_micro_batcher_flush_gives_none_when_empty():
    assert MicroBatcher(max_tokens=8).flush() is None


SAMPLES = make_samples(24, seed=5)


@pytest.mark.parametrize("share_rows", [True, False])
def test_pack_places_every_token_once_and_restarts_positions(share_rows):
    batch = pack(SAMPLES, vocab_size=256, share_rows=share_rows)
    rows, length = batch.input_ids.shape
    assert length == max(len(sample.tokens) for sample in SAMPLES)
    assert rows == len(SAMPLES) if not share_rows else rows < len(SAMPLES)
    assert batch.num_tokens == sum(len(sample.tokens) for sample in SAMPLES)
    segments = [
        segment
        for ids, positions in zip(batch.input_ids, batch.position_ids, strict=True)
        for segment in split_at_restarts(ids, positions)
    ]
    for sample in SAMPLES:
        assert any(
            np.array_equal(segment[: len(sample.tokens)], sample.tokens) for segment in segments
        )


def split_at_restarts(ids, positions):
    return np.split(ids, np.flatnonzero(np.diff(positions) != 1) + 1)


def test_pack_points_at_the_position_before_each_loss_token():
    batch = pack(SAMPLES, vocab_size=256)
    flat_ids = batch.input_ids.reshape(-1)
    expected = np.concatenate([sample.tokens[sample.loss_mask == 1] for sample in SAMPLES])
    before = np.concatenate(
        [sample.tokens[np.flatnonzero(sample.loss_mask) - 1] for sample in SAMPLES]
    )
    np.testing.assert_array_equal(batch.targets, expected)
    np.testing.assert_array_equal(flat_ids[batch.loss_positions], before)
    np.testing.assert_array_equal(
        batch.num_loss_tokens, [sample.loss_mask.sum() for sample in SAMPLES]
    )


def test_pack_needs_no_padding_when_lengths_are_equal():
    samples = [changed(SAMPLES[0], sample_id=str(index)) for index in range(3)]
    batch = pack(samples, vocab_size=256)
    assert batch.input_ids.size == batch.num_tokens
    np.testing.assert_array_equal(
        batch.position_ids, np.tile(np.arange(len(SAMPLES[0].tokens)), (3, 1))
    )


@given(lengths=LENGTHS.filter(bool))
def test_pack_padding_is_less_than_half(lengths):
    batch = pack([with_length(length) for length in lengths], vocab_size=2)
    assert batch.input_ids.size < 2 * (sum(lengths) + max(lengths))


def with_length(length):
    zeros = np.zeros(length, np.int32)
    return dataclasses.replace(SAMPLES[0], tokens=zeros, loss_mask=zeros.astype(np.uint8))


def one(**changes):
    return [SAMPLES[1], changed(SAMPLES[0], sample_id="odd", **changes)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"tokens": np.zeros(0, np.int32), "loss_mask": np.zeros(0, np.uint8)},
            "equally long and not empty",
        ),
        ({"tokens": np.zeros(3, np.int32)}, "equally long and not empty"),
        (
            {"tokens": np.zeros(2, np.int32), "loss_mask": np.array([1, 1], np.uint8)},
            "loss_mask must be 0 at the first token",
        ),
        (
            {"tokens": np.array([1, 256], np.int32), "loss_mask": np.array([0, 1], np.uint8)},
            "token id 256 is outside the vocabulary of 256",
        ),
        (
            {"tokens": np.array([-1, 2], np.int32), "loss_mask": np.array([0, 1], np.uint8)},
            "token id -1 is outside",
        ),
        ({"temperature": 0.0}, "temperature must be > 0, got 0"),
        ({"temperature": float("nan")}, "temperature must be > 0, got nan"),
    ],
)
def test_pack_names_the_sample_that_can_not_be_used(changes, text):
    with pytest.raises(PoisonSample, match=f"sample odd: .*{text}"):
        pack(one(**changes), vocab_size=256)


def test_pack_refuses_an_array_that_was_not_fetched():
    stored = StoredArray("<i4", (3,), ObjectRef("memory:///x", b"", 12))
    with pytest.raises(
        TypeError,
        match="sample odd: tokens is still in the object store; fetch it with check_out",
    ):
        pack(one(tokens=stored), vocab_size=256)


def test_loss_values_keeps_masked_positions_in_order():
    expected = np.concatenate(
        [sample.rollout_logprobs[sample.loss_mask == 1] for sample in SAMPLES]
    )
    np.testing.assert_array_equal(gather_loss_values(SAMPLES, "rollout_logprobs"), expected)


def test_loss_values_ignores_values_outside_the_mask():
    outside = np.where(SAMPLES[0].loss_mask == 1, SAMPLES[0].advantages, np.nan)
    assert np.isfinite(gather_loss_values(one(advantages=outside), "advantages")).all()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (None, "has no ref_logprobs, and the algorithm needs them"),
        (np.zeros(1, np.float32), r"ref_logprobs \(1,\) must be as long as tokens"),
        (
            np.full(len(SAMPLES[0].tokens), np.nan, np.float32),
            "ref_logprobs must be finite wherever loss_mask is 1, got nan",
        ),
    ],
)
def test_loss_values_names_sample_and_field(values, text):
    with pytest.raises(PoisonSample, match=f"sample odd:? ?{text}"):
        gather_loss_values(one(ref_logprobs=values), "ref_logprobs")
