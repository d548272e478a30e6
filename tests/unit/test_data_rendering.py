"""Conversations to tokens and back."""

import json
from pathlib import Path

import numpy as np
import pytest

from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.errors import ConfigError
from relax_events.events.types import ChatMessage
from relax_events.models.tiny import make_tiny
from relax_events.models.tokenizer import train_tokenizer

TALK = [ChatMessage.of_text("system", "be brief"), ChatMessage.of_text("user", "hi")]
CHAT = DataConfig(source="jsonl:x")
RAW = DataConfig(source="jsonl:x", chat_template=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), corpus=["abc"], hidden_size=32, num_layers=1)


def test_renderer_uses_the_chat_template(folder: Path) -> None:
    renderer = PromptRenderer.from_folder(folder, CHAT)
    tokens = renderer.prompt_tokens(TALK)
    assert tokens.dtype == np.int32
    # Counted by hand: start, role, 8 letters, end, newline; start, role, 2 letters, end, newline; start, role.
    assert len(tokens) == 12 + 6 + 2
    assert tokens[0] == tokens[12] == tokens[18]


def test_renderer_takes_raw_text_as_it_stands(folder: Path) -> None:
    renderer = PromptRenderer.from_folder(folder, RAW)
    assert renderer.completion_text(renderer.prompt_tokens(TALK)) == "be brief\nhi"


def test_renderer_stops_at_every_end_token_of_the_model(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {entry["content"]: entry["id"] for entry in vocabulary}
    assert PromptRenderer.from_folder(folder, CHAT).stop_token_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])


def test_renderer_ends_an_answer_with_the_first_stop_token(folder: Path) -> None:
    renderer = PromptRenderer.from_folder(folder, CHAT)
    tokens = renderer.answer_tokens("42")
    assert len(tokens) == 3
    assert tokens[-1] == renderer.stop_token_ids[0]
    assert renderer.completion_text(tokens) == "42"


def test_renderer_decodes_broken_bytes_without_failing(folder: Path) -> None:
    renderer = PromptRenderer.from_folder(folder, RAW)
    cut = renderer.prompt_tokens([ChatMessage.of_text("user", "\u00e9")])[:1]
    assert renderer.completion_text(cut) == "\N{REPLACEMENT CHARACTER}"


def test_renderer_refuses_a_folder_that_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist; set model.path, or make the folder with: relax models prepare"):
        PromptRenderer.from_folder(tmp_path / "nowhere", CHAT)
    with pytest.raises(ConfigError, match=r"holds no usable tokenizer"):
        PromptRenderer.from_folder(tmp_path, CHAT)


def test_renderer_refuses_a_chat_template_that_is_not_there() -> None:
    tokenizer = train_tokenizer(["abc"])
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"has no chat template; set data.chat_template = false"):
        PromptRenderer(tokenizer, CHAT)
    assert PromptRenderer(tokenizer, RAW).stop_token_ids == (tokenizer.eos_token_id,)
