"""A run file is proposed from a model's folder and the first rows of a dataset."""

from __future__ import annotations

import json
import re
import struct
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from jsonschema import Draft7Validator

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.launcher.run_file.columns import Columns, guess_columns, propose_reward
from relax_events.launcher.run_file.proposal import Wishes, divide_context, propose_run_file
from relax_events.models.checkpoint_facts import read_facts

MESSAGES = [{"role": "user", "content": "why"}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "so"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "a", "answer": "b"}, Columns("question", "answer")),
        ({"prompt": MESSAGES, "solution": 3}, Columns("prompt", "solution")),
        (
            {"problem": "<image> a", "images": [b"x"], "answer": "b"},
            Columns("problem", "answer", {"image": "images"}),
        ),
        (
            {"prompt": MESSAGES, "reward_model": {"ground_truth": "b"}},
            Columns("prompt", "reward_model.ground_truth"),
        ),
        ({"prompt": "a", "answer": ""}, Columns("prompt", "")),
    ],
)
def test_columns_are_guessed_by_name_and_content(row: dict[str, Any], expected: Columns) -> None:
    assert guess_columns([row, row]) == expected


def test_named_columns_come_before_guessed_ones() -> None:
    row = {"question": "a", "answer": "b", "text": "c", "gold": "d"}
    assert guess_columns([row], prompt="text", answer="gold") == Columns("text", "gold")


@pytest.mark.parametrize(
    ("row", "prompt", "text"),
    [
        ({"texts": "a"}, "", "no column .* looks like a prompt, only texts; .* --prompt COLUMN"),
        ({"text": "a"}, "titel", "has no column 'titel', only text"),
        ({"messages": ANSWERED}, "", "whole conversations .* configs/sft.toml"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "", "preference pairs .*configs/dpo"),
    ],
)
def test_unclear_columns_are_refused_with_what_to_name(
    row: dict[str, Any], prompt: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        guess_columns([row], prompt=prompt)


@pytest.mark.parametrize(
    ("answers", "function"),
    [
        (["so\n#### 4", "#### 12"], "gsm8k"),
        (["A", "(B)"], "multiple_choice"),
        (["12", "-3.5", "1,000", r"\frac{1}{2}"], "math"),
        (["cat", "dog"], "exact_match"),
        (["the cat", "a small dog"], "f1"),
    ],
)
def test_reward_is_proposed_from_the_answers(answers: list[str], function: str) -> None:
    rows = [{"prompt": "p", "answer": answer} for answer in answers]
    assert propose_reward(rows, Columns("prompt", "answer")).function == function


def test_reward_is_proposed_from_the_columns_of_verifiers() -> None:
    row = {"prompt": "p", "instruction_id_list": [], "kwargs": []}
    assert propose_reward([row], Columns("prompt", "")).function == "ifeval"
    assert propose_reward([{"prompt": "p", "tests": "x"}], Columns("prompt", "")).function == "code"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "p"}, "--answer COLUMN"),
        ({"prompt": "p", "answer": "a long text of many words that no verifier reads"}, "genrm"),
    ],
)
def test_dataset_without_a_fitting_reward_is_refused(row: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        propose_reward([row], guess_columns([row]))


def write_model(folder: Path, config: dict[str, Any]) -> None:
    header = {"a": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}, "__metadata__": {}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    sizes = config.get("text_config", config)
    sizes |= dict.fromkeys(
        ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers"), 4
    )
    sizes["intermediate_size"] = 8
    (folder / "config.json").write_text(json.dumps(config))


def test_model_facts_come_from_its_files(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        {
            "architectures": ["Qwen3VL"],
            "dtype": "bfloat16",
            "text_config": {"max_position_embeddings": 100},
        },
    )
    facts = read_facts(tmp_path)
    assert (facts.num_parameters, facts.max_position_embeddings) == (12, 100)
    assert (facts.dtype, facts.architecture) == ("bfloat16", "Qwen3VL")
    reward = propose_reward([{"prompt": "p", "answer": "4"}], Columns("prompt", "answer"))
    assert divide_context(facts, reward, 40) == (50, 50)
    with pytest.raises(ConfigError, match="reads at most 100 tokens, and a prompt has 100"):
        divide_context(facts, reward, 100)


def test_run_file_is_proposed_with_a_reason_for_each_value(tmp_path: Path) -> None:
    write_model(tmp_path, {"architectures": ["Qwen3VL"], "dtype": "bfloat16"})
    data = tmp_path / "rows.jsonl"
    row = {"problem": "<image> 2 + 2", "images": ["a.png"], "answer": "4"}
    data.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="has no chat template, which places the data's media"):
        propose_run_file("mine", tmp_path, data, Wishes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    run_file = propose_run_file("mine", tmp_path, data, Wishes())
    settings = tomllib.loads(run_file)
    assert settings["data"]["multimodal_keys"] == {"image": "images"}
    keyword, schema = run_file.splitlines()[0].split(" ")
    assert keyword == "#:schema"
    Draft7Validator(json.loads(Path(urlsplit(schema).path).read_text())).validate(settings)
    assert "an engine holds 0.0 MB of weights, a trainer 0.0 MB of weights, gradients" in run_file
    proposals = re.sub(r"(?m)^# (?=\[|\w+ = )", "", run_file)
    config = RunConfig.model_validate(tomllib.loads(proposals))
    assert (config.evaluation.every, config.evaluation.datasets[0].name) == (20, "held-out")
    assert config.model.lora is not None
    assert config.model.lora.rank == 16


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json can't be read"):
        propose_run_file("mine", tmp_path, tmp_path, Wishes())
    write_model(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor"):
        propose_run_file("mine", tmp_path, tmp_path, Wishes())


def test_names_of_the_hub_are_refused_without_their_prefix(tmp_path: Path) -> None:
    text = "model folder org/small does not exist; a model of the Hugging Face hub is named hf:org/name"
    with pytest.raises(ConfigError, match=text):
        propose_run_file("mine", Path("org/small"), tmp_path, Wishes())
