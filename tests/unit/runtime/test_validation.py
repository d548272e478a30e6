"""Samples that can't be computed are poison, and the error says why."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from event_samples import ended, ready, rolled_out, scored

from relax_events.errors import PoisonSample
from relax_events.events.parts import MediaRef, Outcome, VersionSegment
from relax_events.events.types import Event, SampleReady, SampleRolledOut
from relax_events.runtime.validation import check_ended, check_ready, check_samples
from relax_events.topics.names import END_REQUESTS, TRAINING_SAMPLES
from relax_events.topics.plan import allowed_outcomes

MEDIA = MediaRef("file:///a.png", bytes(32), "image/png", 3)


def check_sample(event: Event) -> SampleRolledOut:
    (sample,) = check_samples([event])
    return sample


def check_ready_sample(event: Event) -> SampleReady:
    (sample,) = check_ready([event])
    return sample


def vector(*values: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": vector(dtype=np.int32)}, "tokens must be a non-empty vector, got shape (0,)"),
        (
            {"path_lengths": [3, 2]},
            "path_lengths must be positive and add up to 4 tokens, got [3, 2]",
        ),
        (
            {"path_lengths": [1, 3], "num_prompt_tokens": 2},
            "path_lengths must begin with the path of num_prompt_tokens = 2, got 1",
        ),
        (
            {"path_lengths": [2, 2], "truncated_paths": [1, 0]},
            "truncated_paths must be ascending and below 2, got [1, 0]",
        ),
        (
            {"path_lengths": [2, 2], "truncated_paths": [2]},
            "truncated_paths must be ascending and below 2, got [2]",
        ),
        ({"truncated_paths": [0]}, "truncated_paths needs path_lengths, got [0]"),
        (
            {"path_lengths": [2, 2], "path_media": [[]]},
            "path_media must have an entry for each of 2 paths, got 1",
        ),
        (
            {"path_lengths": [3, 1], "loss_mask": np.array([0, 0, 1, 1], np.uint8)},
            "path_lengths must begin each path with a token that loss_mask leaves out",
        ),
        (
            {"tokens": np.zeros((2, 2), np.int32)},
            "tokens must be a non-empty vector, got shape (2, 2)",
        ),
        ({"tokens": vector(1, -2, 3, 4, dtype=np.int32)}, "tokens must be >= 0, got -2"),
        ({"tokens": vector(1, 2, 3, 4)}, "tokens must be integers, got float32"),
        (
            {"loss_mask": np.ones(3, np.uint8)},
            "loss_mask must have the shape of tokens (4,), got (3,)",
        ),
        (
            {"rollout_logprobs": vector(0, 0, math.nan, 0)},
            "rollout_logprobs must be finite, got nan at 2",
        ),
        (
            {"rollout_logprobs": vector(0, -math.inf, 0, 0)},
            "rollout_logprobs must be finite, got -inf at 1",
        ),
        (
            {"sample_index": 2, "sample_id": "000000-0000-0/2"},
            "sample_index must be below samples_per_prompt, got 2 of 2",
        ),
        ({"prompt_group_id": "g"}, "'g' is not a prompt group id; an example is 000012-0003-0"),
        (
            {"min_policy_version": 1, "policy_version": 2},
            "policy_version <= min_policy_version <= max_policy_version must hold, got 2, 1, 0",
        ),
        (
            {"policy_version": -1},
            "policy_version <= min_policy_version <= max_policy_version must hold, got -1, 0, 0",
        ),
        ({"temperature": 0.0}, "temperature must be above 0 and finite, got 0.0"),
        ({"temperature": math.nan}, "temperature must be above 0 and finite, got nan"),
        ({"num_prompt_tokens": 5}, "num_prompt_tokens must be 0 to 4, got 5"),
    ],
)
@pytest.mark.parametrize("stage", ["rolled_out", "ready"])
def test_invalid_sample_is_poison(stage: str, changes: dict[str, Any], text: str) -> None:
    make, check = {"rolled_out": (rolled_out, check_sample), "ready": (ready, check_ready_sample)}[
        stage
    ]
    with pytest.raises(PoisonSample, match=f"^sample .*: {re.escape(text)}$"):
        check(make(**changes))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"advantages": vector(0, 0, 1)},
            "advantages must have the shape of tokens (4,), got (3,)",
        ),
        ({"ref_logprobs": vector(0, 0, 0, math.inf)}, "ref_logprobs must be finite, got inf at 3"),
        (
            {"actor_logprobs": vector(0)},
            "actor_logprobs must have the shape of tokens (4,), got (1,)",
        ),
        ({"reward": None}, "advantages must be 0 where there is no reward, got 1"),
        ({"reward": math.nan}, "reward must be within +-3.4e38, got nan"),
        ({"reward": 1e308}, "reward must be within +-3.4e38, got 1e+308"),
    ],
)
def test_invalid_ready_sample_is_poison(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PoisonSample, match=re.escape(text)):
        check_ready_sample(ready(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"topk_ids": np.zeros((3, 2), np.int32)},
            "topk_ids must have a row for each of 2 loss tokens, got shape (3, 2)",
        ),
        (
            {"topk_ids": np.zeros(2, np.int32)},
            "topk_ids must have a row for each of 2 loss tokens, got shape (2,)",
        ),
        ({"topk_ids": np.zeros((2, 3), np.float32)}, "topk_ids must be integers, got float32"),
    ],
)
@pytest.mark.parametrize("stage", ["rolled_out", "ready"])
def test_top_k_token_ids_have_a_row_for_each_loss_token(
    stage: str, changes: dict[str, Any], text: str
) -> None:
    make, check = {"rolled_out": (rolled_out, check_sample), "ready": (ready, check_ready_sample)}[
        stage
    ]
    check(make(topk_ids=np.zeros((2, 3), np.int32)))  # type: ignore[operator]
    with pytest.raises(PoisonSample, match=re.escape(text)):
        check(make(**changes))  # type: ignore[operator]


def test_top_k_ids_and_teacher_logprobs_must_have_one_shape() -> None:
    ids, values = np.zeros((2, 3), np.int32), np.zeros((2, 2), np.float32)
    with pytest.raises(
        PoisonSample,
        match=re.escape(
            "topk_ids and topk_teacher_logprobs must have one shape, got (2, 3) and (2, 2)"
        ),
    ):
        check_ready_sample(ready(topk_ids=ids, topk_teacher_logprobs=values))


def test_valid_samples_pass_unchanged_and_other_events_are_rejected() -> None:
    first, second = rolled_out(), ready()
    assert check_sample(first) is first
    assert check_ready_sample(second) is second
    with pytest.raises(PoisonSample, match="expected SampleRolledOut, got SampleScored"):
        check_sample(scored())
    with pytest.raises(PoisonSample, match="expected SampleReady, got SampleRolledOut"):
        check_ready_sample(first)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"prompt_group_id": "drop table"},
            "'drop table' is not a prompt group id; an example is 000012-0003-0",
        ),
        ({"prompt_group_id": "9" * 100_000}, "is not a prompt group id"),
        (
            {"prompt_group_id": "000001-0002-1"},
            "the id must name train_step, group_index and attempt (1, 2, 0), got (1, 2, 1)",
        ),
        ({"outcome": Outcome.TRAINED}, "outcome must be filtered, expired or failed, got trained"),
    ],
)
def test_invalid_end_request_is_poison(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PoisonSample, match=re.escape(text)) as caught:
        check_ended(
            replace(ended("000001-0002-0"), **changes), allowed=allowed_outcomes(TRAINING_SAMPLES)
        )
    assert len(str(caught.value)) < 300
    assert (
        check_ended(
            ended("000001-0002-0"), allowed=allowed_outcomes(TRAINING_SAMPLES)
        ).prompt_group_id
        == "000001-0002-0"
    )


@pytest.mark.parametrize(
    ("entity", "refused"),
    [(TRAINING_SAMPLES, {Outcome.TRAINED}), (END_REQUESTS, {Outcome.TRAINED, Outcome.FILTERED})],
)
def test_topic_determines_the_outcomes_its_writers_may_request(
    entity: str, refused: set[Outcome]
) -> None:
    for outcome in Outcome:
        with (
            pytest.raises(PoisonSample, match="outcome must be")
            if outcome in refused
            else nullcontext()
        ):
            check_ended(ended("000001-0002-0", outcome), allowed=allowed_outcomes(entity))


def test_media_of_paths_must_be_those_of_the_messages() -> None:
    sample = rolled_out("000000-0000-0")
    half = sample.tokens.shape[0] // 2
    lengths = [half, sample.tokens.shape[0] - half]
    mask = np.zeros(sample.tokens.shape[0], np.uint8)
    changed = replace(sample, loss_mask=mask, path_lengths=lengths, path_media=[[], [MEDIA]])
    rule = "path_media must end with the 0 media files of its messages, got 1"
    with pytest.raises(PoisonSample, match=rule):
        check_sample(changed)
    media = replace(ready("000000-0000-0"), path_lengths=lengths, media=[MEDIA])
    with pytest.raises(PoisonSample, match="path_media must end with the 1 media files"):
        check_ready_sample(media)


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        ([(0, 1)], "version_segments must be positive and add up to 2 loss tokens, got [1]"),
        ([(0, 2), (0, 0)], "version_segments must be positive and add up to 2 loss tokens"),
        ([(0, 1), (1, 1)], "must be of versions 0 to 0 as its key says, got 1"),
    ],
)
def test_version_segments_of_a_ready_sample_cover_its_loss_tokens(
    segments: list[tuple[int, int]], text: str
) -> None:
    made = [VersionSegment(*segment) for segment in segments]
    with pytest.raises(PoisonSample, match=re.escape(text)):
        check_ready_sample(ready(version_segments=made))
    check_ready_sample(ready(version_segments=[VersionSegment(0, 2)]))
    check_ready_sample(ready())
