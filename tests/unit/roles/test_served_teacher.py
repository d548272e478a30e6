"""What a teacher on servers is asked, and what is read from its answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from event_samples import rolled_out

from relax_events.errors import PoisonSample
from relax_events.roles.served_teacher import build_body, read_scores, share_samples

TOKENS = np.array([7, 8, 9, 10, 11], np.int32)
MASK = np.array([0, 0, 1, 0, 1], np.uint8)


def sample(**changes: Any) -> Any:
    return rolled_out(tokens=TOKENS, loss_mask=MASK, **changes)


def answer(*logprobs: float, start: int = 1, **more: Any) -> dict[str, Any]:
    entries = [
        [value, int(token), None] for value, token in zip(logprobs, TOKENS[start:], strict=True)
    ]
    return {"input_token_logprobs": entries, "finish_reason": {"type": "length"}, **more}


def test_request_starts_before_the_first_sampled_token_and_generates_nothing() -> None:
    body = build_body([sample(temperature=1.0), sample(temperature=1.0)], num_top=3)
    assert body["input_ids"] == [[7, 8, 9, 10, 11]] * 2
    assert body["logprob_start_len"] == [1, 1]
    assert body["sampling_params"] == {"max_new_tokens": 0}
    assert body["top_logprobs_num"] == [3, 3]


def test_sample_of_another_temperature_is_refused() -> None:
    with pytest.raises(PoisonSample, match=r"scores at temperature 1, and the sample's is 0.5"):
        build_body([sample(temperature=1.0), sample(temperature=0.5)], num_top=0)


def test_answer_is_aligned_by_its_end_and_is_zero_where_nothing_was_sampled() -> None:
    given = answer(-9.0, -1.0, -2.0, -3.0)
    given["input_token_logprobs"][0][0] = None
    assert read_scores(sample(), given, num_top=0).logprobs.tolist() == [0, 0, -1.0, 0, -3.0]


def test_most_probable_ids_are_those_of_sampled_tokens() -> None:
    top = [None, [[-0.5, 3, None], [-1.5, 4, None]], None, [[-0.25, 5, None], [-2.5, 6, None]]]
    scores = read_scores(sample(), answer(-9.0, -1, -2, -3, input_top_logprobs=top), num_top=2)
    assert scores.ids is not None
    assert scores.id_logprobs is not None
    assert scores.ids.tolist() == [[3, 4], [5, 6]]
    assert scores.id_logprobs.tolist() == [[-0.5, -1.5], [-0.25, -2.5]]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (answer(-1.0, -2.0, start=3), "scored 2 of 5 tokens"),
        (
            answer(-9.0, -1, -2, -3)
            | {"input_token_logprobs": [[-1, 0, None], [-1, 5, None], [-1, 1, 0], [-1, 2, 0]]},
            "scored other tokens than it was sent",
        ),
        (
            answer(-9.0, -1, -2, -3)
            | {"finish_reason": {"type": "abort", "message": "the prompt is too long"}},
            "refuses it: the prompt is too long",
        ),
    ],
)
def test_answer_about_other_tokens_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(PoisonSample, match=text):
        read_scores(sample(), given, num_top=0)


def test_samples_are_shared_by_tokens_the_longest_first() -> None:
    lengths = [4, 9, 2, 5, 4]
    samples = [
        rolled_out(index=index, tokens=np.zeros(length, np.int32))
        for index, length in enumerate(lengths)
    ]
    shares = share_samples([0, 1, 2, 3, 4], samples, ["http://a", "http://b"])
    assert [(share.url, share.indices, share.num_tokens) for share in shares] == [
        ("http://a", [1, 4], 13),
        ("http://b", [3, 0, 2], 11),
    ]
    assert [share.url for share in share_samples([2], samples, ["http://a", "http://b"])] == [
        "http://a"
    ]
