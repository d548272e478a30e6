"""Answers of the data as tokens, with a loss on the assistant's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.data.sft_targets import (
    TokenizedTarget,
    tokenize_completion,
    tokenize_group_targets,
)
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage
from relax_events.events.types import PromptGroupIssued
from relax_events.packages.examples.tiny_models import make_tiny

PROMPT = [ChatMessage.of_text("system", "be brief"), ChatMessage.of_text("user", "hi")]
TALK = [
    ChatMessage.of_text(role, text)
    for role, text in (("assistant", "yo"), ("user", "ok"), ("assistant", "bye"))
]
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] if loop.last or message['role'] == 'user' else '...' "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor "
    "%}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), corpus=["abc"], hidden_size=32, num_layers=1)


def renderer_of(
    folder: Path, template: str | None = None, *, chat_template: bool = True
) -> PromptRenderer:
    file = None
    if template is not None:
        file = folder.parent / "template.jinja"
        file.write_text(template)
    return PromptRenderer.from_folder(
        folder, DataConfig(source="jsonl:x", chat_template_file=file, chat_template=chat_template)
    )


def pieces(answer: TokenizedTarget, renderer: PromptRenderer) -> list[tuple[str, int]]:
    """Return the text of each token with its mask."""
    texts = [
        str(renderer._tokenizer.decode([token], skip_special_tokens=False))
        for token in answer.tokens.tolist()
    ]
    return list(zip(texts, answer.loss_mask.tolist(), strict=True))


def test_loss_mask_of_a_conversation_marks_only_assistant_tokens(folder: Path) -> None:
    renderer = renderer_of(folder)
    answer = tokenize_completion(PROMPT, TALK, renderer=renderer)
    assert pieces(answer, renderer) == [
        ("y", 1), ("o", 1), ("<|im_end|>", 1), ("\n", 0),
        ("<|im_start|>", 0), ("user\n", 0), ("o", 0), ("k", 0), ("<|im_end|>", 0), ("\n", 0), ("<|im_start|>", 0), ("assistant\n", 0),
        ("b", 1), ("y", 1), ("e", 1), ("<|im_end|>", 1),
    ]  # fmt: skip
    whole = renderer.encode(renderer.apply_template([*PROMPT, *TALK], is_complete=True))
    assert [*renderer.prompt_tokens(PROMPT), *answer.tokens] == whole[
        :-1
    ].tolist()  # but for the newline behind the last stop token


def test_answer_without_a_template_is_its_text_and_a_stop_token(folder: Path) -> None:
    renderer = renderer_of(folder, chat_template=False)
    assert pieces(tokenize_completion(PROMPT, TALK[:1], renderer=renderer), renderer) == [
        ("y", 1),
        ("o", 1),
        ("<|im_end|>", 1),
    ]
    with pytest.raises(PoisonSample, match="a completion of 3 messages needs a chat template"):
        tokenize_completion(PROMPT, TALK, renderer=renderer)


def test_answer_that_the_template_does_not_end_is_given_a_stop_token(folder: Path) -> None:
    renderer = renderer_of(folder, ENDLESS)
    assert pieces(tokenize_completion(PROMPT, TALK[:1], renderer=renderer), renderer) == [
        ("y", 1),
        ("o", 1),
        ("\n", 1),
        ("<|im_end|>", 1),
    ]


def test_row_fails_when_the_template_changes_earlier_messages(folder: Path) -> None:
    renderer = renderer_of(folder, FORGETFUL)
    assert len(tokenize_completion(PROMPT[1:], TALK[:1], renderer=renderer).tokens) == 3
    with pytest.raises(
        PoisonSample,
        match=r"the chat template changes the text before message 3 .*set data.train_on = 'last'",
    ):
        tokenize_completion(PROMPT[1:], TALK, renderer=renderer)


def issued(
    completions: list[list[ChatMessage]], *, answer: str = "", of: int = 1
) -> PromptGroupIssued:
    return PromptGroupIssued(
        prompt_group_id="000000-0000-0", train_step=0, group_index=0, attempt=0, row=0, required_policy_version=0, samples_per_prompt=of,
        messages=PROMPT, completions=completions, answer=answer, seed=0,
    )  # fmt: skip


def test_prompt_group_has_an_answer_for_each_sample(folder: Path) -> None:
    renderer = renderer_of(folder)
    (alone,) = tokenize_group_targets(issued([], answer="yo"), renderer=renderer)
    assert (
        alone.tokens.tolist()
        == tokenize_completion(PROMPT, TALK[:1], renderer=renderer).tokens.tolist()
    )
    chosen, rejected = tokenize_group_targets(issued([TALK[:1], TALK[2:]], of=2), renderer=renderer)
    assert (renderer.completion_text(chosen.tokens), renderer.completion_text(rejected.tokens)) == (
        "yo",
        "bye",
    )


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (issued([TALK[:1]], of=2), "2 samples need the same number of targets, got 1"),
        (issued([], answer=" "), "an assistant message of the target is empty"),
    ],
)
def test_prompt_group_without_its_answers_is_rejected(
    folder: Path, group: PromptGroupIssued, text: str
) -> None:
    with pytest.raises(PoisonSample, match=text):
        tokenize_group_targets(group, renderer=renderer_of(folder))
