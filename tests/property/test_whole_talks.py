"""Conversations of any form reach prompt and targets whole, or a field is refused by its name.

Kinds K1 and K4 of users' reports: rows, SFT and DPO, by two templates.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_files import read_written_row, write_text

from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow
from relax_events.data.sft_targets import tokenize_targets
from relax_events.errors import PoisonSample
from relax_events.packages.examples.tiny_models import make_tiny

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}"
NAME = "{{ ' ' + m.name if m.name }}"
CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "whole": f"{HEAD}{NAME}\n<{{{{ m.reasoning_content }}}}>{{{{ m.content }}}}{CALLS}{END}",
    "plain": f"{HEAD}\n{{{{ m.content }}}}{END}",
}
Message = dict[str, Any]


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptRenderer]:
    folder = tmp_path_factory.mktemp("model")
    model = make_tiny(folder / "tiny", corpus=["abc"], hidden_size=32, num_layers=1)
    result = {}
    for name, template in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(template)
        config = DataConfig(source="jsonl:x", chat_template_file=folder / f"{name}.jinja")
        result[name] = PromptRenderer.from_folder(model, config)
    return result


@st.composite
def talks(draw: st.DrawFn, *, ends_with_answer: bool) -> list[Message]:
    """Draw a conversation; each text in it is another number, so that none hides another."""
    numbers = count(100)

    def write() -> str:
        return f"t{next(numbers)}."

    def ask() -> Message:
        name = {"name": write()} if draw(st.booleans()) else {}
        return {"role": "user", "content": write()} | name

    def answer(*, has_calls: bool) -> Message:
        thoughts = {"reasoning_content": write()} if draw(st.booleans()) else {}
        if not has_calls:
            return {"role": "assistant", "content": write()} | thoughts
        arguments: Any = {"a": write(), "b": draw(st.integers(-(10**30), 10**30))}
        if draw(st.booleans()):
            arguments = json.dumps(arguments)
        function = {"name": write(), "arguments": arguments}
        calls = [{"type": "function", "function": function}]
        return {"role": "assistant", "content": None, "tool_calls": calls} | thoughts

    talk = [ask()]
    for has_calls in draw(st.lists(st.booleans(), max_size=3)):
        talk.append(answer(has_calls=has_calls))
        talk.append({"role": "tool", "content": write()} if has_calls else ask())
    return [*talk, answer(has_calls=False)] if ends_with_answer else talk


def list_texts(message: Message) -> list[str]:
    """Return the texts that a prompt has of a message."""
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    values = [
        json.loads(one["arguments"]) if isinstance(one["arguments"], str) else one["arguments"]
        for one in calls
    ]
    fields = [message.get(key) for key in ("name", "reasoning_content", "content")]
    return [text for text in fields if text] + [
        str(text)
        for one, value in zip(calls, values, strict=True)
        for text in (one["name"], *value.values())
    ]


def read(row: Message, kind: str, **keys: Any) -> PromptRow:
    with TemporaryDirectory() as name:
        return read_written_row(Path(name), row, kind, **keys)


def require_all(texts: list[str], text: str) -> None:
    """Require that texts stand in another, one after the other."""
    position = 0
    for part in texts:
        assert part in text[position:], f"{part!r} is not behind {text[:position]!r}"
        position = text.index(part, position) + len(part)


def choose_format(talk: list[Message], kind: str) -> str:
    """Return the format: Arrow has neither integers of 30 digits nor columns of two types."""
    has_calls = any("tool_calls" in message for message in talk)
    return "jsonl" if has_calls else kind


KINDS = st.sampled_from(["jsonl", "parquet"])


@settings(max_examples=40, deadline=None)
@given(talks(ends_with_answer=False), KINDS, st.none() | st.sampled_from(["<think>\n", "1. ", "é"]))
def test_every_text_reaches_the_prompt_and_a_begun_turn_is_continued(
    renderers: dict[str, PromptRenderer], talk: list[Message], kind: str, begun: str | None
) -> None:
    prompt = talk if begun is None else [*talk, {"role": "assistant", "content": begun}]
    row = read({"prompt": prompt, "answer": "x"}, choose_format(talk, kind))
    text = write_text(renderers["whole"], renderers["whole"].row_tokens(row.messages))
    require_all([part for message in talk for part in list_texts(message)], text)
    assert text.count("<|im_start|>") == len(talk) + 1
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n" if begun is None else begun)


@settings(max_examples=40, deadline=None)
@given(talks(ends_with_answer=True), KINDS)
def test_every_text_of_an_answer_is_a_target(
    renderers: dict[str, PromptRenderer], talk: list[Message], kind: str
) -> None:
    row = read({"chat": talk}, choose_format(talk, kind), conversation_key="chat")
    (target,) = tokenize_targets(row, renderer=renderers["whole"])
    learned = write_text(renderers["whole"], target.tokens[target.loss_mask.astype(bool)])
    answers = [message for message in talk if message["role"] == "assistant"]
    require_all([part for message in answers for part in list_texts(message)], learned)
    for message in talk:
        if message["role"] != "assistant":
            assert not [part for part in list_texts(message) if part in learned]


@settings(max_examples=40, deadline=None)
@given(talks(ends_with_answer=True), KINDS)
def test_both_answers_of_a_pair_are_targets(
    renderers: dict[str, PromptRenderer], talk: list[Message], kind: str
) -> None:
    other = [*talk[:-1], {"role": "assistant", "content": "no.", "reasoning_content": "because."}]
    pair = {"chosen": talk, "rejected": other}
    keys = {"chosen_key": "chosen", "rejected_key": "rejected", "prompt_key": "", "answer_key": ""}
    row = read(pair, choose_format(talk, kind), **keys)
    targets = tokenize_targets(row, renderer=renderers["whole"])
    for target, answer in zip(targets, (talk[-1], other[-1]), strict=True):
        learned = write_text(renderers["whole"], target.tokens[target.loss_mask.astype(bool)])
        require_all(list_texts(answer), learned)


@settings(max_examples=40, deadline=None)
@given(talks(ends_with_answer=False))
def test_talk_is_refused_by_a_field_exactly_if_the_template_leaves_it_out(
    renderers: dict[str, PromptRenderer], talk: list[Message]
) -> None:
    row = read({"prompt": talk, "answer": "x"}, "jsonl")
    fields = {
        "tool_calls": any("tool_calls" in message for message in talk),
        "thoughts (reasoning_content)": any("reasoning_content" in message for message in talk),
        "names of role user": any("name" in message for message in talk),
    }
    hidden = [field for field, is_used in fields.items() if is_used]
    if not hidden:
        require_all(
            [part["content"] for part in talk],
            write_text(renderers["plain"], renderers["plain"].row_tokens(row.messages)),
        )
        return
    with pytest.raises(PoisonSample) as caught:
        renderers["plain"].row_tokens(row.messages)
    assert any(f"does not show {field}; leave" in str(caught.value) for field in hidden)
