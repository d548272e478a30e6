"""Samples as trajectories, against ones that were written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.events.types import SampleRolledOut
from relax_events.gateway.tool_formats import FORMATS
from relax_events.history.samples.view import SampleView
from relax_events.reports.atif import TrajectoryBuilder
from relax_events.reports.episode_steps import sampled_turns
from tests.event_samples import changed, rolled_out

IMAGE = MediaRef("file:///a.png", bytes(32), "image/png", 3)
SOUND = MediaRef("file:///a.wav", bytes(32), "audio/wav", 3)
CALL = '<think>So.</think>Look. <tool_call>{"name": "look", "arguments": {"key": "a"}}</tool_call>'
BUILDER = TrajectoryBuilder("mine", "agent.py", "tiny", FORMATS["hermes"], tokens=True)


def sample_of(
    tokens: list[int], mask: list[int], *, turns: list[ChatMessage], path_lengths: list[int]
) -> SampleRolledOut:
    """Return a sample whose log-probability of a token is minus its number."""
    return changed(
        rolled_out("000000-0000-0"),
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array(mask, np.uint8),
        rollout_logprobs=-np.array(tokens, np.float32) * np.array(mask),
        num_prompt_tokens=2,
        messages=[ChatMessage.of_text("system", "Be brief."), ChatMessage.of_text("user", "a?")],
        turns=turns,
        path_lengths=path_lengths,
        rolled_out_at=1_700_000_000_000_000,
    )


def said(role: str, text: str, *media: MediaRef) -> ChatMessage:
    """Return a message with media after its text."""
    kinds = [Modality(one.media_type.partition("/")[0]) for one in media]
    parts = [ContentPart(kind, media=one) for kind, one in zip(kinds, media, strict=True)]
    return ChatMessage(role, [ContentPart(Modality.TEXT, text), *parts])


TURNS = [
    said("assistant", CALL),
    said("tool", "It is", IMAGE),
    said("user", "Well?", SOUND),
    said("assistant", "42"),
]


def test_a_sample_is_a_trajectory_with_tools_tokens_and_images() -> None:
    sample = sample_of([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1], turns=TURNS, path_lengths=[])
    view = SampleView(sample, "topic[0]@1", 0, None, None)
    found = BUILDER.build(view, sample, lambda media: media.uri.rpartition("/")[2])
    assert found["schema_version"] == "ATIF-v1.7"
    assert found["agent"]["name"] == "agent.py"
    assert found["final_metrics"] == {
        "total_prompt_tokens": 2 + 6,
        "total_completion_tokens": 3,
        "total_steps": 5,
    }
    assert found["steps"] == [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": "a?"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "Look.",
            "model_name": "tiny",
            "reasoning_content": "So.",
            "tool_calls": [
                {"tool_call_id": "call_3_0", "function_name": "look", "arguments": {"key": "a"}}
            ],
            "observation": {
                "results": [
                    {
                        "content": [
                            {"type": "text", "text": "It is"},
                            {
                                "type": "image",
                                "source": {"media_type": "image/png", "path": "a.png"},
                            },
                        ],
                        "source_call_id": "call_3_0",
                    }
                ]
            },
            "llm_call_count": 1,
            "metrics": {
                "prompt_tokens": 2,
                "completion_tokens": 2,
                "completion_token_ids": [3, 4],
                "logprobs": [-3.0, -4.0],
            },
        },
        {
            "step_id": 4,
            "source": "user",
            "message": [
                {"type": "text", "text": "Well?"},
                {"type": "text", "text": "<audio> a.wav"},
            ],
        },
        {
            "step_id": 5,
            "source": "agent",
            "message": "42",
            "model_name": "tiny",
            "llm_call_count": 1,
            "metrics": {
                "prompt_tokens": 6,
                "completion_tokens": 1,
                "completion_token_ids": [7],
                "logprobs": [-7.0],
            },
            "timestamp": "2023-11-14T22:13:20+00:00",
        },
    ]


def test_turns_of_the_last_path_have_the_tokens_and_logprobs_that_an_earlier_path_trains() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 8, 9]
    mask = [0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1]
    sample = sample_of(tokens, mask, turns=TURNS, path_lengths=[6, 6])
    turns = sampled_turns(sample)
    assert [(turn.num_read, turn.tokens.tolist()) for turn in turns] == [(2, [3, 4]), (5, [9])]
    assert [turn.logprobs.tolist() for turn in turns] == [[-3.0, -4.0], [-9.0]]


@pytest.mark.parametrize("tokens", [True, False])
def test_turns_that_do_not_match_the_tokens_have_no_metrics(tokens: bool) -> None:
    sample = sample_of([1, 2, 3], [0, 0, 1], turns=TURNS, path_lengths=[])
    view = SampleView(sample, "topic[0]@1", 0, None, None)
    builder = TrajectoryBuilder("mine", "agent.py", "tiny", FORMATS["hermes"], tokens=tokens)
    found = builder.build(view, sample, lambda media: "")
    assert all("metrics" not in step for step in found["steps"])
