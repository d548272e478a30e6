"""Read facts about a checkpoint from its `config.json` and file headers, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from relax_events.config.engine import TinyModelConfig
from relax_events.config.hub_names import find_model_name
from relax_events.errors import ConfigError, DamagedTensors
from relax_events.model_folder import get_text_config, get_thinker_config, read_model_json
from relax_events.model_folder.tensors import (
    TensorLayout,
    list_weight_files,
    read_layouts,
    require_layouts,
)
from relax_events.planning.inventory import CheckpointFacts

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}
"""The compute dtype of a run, by the dtype in `config.json` or of the weights. float16 becomes
bfloat16, because gradients would overflow float16.
"""
TOWERS = ("visual.", "audio_tower.")
"""In the names of the towers' parameters in transformers."""
DEFAULT_MAX_POSITIONS = 4096
TINY_HEAD_DIM, TINY_POSITIONS, TINY_EXPERTS_PER_TOKEN, TINY_EXPERT_SIZE = 16, 4096, 2, 32


def require_fetched(folder: Path, *, key: str, needs_weights: bool = True) -> None:
    """Refuse a folder of this host's cache of the hub that is not there, or not with its weights.

    Raises:
        ConfigError: Its files were not fetched; the text names the command.
    """
    if (name := find_model_name(folder)) is None:
        return
    with suppress(DamagedTensors):  # the index names a file that was not fetched
        if list_weight_files(folder) or (not needs_weights and folder.is_dir()):
            return
    raise ConfigError(
        f"{key} {name} is not in this host's cache of the hub; fetch it: relax models prepare "
        f"RUN_FILE {key}={name}"
    )


def read_facts(path: Path, *, needs_weights: bool = False) -> CheckpointFacts:
    """Read the facts of a checkpoint in Hugging Face layout.

    Args:
        path: The folder.
        needs_weights: Refuse a folder without weights, whose parameters would be an estimate.
    Raises:
        ConfigError: `config.json` can't be read or lacks sizes, or the weights are absent; the text
            names it.
        DamagedTensors: A file of the weights is damaged; the text names it.
    """
    settings = read_model_json(path / "config.json")
    config = get_text_config(settings)
    try:
        hidden, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        facts = CheckpointFacts(
            dtype="float32",
            num_parameters=0,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden // num_heads),
            mlp_size=_mlp_size(config),
            max_position_embeddings=int(
                config.get("max_position_embeddings") or DEFAULT_MAX_POSITIONS
            ),
            architecture=str(
                (settings.get("architectures") or [settings.get("model_type", "unknown")])[0]
            ),
            has_tied_head=_has_tied_head(settings),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path / 'config.json'} does not describe the model: {error}; use the "
            "model's folder as it was published"
        ) from None
    prefix = "thinker." if "thinker_config" in settings else ""
    counts, num_in_towers = _parameters(
        require_layouts(path) if needs_weights else read_layouts(path), prefix=prefix
    )
    named = next(
        (
            str(name)
            for part in (config, get_thinker_config(settings), settings)
            if (name := part.get("dtype") or part.get("torch_dtype"))
        ),
        None,
    )
    most_common = counts.most_common(1)[0][0] if counts else "float32"
    return replace(
        facts,
        dtype=DTYPES.get(named or most_common, "float32"),
        num_parameters=counts.total() or _estimate(facts, config),
        num_tower_parameters=num_in_towers,
    )


def tiny_facts(tiny: TinyModelConfig) -> CheckpointFacts:
    """Return the facts of a tiny model before it is created; its number of parameters is an
    estimate.
    """
    num_heads = tiny.hidden_size // TINY_HEAD_DIM
    mlp = (
        TINY_EXPERTS_PER_TOKEN * TINY_EXPERT_SIZE if "moe" in tiny.family else 2 * tiny.hidden_size
    )
    facts = CheckpointFacts(
        dtype="float32",
        num_parameters=0,
        vocab_size=tiny.vocab_size,
        hidden_size=tiny.hidden_size,
        num_layers=tiny.num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2,
        head_dim=TINY_HEAD_DIM,
        mlp_size=mlp,
        max_position_embeddings=TINY_POSITIONS,
    )
    return replace(facts, dtype="float32", num_parameters=_estimate(facts, {}))


def _has_tied_head(settings: Mapping[str, Any]) -> bool:
    """Return whether the output head is the embeddings; transformers takes it as given where no
    part of the file says otherwise.
    """
    parts = (settings, get_thinker_config(settings), get_text_config(settings))
    named = (part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part)
    return bool(next(named, True))


def _mlp_size(config: Mapping[str, Any]) -> int:
    """Return the feed-forward width per token; in a mixture of experts, of the selected ones."""
    if experts := int(config.get("num_experts_per_tok") or 0):
        return experts * int(config["moe_intermediate_size"]) + int(
            config.get("shared_expert_intermediate_size") or 0
        )
    return int(config["intermediate_size"])


def _parameters(layouts: Mapping[str, TensorLayout], *, prefix: str) -> tuple[Counter[str], int]:
    """Return the number of parameters by dtype, and of parameters in towers."""
    counts, num_in_towers = Counter[str](), 0
    for name, layout in layouts.items():
        if name.startswith(prefix):
            size = prod(layout.shape)
            counts[layout.dtype] += size
            if any(tower in name for tower in TOWERS):
                num_in_towers += size
    return counts, num_in_towers


def _estimate(facts: CheckpointFacts, config: Mapping[str, Any]) -> int:
    """Estimate the number of parameters from the sizes, for a model without files."""
    hidden, attention_width = (
        facts.hidden_size,
        (2 * facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim,
    )
    mlp = (
        int(config.get("num_experts") or 0) * int(config.get("moe_intermediate_size") or 0)
        or facts.mlp_size
    )
    return facts.num_outer_parameters + facts.num_layers * hidden * (attention_width + 3 * mlp)
