"""Conversations to tokens and back."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage
from relax_events.models.tokenizer_folder import FolderTokenizer
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.packages.examples.tiny_tokenizer import train_tokenizer

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
    # Counted by hand: start, role, 8 characters, end, newline; start, role, 2 characters, end,
    # newline; start, role.
    assert len(tokens) == 12 + 6 + 2
    assert tokens[0] == tokens[12] == tokens[18]


def test_renderer_keeps_raw_text_unchanged(folder: Path) -> None:
    renderer = PromptRenderer.from_folder(folder, RAW)
    assert renderer.completion_text(renderer.prompt_tokens(TALK)) == "be brief\nhi"


def test_renderer_stops_at_every_end_token_of_the_model(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {entry["content"]: entry["id"] for entry in vocabulary}
    assert PromptRenderer.from_folder(folder, CHAT).stop_token_ids == (
        ids["<|im_end|>"],
        ids["<|endoftext|>"],
    )


def test_renderer_ends_an_answer_with_the_first_stop_token(folder: Path) -> None:
    renderer = PromptRenderer.from_folder(folder, CHAT)
    tokens = renderer.answer_tokens("42")
    assert len(tokens) == 3
    assert tokens[-1] == renderer.stop_token_ids[0]
    assert renderer.completion_text(tokens) == "42"


def test_renderer_decodes_invalid_utf8_with_a_replacement_character(folder: Path) -> None:
    renderer = PromptRenderer.from_folder(folder, RAW)
    cut = renderer.prompt_tokens([ChatMessage.of_text("user", "\u00e9")])[:1]
    assert renderer.completion_text(cut) == "\N{REPLACEMENT CHARACTER}"


def test_renderer_rejects_a_folder_that_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"nowhere does not exist; set model.path, or create the folder with: relax models prepare",
    ):
        PromptRenderer.from_folder(tmp_path / "nowhere", CHAT)
    with pytest.raises(ConfigError, match=r"has no usable tokenizer"):
        PromptRenderer.from_folder(tmp_path, CHAT)


def test_renderer_rejects_a_tokenizer_without_a_chat_template() -> None:
    tokenizer = train_tokenizer(["abc"])
    tokenizer.chat_template = None
    with pytest.raises(
        ConfigError,
        match=r"has no chat template; use one with a template, or set data.chat_template = false",
    ):
        PromptRenderer(tokenizer, CHAT)
    assert PromptRenderer(tokenizer, RAW).stop_token_ids == (tokenizer.eos_token_id,)


BREAKING = (
    "{% for m in messages %}{% if loop.index0 > 5 %}{% break %}{% endif %}{{ m | tojson }}{{ "
    "eos_token }}{% endfor %}\n"
)


@pytest.mark.parametrize("template", [None, BREAKING])
def test_renderer_reads_a_folder_as_transformers_does(
    folder: Path, tmp_path: Path, template: str | None
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    if template is not None:
        (copy / "chat_template.jinja").write_text(template)
    light, heavy = FolderTokenizer.open(copy), AutoTokenizer.from_pretrained(copy)
    assert light is not None
    talk = [
        {"role": "system", "content": "be <brief>"},
        {"role": "user", "content": "caf\u00e9 <|im_end|>\n"},
    ]
    for prompt in (True, False):
        text = light.apply_chat_template(talk, add_generation_prompt=prompt)
        assert text == heavy.apply_chat_template(talk, add_generation_prompt=prompt, tokenize=False)
        ids = light.encode(text, add_special_tokens=False)
        assert ids == heavy.encode(text, add_special_tokens=False)
        assert light.decode(ids, skip_special_tokens=True) == heavy.decode(
            ids, skip_special_tokens=True
        )
    assert light.eos_token_id == heavy.eos_token_id


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"clean_up_tokenization_spaces": True}),
        ("tokenizer.json", None),
    ],
)
def test_renderer_leaves_unsupported_tokenizer_folders_to_transformers(
    folder: Path, tmp_path: Path, file: str, change: object
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    if isinstance(change, dict):
        (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | change))
    else:
        (copy / file).unlink()
    assert FolderTokenizer.open(copy) is None


def test_light_tokenizer_renders_a_template_with_generation_tags_as_transformers(
    folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}\n  {%- generation %} {{ m.content }}{% endgeneration %}\n{% endfor %}"
    )
    light = FolderTokenizer.open(copy)
    assert light is not None
    heavy = AutoTokenizer.from_pretrained(copy, local_files_only=True)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = light.apply_chat_template(talk, add_generation_prompt=False)
    assert text == heavy.apply_chat_template(talk, add_generation_prompt=False, tokenize=False)


SHOWING = (
    "{{ tools | tojson if tools else 'no tools' }} {{ mood | default('calm') }} {{ "
    "messages[-1].content }}"
)


def test_renderer_takes_a_template_file_with_options_and_tools(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.jinja").write_text(SHOWING)
    own = {"source": "jsonl:x", "chat_template_file": str(tmp_path / "own.jinja")}
    plain = PromptRenderer.from_folder(folder, DataConfig.model_validate(own))
    merry = PromptRenderer.from_folder(
        folder, DataConfig.model_validate(own | {"chat_template_options": {"mood": "merry"}})
    )
    assert plain.completion_text(plain.prompt_tokens(TALK)) == "no tools calm hi"
    assert (
        merry.completion_text(merry.prompt_tokens(TALK, tools='[{"name":"f"}]'))
        == '[{"name": "f"}] merry hi'
    )


def test_renderer_passes_options_and_tools_to_transformers_tokenizers(
    folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(
        json.dumps(settings | {"clean_up_tokenization_spaces": True})
    )
    (tmp_path / "own.jinja").write_text(SHOWING)
    config = DataConfig(
        source="jsonl:x",
        chat_template_file=tmp_path / "own.jinja",
        chat_template_options={"mood": "merry"},
    )
    light, heavy = (
        PromptRenderer.from_folder(folder, config),
        PromptRenderer.from_folder(copy, config),
    )
    tools = '[{"name":"f","type":"function"}]'
    assert (
        heavy.prompt_tokens(TALK, tools=tools).tolist()
        == light.prompt_tokens(TALK, tools=tools).tolist()
    )


def test_renderer_reports_why_the_template_rejects_a_conversation(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('no system role') }}")
    renderer = PromptRenderer.from_folder(
        folder, DataConfig(source="jsonl:x", chat_template_file=tmp_path / "strict.jinja")
    )
    with pytest.raises(
        PoisonSample, match="the chat template rejects the conversation: no system role"
    ):
        renderer.prompt_tokens(TALK)


def test_renderer_rejects_an_invalid_or_missing_template_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% if %}")
    with pytest.raises(
        ConfigError, match=r"is not a Jinja template: .*; set data.chat_template_file"
    ):
        PromptRenderer.from_folder(
            folder, DataConfig(source="jsonl:x", chat_template_file=tmp_path / "broken.jinja")
        )
    with pytest.raises(
        ConfigError, match=r"missing.jinja can't be read: .*; set data.chat_template_file"
    ):
        PromptRenderer.from_folder(
            folder, DataConfig(source="jsonl:x", chat_template_file=tmp_path / "missing.jinja")
        )


def test_ids_behind_the_tokenizers_vocabulary_are_no_text(folder: Path) -> None:
    """A model's embedding may have more rows than its tokenizer has tokens."""
    renderer = PromptRenderer.from_folder(folder, CHAT)
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    tokens = np.array([*renderer.encode("4"), size + 1000, *renderer.encode("2")], np.int32)
    for skips in (True, False):
        assert renderer.completion_text(tokens, skip_special_tokens=skips) == "42"
