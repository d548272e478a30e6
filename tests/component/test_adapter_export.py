"""A version of a run with `model.lora` becomes a folder of adapters or a merged model; both have the
trainer's log-probabilities, in transformers, peft and the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from published_model import TrainedRun, make_base, rewrite, token_logprobs
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from relax_events.config import EngineConfig, ModelConfig
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import ConfigError, WeightsError
from relax_events.media.token_layout import MEDIA_FAMILIES
from relax_events.models.adapter_folder import read_adapter_config
from relax_events.ops.model_export.export import Export, export_version
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.weights import Weights
from relax_events.weights.artifact_files import ArtifactTensors
from relax_events.weights.transport import StoreReader

CASES = (
    ("qwen3", "weights"),
    ("qwen3", "checkpoint"),
    ("qwen3_vl", "weights"),
    ("qwen3_5_moe", "weights"),
)
LORA = {"rank": 4, "alpha": 12}


def lora_run(tmp_path: Path, family: str = "qwen3", **settings: Any) -> TrainedRun:
    base = make_base(tmp_path / "base", family)
    return TrainedRun(tmp_path / "run", base, model={"lora": LORA}, **settings)


def exported(run: TrainedRun, folder: Path, version: int = 2, **settings: Any) -> Export:
    return export_version(run.config, run.versions, version, folder, **settings)


def load(folder: Path, family: str = "qwen3") -> Any:
    loader = AutoModelForImageTextToText if family in MEDIA_FAMILIES else AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype="auto", attn_implementation="sdpa")


@pytest.mark.parametrize(("family", "source"), CASES)
def test_both_folders_have_the_trainers_logprobs(tmp_path: Path, family: str, source: str) -> None:
    run = lora_run(tmp_path, family)
    if source == "checkpoint":
        run.delete_weights(2)
    first = exported(run, tmp_path / "adapters")
    second = exported(run, tmp_path / "merged", merged=True, max_shard_bytes=20_000)
    assert (first.source, first.content, first.num_files) == (source, "adapters", 1)
    assert (second.source, second.content) == (source, "merged model")
    assert second.num_files > 1
    own = run.logprobs()
    base = load(run.config.model.path, family)
    assert (token_logprobs(base) - own).abs().max() > 0.05
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert torch.allclose(token_logprobs(adapted), own, atol=1e-5, rtol=0)
    merged = load(tmp_path / "merged", family)
    assert torch.allclose(token_logprobs(merged), own, atol=1e-5, rtol=0)


def test_transformers_finds_the_base_model_and_the_tokenizer(tmp_path: Path) -> None:
    run = lora_run(tmp_path)
    exported(run, tmp_path / "adapters")
    files = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= files
    assert "config.json" not in files
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 12)
    assert set(config["target_modules"]) == {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters", dtype="auto")
    assert torch.allclose(token_logprobs(loaded), run.logprobs(), atol=1e-5, rtol=0)
    ids = AutoTokenizer.from_pretrained(tmp_path / "adapters")("12=21").input_ids
    assert ids == AutoTokenizer.from_pretrained(run.config.model.path)("12=21").input_ids
    assert "library_name: peft" in (tmp_path / "adapters/README.md").read_text()


def test_modules_are_named_whole_where_their_last_part_fits_others(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    lora = {"rank": 2, "target_modules": ["layers.1.mlp.up_proj"]}
    run = TrainedRun(tmp_path / "run", base, model={"lora": lora})
    exported(run, tmp_path / "adapters")
    assert read_adapter_config(tmp_path / "adapters").config.target_modules == (
        "model.layers.1.mlp.up_proj",
    )
    adapted = PeftModel.from_pretrained(load(base), tmp_path / "adapters")
    assert torch.allclose(token_logprobs(adapted), run.logprobs(), atol=1e-5, rtol=0)


def test_engine_serves_the_folder_and_the_version(tmp_path: Path) -> None:
    run = lora_run(tmp_path)
    exported(run, tmp_path / "adapters")
    found = read_adapter_config(tmp_path / "adapters")
    engine = TransformersEngine(
        Path(found.base),
        config=EngineConfig(threads=1, max_running_samples=8, max_context_tokens=64),
        model=ModelConfig(path=Path(found.base), dtype="float32", device="cpu", lora=found.config),
    )
    version = StoreReader(run.store)._read(run.versions.artifacts[2])
    engine.load_weights(version)
    read = engine.read_weights(tmp_path / "adapters")
    assert read.keys() == version.tensors.keys()
    assert all(torch.equal(tensor, version.tensors[name]) for name, tensor in read.items())
    engine.load_weights(Weights(3, read, b""))
    engine.close()


def test_version_of_another_base_model_is_refused(tmp_path: Path) -> None:
    run = lora_run(tmp_path)
    rewrite(run.config.model.path, lambda tensors: tensors["model.norm.weight"].mul_(1.5))
    with pytest.raises(WeightsError, match=r"base model with digest .* give the run's base model"):
        exported(run, tmp_path / "adapters")
    engine = TransformersEngine(
        run.config.model.path,
        config=EngineConfig(threads=1, max_running_samples=8, max_context_tokens=64),
        model=run.config.model,
    )
    with pytest.raises(WeightsError, match="put the trainer's base model there"):
        engine.load_weights(StoreReader(run.store)._read(run.versions.artifacts[2]))
    engine.close()


def test_version_is_small_and_a_delta_applies_to_adapters(tmp_path: Path) -> None:
    run = lora_run(tmp_path, dtype="bfloat16", num_versions=4, full_snapshot_interval=4)
    assert json.loads(run.store.get(run.versions.artifacts[3]))["changed"]
    weights = StoreReader(run.store)._read(run.versions.artifacts[3])
    own = collect_weights(run.backend)
    assert weights.tensors.keys() == own.keys()
    assert all(torch.equal(weights.tensors[name], tensor) for name, tensor in own.items())
    (tmp_path / "opened").mkdir()
    files = ArtifactTensors(run.store, run.versions.artifacts[0], tmp_path / "opened")
    assert files.base_digest == weights.base_digest
    num_parameters = sum(tensor.numel() for tensor in own.values())
    assert sum(layout.num_bytes for layout in files.layouts.values()) == 2 * num_parameters


def test_merging_is_refused_for_a_run_without_adapters(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path / "run", make_base(tmp_path / "base"))
    with pytest.raises(ConfigError, match=r"--merged is for runs with \[model.lora\]"):
        exported(run, tmp_path / "merged", merged=True)
