"""Samples as text: a list of samples, and one sample in full."""

from __future__ import annotations

from typing import Any

import pytest
from event_samples import ended, rolled_out, sample_key, scored

from relax_events.cli.output import excerpt
from relax_events.cli.sample_rendering import (
    HEAD,
    conversation_text,
    line_text,
    sample_document,
    sample_fields,
    token_cells,
)
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality, Outcome
from relax_events.events.types import PromptGroupEnded, SampleScored
from relax_events.history.samples.detail import SampleDetail, TokenRow
from relax_events.history.samples.view import SampleView


def view(
    score: SampleScored | None = None, end: PromptGroupEnded | None = None, **changes: Any
) -> SampleView:
    return SampleView(
        rolled_out(version=1, worker_id="rollout-0", **changes),
        "relax.r.rollout.samples[2]@7",
        1,
        score,
        end,
    )


def detail(shown: SampleView, **changes: Any) -> SampleDetail:
    return SampleDetail(shown, 4, 1, None, **changes)


def test_sample_shows_which_of_its_paths_were_truncated() -> None:
    shown = detail(view(path_lengths=[1, 2, 1], truncated_paths=[0, 1]))
    assert sample_fields(shown)["paths"] == (
        "3 of 1 (truncated), 2 (truncated), 1 tokens; shown is the last"
    )
    document = sample_document(shown)
    assert (document["path_lengths"], document["truncated_paths"]) == ([1, 2, 1], [0, 1])
    assert "paths" not in sample_fields(detail(view()))


def test_line_shows_the_outcome_of_a_sample_aligned_with_the_header() -> None:
    trained = view(
        scored(version=1, reward=0.8125),
        ended(outcome=Outcome.TRAINED, version=1),
        completion="two\nlines",
    )
    line = line_text(trained.line(4), width=100)
    assert line.split() == [
        "000000-0000-0/0",
        "1",
        "trained",
        "+0",
        "0.812",
        "2",
        "stop",
        "two\\nlines",
    ]
    assert line.index("two") == HEAD.index("completion")


def test_line_of_an_open_unscored_sample_shows_its_current_staleness() -> None:
    assert line_text(view().line(4), width=100).split()[2:5] == ["open", "+3", "-"]


def test_line_of_an_ended_sample_shows_its_outcome() -> None:
    assert (
        line_text(view(end=ended(outcome=Outcome.EXPIRED)).line(4), width=100).split()[2]
        == "expired"
    )


def test_line_truncates_the_completion_to_the_terminal_width() -> None:
    line = line_text(view(completion="x" * 500).line(4), width=110)
    assert len(line) == 110
    assert line.endswith("xxx...")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("short", "short"),
        ("a\tb", "a\\tb"),
        ("\x1b[31m", "\\x1b[31m"),
        ("ABCDEFGHIJKLM", "ABCDEFG..."),
        ("汉字", "汉字"),
    ],
)
def test_excerpt_is_one_line_and_escapes_control_characters(text: str, shown: str) -> None:
    assert excerpt(text, 10) == shown


def test_sample_text_shows_conversation_reward_and_outcome() -> None:
    score = SampleScored(
        key=sample_key(version=1),
        reward=0.75,
        components={"format": 0.25, "answer": 0.5},
        reward_name="rewards.py:strict",
        reward_digest="abcdef0123456789",
        judge_response="It is a cat.\nScore: 1",
        seconds=0.125,
    )
    media = MediaRef("file:///objects/sha256/ab/abcd.png", bytes(32), "image/png", 120)
    messages = [
        ChatMessage.of_text("system", "be brief"),
        ChatMessage(
            "user",
            [ContentPart(Modality.IMAGE, media=media), ContentPart(Modality.TEXT, "what is it?")],
        ),
    ]
    shown = view(
        score,
        ended(outcome=Outcome.TRAINED, version=1),
        messages=messages,
        completion="a \x1bcat\non a mat",
        answer="cat",
    )
    text, fields = "\n".join(conversation_text(detail(shown))), sample_fields(detail(shown))
    assert (
        "system:\n    be brief\nuser:\n    [image/png, 120 bytes: "
        "file:///objects/sha256/ab/abcd.png]what is it?"
    ) in text
    assert (
        "completion:\n    a \\x1bcat\n    on a mat\nanswer:\n    cat\njudge response:\n    It is "
        "a cat.\n    Score: 1"
    ) in text
    assert fields["reward"] == (
        "0.75 (format 0.25, answer 0.5) by rewards.py:strict (version abcdef012345) in 0.125 s"
    )
    assert fields["outcome"] == "trained in step 1, 0 versions behind; in version 2 and later"


def test_failed_score_and_failed_prompt_group_show_their_reasons() -> None:
    score = SampleScored(
        key=sample_key(version=1),
        reward_name="judge",
        error="took longer than 5 s",
    )
    end = ended(outcome=Outcome.FAILED, reason="reward: took longer")
    fields = sample_fields(detail(view(score, end)))
    assert fields["reward"] == "failed by judge (version unknown) in 0.000 s: took longer than 5 s"
    assert fields["outcome"] == "failed: reward: took longer"


def test_other_scores_are_shown_below_the_original() -> None:
    fields = sample_fields(
        detail(view(scored(reward=1.0)), other_scores={"strict": scored(reward=0.5)})
    )
    names = list(fields)
    assert names[names.index("reward") + 1] == "other scores"
    assert fields["other scores"]["strict"].startswith("0.5 by ")


def test_token_row_shows_logprobs_only_for_loss_tokens() -> None:
    row = TokenRow(65, "A", True, -0.5, None, -0.25, 1.5, teacher_logprob=-0.125)
    assert token_cells(3, row) == [
        3,
        65,
        "A",
        "yes",
        "-0.5000",
        "-",
        "-0.2500",
        "-0.1250",
        "1.5000",
    ]
    assert token_cells(0, TokenRow(10, "\n", False, 0.0, None, None, 0.0)) == [
        0,
        10,
        "'\\n'",
        "",
        "-",
        "-",
        "-",
        "-",
        "-",
    ]


def test_json_document_holds_messages_score_outcome_and_tokens() -> None:
    shown = view(scored(version=1, reward=0.5), ended(outcome=Outcome.TRAINED, version=1))
    document = sample_document(
        detail(shown, tokens=[TokenRow(65, "A", True, -0.5, None, None, 1.5)])
    )
    assert document["messages"] == [{"role": "user", "content": "say hi"}]
    assert (document["reward"], document["score"]["reward_name"], document["train_step"]) == (
        0.5,
        "exact_match",
        1,
    )
    assert document["tokens"][0]["rollout_logprob"] == -0.5
