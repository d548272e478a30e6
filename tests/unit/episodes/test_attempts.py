"""An earlier attempt at a sample is split into its turns, and nothing of it is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relax_events.engines.protocol import SampleRequest
from relax_events.episodes.graph import split_attempt
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage, VersionSegment

MASK = [1, 1, 1, 0, 0, 1, 1, 0, 1]
TURNS = tuple(
    ChatMessage.of_text(role, text)
    for role, text in (("assistant", "a"), ("user", "b"), ("assistant", "c"), ("tool", "d"))
)


def build_attempt() -> SampleRequest:
    return SampleRequest(
        sample_id="g0/0",
        seed=1,
        tokens=np.arange(9, dtype=np.int32),
        logprobs=-np.arange(9, dtype=np.float32),
        segments=(VersionSegment(1, 4), VersionSegment(2, 2)),
        top_tokens=np.arange(12, dtype=np.int32).reshape(6, 2),
        loss_mask=np.array(MASK, np.uint8),
        turns=TURNS,
    )


def test_attempt_is_split_into_its_turns_and_the_tokens_of_the_last() -> None:
    past, begun = split_attempt(build_attempt())
    assert [(turn.message.text, [one.text for one in turn.replies]) for turn in past] == [
        ("a", ["b"]),
        ("c", ["d"]),
    ]
    parts = [*(turn.tokens for turn in past), begun]
    assert [part.tokens.tolist() for part in parts] == [[0, 1, 2], [5, 6], [8]]
    assert [part.logprobs.tolist() for part in parts] == [[0, -1, -2], [-5, -6], [-8]]
    assert [turn.reply_tokens.tolist() for turn in past] == [[3, 4], [7]]
    assert [part.segments for part in parts] == [
        (VersionSegment(1, 3),),
        (VersionSegment(1, 1), VersionSegment(2, 1)),
        (VersionSegment(2, 1),),
    ]
    assert [len(part.top_tokens) for part in parts if part.top_tokens is not None] == [3, 2, 1]


def test_attempt_that_ends_with_a_reply_begins_its_next_turn_empty() -> None:
    attempt = build_attempt()
    assert attempt.loss_mask is not None
    ended = replace(
        attempt,
        tokens=attempt.tokens[:8],
        logprobs=attempt.logprobs[:8],
        loss_mask=attempt.loss_mask[:8],
    )
    past, begun = split_attempt(ended)
    assert len(past) == 2
    assert not len(begun.tokens)
    assert begun.segments == ()


@pytest.mark.parametrize("mask", [None, MASK[:-1], [0, *MASK[1:]], [1] * 5 + MASK[5:]])
def test_attempt_whose_mask_contradicts_its_turns_is_refused(mask: list[int] | None) -> None:
    attempt = replace(build_attempt(), loss_mask=None if mask is None else np.array(mask, np.uint8))
    with pytest.raises(PoisonSample, match=r"sample g0/0: .* loss mask"):
        split_attempt(attempt)
