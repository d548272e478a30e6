"""Facts read from a checkpoint folder's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from relax_events.config.engine import TinyModelConfig
from relax_events.errors import ConfigError
from relax_events.model_folder.tensors import TensorLayout, render_header
from relax_events.models.checkpoint_facts import read_facts, tiny_facts
from relax_events.planning.inventory import CheckpointFacts

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "max_position_embeddings": 40_960,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_30B = QWEN3_4B | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}


def folder_of(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, tuple[str, tuple[int, ...]]] | None = None,
) -> Path:
    (path / "config.json").write_bytes(orjson.dumps(config))
    if tensors is not None:
        layouts = {name: TensorLayout(dtype, shape) for name, (dtype, shape) in tensors.items()}
        num_bytes = sum(layout.num_bytes for layout in layouts.values())
        (path / "model.safetensors").write_bytes(render_header(layouts) + bytes(num_bytes))
    return path


def test_facts_of_a_dense_model_are_read(tmp_path: Path) -> None:
    facts = read_facts(
        folder_of(tmp_path, QWEN3_4B, {"a": ("bfloat16", (100, 10)), "b": ("bfloat16", (24,))})
    )
    assert facts == CheckpointFacts(
        "bfloat16", 1024, 151_936, 2560, 36, 32, 8, 128, 9728, 40_960, architecture="qwen3"
    )


def test_moe_mlp_size_counts_only_the_active_experts(tmp_path: Path) -> None:
    facts = read_facts(folder_of(tmp_path, QWEN3_30B))
    assert facts.mlp_size == 6144
    assert facts.num_parameters == pytest.approx(30_532_122_624, rel=0.001)


def test_parameter_count_is_estimated_without_weight_files(tmp_path: Path) -> None:
    assert read_facts(folder_of(tmp_path, QWEN3_4B)).num_parameters == pytest.approx(
        4_022_468_096, rel=0.001
    )


def test_facts_use_the_nested_thinker_language_model(tmp_path: Path) -> None:
    config = {
        "thinker_config": {"text_config": QWEN3_30B | {"torch_dtype": None}, "dtype": "float32"}
    }
    facts = read_facts(
        folder_of(
            tmp_path, config, {"thinker.a": ("float32", (8,)), "talker.a": ("float32", (800,))}
        )
    )
    assert (facts.dtype, facts.num_parameters, facts.hidden_size) == ("float32", 8, 2048)


@pytest.mark.parametrize(
    ("named", "kind", "dtype"),
    [
        ("float32", "float32", "float32"),
        (None, "bfloat16", "bfloat16"),
        ("float16", "float16", "bfloat16"),
    ],
)
def test_dtype_comes_from_the_config_or_else_from_the_weight_files(
    tmp_path: Path, named: str | None, kind: str, dtype: str
) -> None:
    assert (
        read_facts(
            folder_of(tmp_path, QWEN3_4B | {"torch_dtype": named}, {"a": (kind, (2,))})
        ).dtype
        == dtype
    )


def test_incomplete_model_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"config.json does not describe the model: 'hidden_size'"
    ):
        read_facts(folder_of(tmp_path, {"model_type": "qwen3"}))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_tiny_model_facts_are_known_before_creation(family: str) -> None:
    facts = tiny_facts(
        TinyModelConfig.model_validate(
            {"family": family, "hidden_size": 64, "num_layers": 2, "vocab_size": 256}
        )
    )
    assert (facts.dtype, facts.num_heads, facts.num_kv_heads, facts.max_position_embeddings) == (
        "float32",
        4,
        2,
        4096,
    )
