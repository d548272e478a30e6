"""Conversations of any form are read alike from JSON lines, from Parquet and from a program's call,
and reach prompt and targets whole, or a field is refused by its name.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from unicodedata import normalize

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_files import SHOWS_ALL, read_written_row, write_text

from relax_events.attacks.gateway_session import open_session
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow
from relax_events.data.sft_targets import tokenize_targets
from relax_events.engines.protocol import GenerationRequest
from relax_events.errors import PoisonSample
from relax_events.packages.examples.tiny_tokenizer import train_tokenizer
from relax_events.packages.gateway.chat_dialect import ChatCall

Message = dict[str, Any]
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
SHOWS_CONTENTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
compose = partial(normalize, "NFC")
"""As the tokenizer composes characters."""
TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="<>|"), min_size=1, max_size=9
).filter(str.strip)  # a blank answer is no target, and a blank thought is none
CONTENTS = TEXTS | st.lists(TEXTS, min_size=1, max_size=3).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)
ARGUMENTS = st.fixed_dictionaries(
    {"city": TEXTS},
    optional={
        "days": st.integers(-(10**30), 10**30),
        "tags": st.lists(TEXTS, min_size=1, max_size=2),
    },
)
NAMES = st.sampled_from(["ann", "bob"])
USERS = st.fixed_dictionaries(
    {"role": st.just("user"), "content": CONTENTS}, optional={"name": NAMES}
)
REPLIES = st.fixed_dictionaries(
    {"role": st.just("tool"), "name": st.just("look"), "content": CONTENTS}
)


@st.composite
def turns(draw: st.DrawFn) -> list[Message]:
    """Draw what follows a user's message: a turn, perhaps with calls and their results."""
    turn: Message = {"role": "assistant", "content": draw(CONTENTS)}
    if draw(st.booleans()):
        field = draw(st.sampled_from(THOUGHTS))
        turn[field] = draw(TEXTS)
    if not draw(st.booleans()):
        return [turn]
    calls = draw(st.lists(ARGUMENTS, min_size=1, max_size=2))
    writes = draw(st.booleans())
    turn["content"] = draw(st.none() | st.just("") | CONTENTS)
    turn["tool_calls"] = [
        {
            "type": "function",
            "function": {"name": "look", "arguments": json.dumps(one) if writes else one},
        }
        for one in calls
    ]
    ended = {"role": "assistant", "content": draw(CONTENTS)}
    return [turn, *(draw(REPLIES) for _ in calls), ended]


@st.composite
def talks(draw: st.DrawFn) -> list[Message]:
    """Draw a conversation that ends with an assistant's message without calls."""
    talk: list[Message] = []
    for _ in range(draw(st.integers(1, 3))):
        talk += [draw(USERS), *draw(turns())]
    return talk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["look"]).save_pretrained(folder)
    return folder


def open_renderer(folder: Path, template: str) -> PromptRenderer:
    (folder / "own.jinja").write_text(template)
    config = DataConfig(source="http", chat_template_file=folder / "own.jinja")
    return PromptRenderer.from_folder(folder, config)


@pytest.fixture(scope="module")
def renderer(folder: Path) -> PromptRenderer:
    """Return a renderer whose template shows every field."""
    return open_renderer(folder, SHOWS_ALL)


@pytest.fixture(scope="module")
def plain_renderer(folder: Path) -> PromptRenderer:
    """Return a renderer whose template shows roles and contents alone."""
    return open_renderer(folder, SHOWS_CONTENTS)


async def refuse(request: GenerationRequest) -> NoReturn:
    """Sample nothing."""
    pytest.fail("nothing is sampled")


def level(message: Message) -> Message:
    """Write contents as parts and arguments as text: a column of Parquet has one type."""
    content = message["content"]
    leveled = message | {"content": [{"type": "text", "text": content or ""}]}
    if isinstance(content, list):
        leveled["content"] = content
    if "tool_calls" in message:
        leveled["tool_calls"] = calls = json.loads(json.dumps(message["tool_calls"]))
        for function in (call["function"] for call in calls):
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"])
    return leveled


def read_both(row: dict[str, Any], **keys: Any) -> list[PromptRow]:
    """Read a row from JSON lines and from Parquet."""
    with TemporaryDirectory() as name:
        levels = {
            key: value if isinstance(value, str) else [level(message) for message in value]
            for key, value in row.items()
        }
        return [
            read_written_row(Path(name), written, kind, **keys)
            for kind, written in (("jsonl", row), ("parquet", levels))
        ]


def plain_text(message: Message) -> str:
    """Return what the template writes of a message, by another way."""
    content = message["content"]
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    thoughts = [message[key] for key in THOUGHTS if key in message]
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        shown = json.dumps({"name": "look", "arguments": value}, ensure_ascii=False)
        calls.append(f"<tool_call>{shown}</tool_call>")
    return "".join(
        (*(f"<think>{text}</think>" for text in thoughts), *(one["text"] for one in parts), *calls)
    )


@settings(max_examples=60, deadline=None)
@given(talks(), USERS)
def test_whole_messages_reach_the_prompt_by_every_way(
    renderer: PromptRenderer, talk: list[Message], last: Message
) -> None:
    history = [*talk, last]
    call = ChatCall.model_validate({"messages": history})
    asked = renderer.prompt_tokens(call.history(open_session(renderer, refuse)))
    expected = "".join(
        f"<|im_start|>{one['role']}{' ' + one['name'] if 'name' in one else ''}\n{plain_text(one)}"
        "<|im_end|>\n"
        for one in history
    )
    shown = write_text(renderer, asked)
    assert shown == compose(f"{expected}<|im_start|>assistant\n")
    for row in read_both({"prompt": history, "answer": "x"}):
        np.testing.assert_array_equal(renderer.row_tokens(row.messages), asked)


@settings(max_examples=60, deadline=None)
@given(talks(), st.sampled_from(["all", "last"]))
def test_whole_turns_are_targets(
    renderer: PromptRenderer, talk: list[Message], train_on: str
) -> None:
    spoken = [plain_text(one) for one in talk if one["role"] == "assistant"]
    expected = spoken if train_on == "all" else spoken[-1:]
    for row in read_both({"talk": talk}, conversation_key="talk", train_on=train_on):
        (target,) = tokenize_targets(row, renderer=renderer)
        trained = target.tokens[target.loss_mask == 1]
        assert write_text(renderer, trained) == "".join(
            compose(f"{text}<|im_end|>") for text in expected
        )


BEGUN = TEXTS | st.sampled_from(["<think>\n", "<think>", " ", "\n", "1. ", "```python\n", "{\n "])


@settings(max_examples=60, deadline=None)
@given(st.lists(talks(), max_size=1), USERS, BEGUN)
def test_a_started_turn_is_continued_by_every_way(
    renderer: PromptRenderer, before: list[list[Message]], last: Message, begun: str
) -> None:
    history = [*(before[0] if before else []), last]
    talk = [*history, {"role": "assistant", "content": begun}]
    call = ChatCall.model_validate({"messages": talk})
    asked = renderer.prompt_tokens(call.history(open_session(renderer, refuse)))
    shown = write_text(renderer, asked)
    (started,) = (plain_text(one) for one in talk[-1:])
    end = f"{plain_text(last)}<|im_end|>\n<|im_start|>assistant\n{started}"
    assert shown.endswith(compose(end))
    for row in read_both({"prompt": talk, "answer": "x"}):
        np.testing.assert_array_equal(renderer.row_tokens(row.messages), asked)


@settings(max_examples=60, deadline=None)
@given(talks())
def test_both_answers_of_a_pair_are_targets(renderer: PromptRenderer, talk: list[Message]) -> None:
    other = {"role": "assistant", "content": "no.", "reasoning_content": "because."}
    keys = {"chosen_key": "chosen", "rejected_key": "rejected", "prompt_key": "", "answer_key": ""}
    for row in read_both({"chosen": talk, "rejected": [*talk[:-1], other]}, **keys):
        targets = tokenize_targets(row, renderer=renderer)
        for target, answer in zip(targets, (talk[-1], other), strict=True):
            trained = target.tokens[target.loss_mask == 1]
            assert write_text(renderer, trained) == compose(f"{plain_text(answer)}<|im_end|>")


@settings(max_examples=60, deadline=None)
@given(talks(), USERS)
def test_talk_is_refused_by_a_field_exactly_if_the_template_leaves_it_out(
    plain_renderer: PromptRenderer, talk: list[Message], last: Message
) -> None:
    history = [*talk, last]
    hidden = (
        {"tool_calls" for one in history if "tool_calls" in one}
        | {"thoughts (reasoning_content)" for one in history if one.keys() & set(THOUGHTS)}
        | {f"names of role {one['role']}" for one in history if "name" in one}
    )
    row, _ = read_both({"prompt": history, "answer": "x"})
    if not hidden:
        shown = write_text(plain_renderer, plain_renderer.row_tokens(row.messages))
        expected = "".join(
            f"<|im_start|>{one['role']}\n{plain_text(one)}<|im_end|>\n" for one in history
        )
        assert shown == compose(f"{expected}<|im_start|>assistant\n")
        return
    with pytest.raises(PoisonSample) as caught:
        plain_renderer.row_tokens(row.messages)
    assert any(f"does not show {field}; leave" in str(caught.value) for field in hidden)
