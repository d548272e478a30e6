"""Models prepared from a run's own data: when, how, and the messages about it."""

import json
from pathlib import Path

import pytest
import torch
from small_settings import small_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax_events.config import DataConfig, RunConfig
from relax_events.config.engine import TinyModelConfig
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.packages.examples.model_preparation import (
    make_tiny_for,
    prepare_model,
    warm_up_model,
)


def run_config(
    folder: Path,
    *,
    steps: int = 0,
    target_loss: float = 0.0,
    tiny: dict[str, int] | None = None,
    seed: int = 0,
) -> RunConfig:
    """A run whose task is to answer every letter with itself."""
    data = folder / "characters.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": f"say {letter}", "answer": letter}) + "\n"
            for letter in "abcdefgh"
        )
    )
    return small_run(
        {
            "run": {"id": "characters", "seed": seed},
            "model": {
                "path": folder / "model",
                "tiny": {"hidden_size": 32, "num_layers": 1, "corpus_rows": 8}
                if tiny is None
                else tiny or None,
            },
            "data": {"source": f"jsonl:{data}"},
            "sft_warmup": {
                "steps": steps,
                "batch_size": 16,
                "learning_rate": 1e-2,
                "target_loss": target_loss,
            },
        }
    )


def test_prepare_creates_a_missing_tiny_model(tmp_path: Path) -> None:
    lines: list[str] = []
    path = prepare_model(run_config(tmp_path), report=lines.append)
    assert path == tmp_path / "model"
    assert AutoModelForCausalLM.from_pretrained(path).config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(path).tokenize("say b") == ["say ", "b"]
    assert lines == ["made a random qwen3 of width 32", f"wrote model {path}"]
    assert [entry.name for entry in tmp_path.iterdir() if "draft" in entry.name] == []


def test_prepare_keeps_an_existing_model(tmp_path: Path) -> None:
    prepare_model(run_config(tmp_path), report=lambda _: None)
    before = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    lines: list[str] = []
    prepare_model(run_config(tmp_path), report=lines.append)
    assert lines == [f"model {tmp_path / 'model'} exists"]
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_prepare_reports_a_model_made_from_other_settings(tmp_path: Path) -> None:
    prepare_model(run_config(tmp_path), report=lambda _: None)
    lines: list[str] = []
    prepare_model(run_config(tmp_path, seed=1), report=lines.append)
    assert lines == [
        (f"model {tmp_path / 'model'} exists, made from other settings; remove it to make it again")
    ]


def test_prepare_rejects_a_missing_model_without_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model does not exist; set model.path, or describe a small model in \[model.tiny\]",
    ):
        prepare_model(run_config(tmp_path, tiny={}), report=lambda _: None)
    assert not (tmp_path / "model").exists()


def test_prepare_rejects_an_unwritable_folder_before_it_starts(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    (tmp_path / "file").write_text("no folder")
    model = config.model.model_copy(update={"path": tmp_path / "file" / "model"})
    lines: list[str] = []
    with pytest.raises(
        EnvironmentProblem,
        match=r"model folder .*/file can't be written: .*; set model.path to a path in a writable folder",
    ):
        prepare_model(config.model_copy(update={"model": model}), report=lines.append)
    assert lines == []


def test_sft_warmup_teaches_the_task_and_reports(tmp_path: Path) -> None:
    lines: list[str] = []
    warm_up_model(run_config(tmp_path, steps=60), report=lines.append)
    assert [line for line in lines if line.startswith("SFT warm-up: step 60 of 60, loss 0.0")]
    assert "greedy accuracy after the SFT warm-up: 1.00 on 256 prompts" in lines


def test_sft_warmup_stops_once_its_loss_is_low_enough(tmp_path: Path) -> None:
    lines: list[str] = []
    warm_up_model(run_config(tmp_path, steps=60, target_loss=1.0), report=lines.append)
    (last,) = [line for line in lines if line.startswith("SFT warm-up: stopped at step")]
    step, loss = int(last.split()[5].rstrip(",")), float(last.split()[-1])
    assert step < 60
    assert loss < 1.0


def test_sft_warmup_gives_the_same_weights_for_a_seed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = warm_up_model(
        run_config(tmp_path, steps=3), output=tmp_path / "first", report=lambda _: None
    )
    torch.manual_seed(2)
    second = warm_up_model(
        run_config(tmp_path, steps=3), output=tmp_path / "second", report=lambda _: None
    )
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_sft_warmup_continues_from_an_existing_model(tmp_path: Path) -> None:
    random = warm_up_model(run_config(tmp_path), report=lambda _: None)
    weights = (random / "model.safetensors").read_bytes()
    copy = warm_up_model(run_config(tmp_path), output=tmp_path / "copy", report=lambda _: None)
    assert (copy / "model.safetensors").read_bytes() == weights
    assert (
        warm_up_model(run_config(tmp_path, steps=2), report=lambda _: None) / "model.safetensors"
    ).read_bytes() != weights


def test_make_tiny_for_keeps_the_system_prompt_in_one_token(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    data = config.data.model_copy(update={"system_prompt": "Be brief."})
    assert config.model.tiny is not None
    path = make_tiny_for(data, tmp_path / "made", tiny=config.model.tiny, seed=0)
    assert AutoTokenizer.from_pretrained(path).tokenize("Be brief.") == ["Be brief."]


def test_make_tiny_for_encodes_common_prompt_phrases_as_single_tokens(
    tmp_path: Path,
) -> None:
    for name, prompt in (("sum", "Add 1 and {}."), ("copy", "Copy {} once.")):
        rows = [
            json.dumps({"prompt": prompt.format(letter), "answer": letter}) for letter in "abcdefgh"
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    data = DataConfig.model_validate(
        {"datasets": [{"source": f"jsonl:{tmp_path}/{name}.jsonl"} for name in ("sum", "copy")]}
    )
    path = make_tiny_for(data, tmp_path / "model", tiny=TinyModelConfig(corpus_rows=16), seed=1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.tokenize("Add 1 and x.") == ["Add 1 and ", "x", "."]
    assert tokenizer.tokenize("Copy x once.") == ["Copy ", "x", " once."]


def test_warm_up_computes_with_the_threads_of_the_trainer(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    other = before + 1
    found: list[int] = []
    config = run_config(tmp_path, steps=1)
    trainer = config.trainer.model_copy(update={"threads": other})
    prepare_model(
        config.model_copy(update={"trainer": trainer}),
        report=lambda line: found.append(torch.get_num_threads()) if "step 1" in line else None,
    )
    assert found == [other]
    assert torch.get_num_threads() == before
