"""Whole messages of files reach the prompt and the targets: K1 and K4 of users' reports."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from row_files import SHOWS_ALL, read_written_row, write_text

from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.data.sft_targets import tokenize_targets
from relax_events.packages.examples.tiny_models import make_tiny

ASK = {"role": "user", "content": "is it warm?"}
REPLY = {"role": "tool", "name": "weather", "content": "22 degrees"}
CALL_TEXT = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> PromptRenderer:
    folder = tmp_path_factory.mktemp("model")
    (folder / "own.jinja").write_text(SHOWS_ALL)
    model = make_tiny(folder / "tiny", corpus=["abc"], hidden_size=32, num_layers=1)
    config = DataConfig(source="jsonl:x", chat_template_file=folder / "own.jinja")
    return PromptRenderer.from_folder(model, config)


def call(content: Any, arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function}],
    }


FORMS = [*product(("jsonl", "parquet"), (None, ""), ({"city": "Oslo"}, '{"city": "Oslo"}'))]


@pytest.mark.parametrize(("kind", "content", "arguments"), FORMS)
def test_calls_of_a_prompt_are_rendered(
    renderer: PromptRenderer, tmp_path: Path, kind: str, content: Any, arguments: Any
) -> None:
    talk = [ASK, call(content, arguments), REPLY, {"role": "user", "content": "so?"}]
    row = read_written_row(tmp_path, {"prompt": talk, "answer": "yes"}, kind)
    text = write_text(renderer, renderer.row_tokens(row.messages))
    assert f"<|im_start|>assistant\n{CALL_TEXT}<|im_end|>" in text
    assert "<|im_start|>tool weather\n22 degrees<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(("kind", "content", "arguments"), FORMS)
def test_thoughts_and_calls_are_targets(
    renderer: PromptRenderer, tmp_path: Path, kind: str, content: Any, arguments: Any
) -> None:
    last = {"role": "assistant", "content": "It is.", "reasoning_content": "22 is warm"}
    talk = [ASK, call(content, arguments) | {"reasoning_content": "I look"}, REPLY, last]
    row = read_written_row(tmp_path, {"chat": talk}, kind, conversation_key="chat")
    (target,) = tokenize_targets(row, renderer=renderer)
    learned = write_text(renderer, target.tokens[target.loss_mask.astype(bool)])
    assert learned == (
        f"<think>I look</think>{CALL_TEXT}<|im_end|><think>22 is warm</think>It is.<|im_end|>"
    )
    assert "22 degrees" in write_text(renderer, target.tokens)


@pytest.mark.parametrize(("kind", "begun"), [*product(("jsonl", "parquet"), ("<think>\n", "1. "))])
def test_started_turn_is_continued(
    renderer: PromptRenderer, tmp_path: Path, kind: str, begun: str
) -> None:
    talk = [ASK, {"role": "assistant", "content": begun}]
    row = read_written_row(tmp_path, {"prompt": talk, "answer": "yes"}, kind)
    text = write_text(renderer, renderer.row_tokens(row.messages))
    assert text.endswith(f"is it warm?<|im_end|>\n<|im_start|>assistant\n{begun}")
