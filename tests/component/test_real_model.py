"""The model that `make real-model` writes: real weights, a real tokenizer and chat template, and
rows of which it answers some.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from transformers import pipeline

from benchmarks.real_rows import NUM_HELD_OUT, make_rows
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.events.parts import ChatMessage

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-real" / "bin" / "python"
QUESTION = "What is the capital of France? Answer in one word."
RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)
"""As the model's publisher lays a conversation out."""


def test_rows_are_the_same_each_time_and_share_no_pair_of_numbers() -> None:
    train, held_out = make_rows()
    assert (train, held_out) == make_rows()
    assert (len(train), len(held_out)) == (3072, NUM_HELD_OUT)
    pairs = [{_addends(row["prompt"]) for row in rows} for rows in (train, held_out)]
    assert (len(pairs[0]), len(pairs[1]), pairs[0] & pairs[1]) == (48, 16, set())
    assert all(sum(_addends(row["prompt"])) == int(row["answer"]) for row in train + held_out)


def _addends(prompt: str) -> tuple[int, int]:
    """Return the two numbers of a prompt's last question."""
    numbers = [int(word) for word in prompt.rsplit("Question:", 1)[1].split() if word.isdigit()]
    first, second = numbers
    return first, second


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make real-model`")
def test_real_model_renders_splits_and_answers_as_published(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    subprocess.run([PYTHON, "-m", "benchmarks.real_model", folder], check=True, cwd=ROOT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    renderer = PromptRenderer.from_folder(folder, DataConfig(source="jsonl:rows"))
    tokens = renderer.prompt_tokens([ChatMessage.of_text("user", QUESTION)])
    assert renderer.completion_text(tokens, skip_special_tokens=False) == RENDERED
    assert tokens[:2].tolist() == [1, 9690]  # <|im_start|>, system
    assert renderer.stop_token_ids == (2,)  # <|im_end|>
    digits = renderer.encode("12+345=357")
    assert "|".join(map(renderer.completion_text, digits[:, None])) == "1|2|+|3|4|5|=|3|5|7"
    chat = pipeline("text-generation", model=str(folder), tokenizer=str(folder), device="cpu")
    (answer,) = chat(RENDERED, max_new_tokens=8, do_sample=False, return_full_text=False)
    assert "Paris" in answer["generated_text"]
    assert sum(parameter.numel() for parameter in chat.model.parameters()) == 134_515_008
