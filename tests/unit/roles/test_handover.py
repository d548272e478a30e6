"""Samples that a draining rollout worker stores are read back unchanged, and unusable ones are
ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from event_samples import issued

from relax_events.engines.protocol import GeneratedSample
from relax_events.events.parts import (
    ChatMessage,
    ContentPart,
    FinishReason,
    MediaRef,
    Modality,
    VersionSegment,
)
from relax_events.objects import ObjectStore
from relax_events.roles.handover import PREFIX, PartialSamples
from relax_events.roles.inflight_group import InflightGroup

GROUP = "000003-0001-0"


def sample(
    index: int, num_tokens: int, finish_reason: FinishReason, *versions: int
) -> GeneratedSample:
    """Make a sample whose tokens were sampled evenly by these versions."""
    each = num_tokens // max(len(versions), 1)
    return GeneratedSample(
        sample_id=f"{GROUP}/{index}",
        prompt_group_id=GROUP,
        tokens=np.arange(num_tokens, dtype=np.int32) + 100 * index,
        logprobs=-np.arange(num_tokens, dtype=np.float32) / 8,
        segments=tuple(VersionSegment(version, each) for version in versions),
        finish_reason=finish_reason,
    )


BEGUN = [
    sample(2, 4, FinishReason.ABORT, 5, 6),
    sample(0, 3, FinishReason.STOP, 5),
    sample(1, 0, FinishReason.ABORT),
]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(tmp_path.as_uri())


@pytest.fixture
def partials(store: ObjectStore) -> PartialSamples:
    return PartialSamples(store)


def test_partial_samples_are_restored_and_deleted_once_the_group_is_written(
    partials: PartialSamples, store: ObjectStore
) -> None:
    assert partials.find(GROUP, num_samples=4) == {}
    assert partials.keep(GROUP, BEGUN) == 7
    found = partials.find(GROUP, num_samples=4)
    assert sorted(found) == [0, 2], "one had not begun, and one was not even submitted"
    for kept in (BEGUN[0], BEGUN[1]):
        back = found[int(kept.sample_id[-1])]
        assert (back.tokens.tolist(), back.logprobs.tolist()) == (
            kept.tokens.tolist(),
            kept.logprobs.tolist(),
        )
        assert (back.segments, back.finish_reason, back.sample_id) == (
            kept.segments,
            kept.finish_reason,
            kept.sample_id,
        )
    partials.forget([GROUP])
    assert store.list(PREFIX) == []


def test_resumed_prompt_group_requires_the_weights_of_its_partial_samples(
    partials: PartialSamples,
) -> None:
    partials.keep(GROUP, BEGUN)
    group = InflightGroup([], issued(GROUP, of=4), np.zeros(1, np.int32))
    group.resume(partials.find(GROUP, num_samples=4))
    assert ([done.sample_id for done in group.samples], sorted(group.partials)) == (
        [f"{GROUP}/0"],
        [2],
    )
    assert (group.issued.required_policy_version, group.is_resumed) == (6, True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"{}\n" + data,
    ],
    ids=["altered", "torn", "empty", "another header"],
)
def test_altered_partial_samples_are_ignored(
    partials: PartialSamples, store: ObjectStore, spoil: Callable[[bytes], bytes]
) -> None:
    partials.keep(GROUP, BEGUN)
    store.put_at(PREFIX + GROUP, spoil(store.get_at(PREFIX + GROUP)))
    assert partials.find(GROUP, num_samples=4) == {}


@pytest.mark.parametrize(
    ("num_samples", "kept"),
    [(1, BEGUN[1:2]), (2, BEGUN[:2])],
    ids=["nothing is left to do", "of another size"],
)
def test_partial_samples_that_do_not_match_the_prompt_group_are_ignored(
    partials: PartialSamples, num_samples: int, kept: list[GeneratedSample]
) -> None:
    partials.keep(GROUP, kept)
    assert partials.find(GROUP, num_samples=num_samples) == {}


@pytest.mark.parametrize(
    "samples",
    [[], [sample(0, 0, FinishReason.ABORT)], [sample(0, 2, FinishReason.ERROR, 1)]],
    ids=["none", "not begun", "failed"],
)
def test_samples_that_cannot_be_resumed_are_not_stored(
    partials: PartialSamples, store: ObjectStore, samples: list[GeneratedSample]
) -> None:
    assert partials.keep(GROUP, samples) == 0
    assert store.list(PREFIX) == []


def test_partial_sample_is_restored_with_all_its_fields(partials: PartialSamples) -> None:
    image = MediaRef(
        "file:///samples/5/crop.png", bytes(range(32)), "image/png", 99, width=3, height=2
    )
    said = ChatMessage(
        "user",
        [ContentPart(Modality.TEXT, "look closer"), ContentPart(Modality.IMAGE, None, image)],
    )
    whole = dataclasses.replace(
        sample(0, 4, FinishReason.ABORT, 5),
        segments=(VersionSegment(5, 3),),
        top_tokens=np.arange(6, dtype=np.int32).reshape(3, 2),
        loss_mask=np.array([1, 1, 0, 1], np.uint8),
        turns=(ChatMessage.of_text("assistant", "a dot"), said),
        routed_experts=np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
    )
    plain = sample(1, 2, FinishReason.STOP, 5)
    assert partials.keep(GROUP, [whole, plain]) == 6
    found = partials.find(GROUP, num_samples=2)
    for kept in (whole, plain):
        back = found[int(kept.sample_id[-1])]
        for field in dataclasses.fields(GeneratedSample):
            one, other = getattr(kept, field.name), getattr(back, field.name)
            if isinstance(one, np.ndarray):
                np.testing.assert_array_equal(other, one, strict=True)
            else:
                assert other == one, field.name


def test_failed_samples_are_generated_again_and_late_ones_are_kept(
    partials: PartialSamples,
) -> None:
    samples = [
        sample(0, 3, FinishReason.LATE, 5),
        sample(1, 4, FinishReason.ERROR, 5),
        sample(2, 0, FinishReason.LOST),
        sample(3, 2, FinishReason.ABORT, 5),
    ]
    assert partials.keep(GROUP, samples) == 5
    kept = partials.find(GROUP, num_samples=4)
    assert {index: one.finish_reason for index, one in kept.items()} == {
        0: FinishReason.LATE,
        3: FinishReason.ABORT,
    }
