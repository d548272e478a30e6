"""Tiny models: files, tokens, determinism and errors."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax_events.errors import ConfigError
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.packages.examples.tiny_tokenizer import constant_phrases, train_tokenizer

PROMPTS = ["Spell backward: sun.", "Spell backward: tree.", "Spell backward: ice."]


def test_make_tiny_writes_a_model_that_loads_and_computes(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", corpus=PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    # By hand: embeddings and head 2 * 273 * 64; a layer: q and o 2 * 64 * 64, k and v 2 * 64 * 32,
    # mlp 3 * 64 * 128, norms 2 * 64 + 2 * 16.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    assert (
        sum(parameter.numel() for parameter in model.parameters()) == 2 * 273 * 64 + 2 * layer + 64
    )
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 273)


def test_make_tiny_scales_initial_weights_by_the_width(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path, corpus=PROMPTS))
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.125, rel=0.05)


def test_make_tiny_is_byte_identical_for_the_same_seed(tmp_path: Path) -> None:
    first, second, other = (
        make_tiny(tmp_path / name, corpus=PROMPTS, seed=seed)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_make_tiny_does_not_change_the_callers_random_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_tiny(tmp_path, corpus=PROMPTS)
    assert torch.equal(torch.rand(3), expected)


def test_make_tiny_ends_generation_at_the_chat_end_token(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path, corpus=PROMPTS))
    stops = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(stops) == ["<|im_end|>", "<|endoftext|>"]


def test_make_tiny_makes_mixtures_of_experts_when_asked(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        make_tiny(tmp_path, corpus=PROMPTS, family="qwen3_moe", hidden_size=32, num_layers=1)
    )
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert torch.isfinite(logits).all()


def test_tokenizer_of_an_audio_model_names_the_media_placeholder_tokens(
    tmp_path: Path,
) -> None:
    path = make_tiny(
        tmp_path, corpus=PROMPTS, family="qwen3_omni_moe_thinker", hidden_size=32, num_layers=1
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert (tokenizer.image_token, tokenizer.audio_token, tokenizer.vision_eos_token) == (
        "<|image_pad|>",
        "<|audio_pad|>",
        "<|vision_end|>",
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"family": "gpt5"}, "model family 'gpt5' is unknown; choose one of qwen3, qwen3_moe"),
        ({"hidden_size": 40}, "hidden_size must be a multiple of 32, got 40"),
        ({"vocab_size": 255}, "vocab_size must be >= 256"),
    ],
)
def test_make_tiny_rejects_invalid_settings(
    tmp_path: Path, settings: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        make_tiny(tmp_path / "model", corpus=PROMPTS, **settings)  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()


def test_tokenizer_gives_one_token_per_byte_without_merges() -> None:
    tokenizer = train_tokenizer(PROMPTS)
    for text in ("tree 42", "3 + 4", "na\u00efve \u732b"):
        assert len(tokenizer.encode(text)) == len(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_learns_merges_when_the_vocabulary_has_room() -> None:
    tokenizer = train_tokenizer(["banana banana banana"] * 10, vocab_size=270)
    assert len(tokenizer.encode("banana")) == 1


def test_tokenizer_keeps_phrases_and_chat_markers_as_single_tokens() -> None:
    tokenizer = train_tokenizer(PROMPTS, phrases=["Spell backward: "])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Spell backward: sun"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == "<|im_start|>user\nSpell backward: sun<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    assert tokens[:6] == ["<|im_start|>", "user\n", "Spell backward: ", "s", "u", "n"]
    assert len(tokens) == 10


def test_constant_phrases_are_the_common_beginning_and_end() -> None:
    assert constant_phrases(["Add 1 + 2 now", "Add 34 now"]) == ["Add ", " now"]
    assert constant_phrases(["one", "two"]) == []
    assert constant_phrases(["same", "same"]) == []
    assert constant_phrases(["aba", "ababa"]) == ["aba"]
