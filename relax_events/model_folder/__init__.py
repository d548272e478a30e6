"""Reads the JSON files of a model folder, such as `config.json`, without loading the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from relax_events.errors import ConfigError
from relax_events.regular_files import read_regular_text


def read_model_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model folder, such as `config.json`.

    Raises:
        ConfigError: The file can't be read, or holds no JSON object.
    """
    try:
        tree = orjson.loads(read_regular_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read: {error}; use the model folder as published, or create one "
            "with `relax models prepare`"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no JSON object; use the model folder as published")
    return tree


def get_thinker_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a `config.json` that describes the trained model: the thinker, in a model
    that also has a talker.
    """
    part: Mapping[str, Any] = config.get("thinker_config", config)
    return part


def get_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a `config.json` that describes the language model, which multimodal models
    keep in `text_config`.
    """
    thinker = get_thinker_config(config)
    part: Mapping[str, Any] = thinker.get("text_config", thinker)
    return part


NUM_EXPERTS = ("num_experts", "num_local_experts")
"""The config keys for the number of experts, which differ between model families."""


def read_expert_counts(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the number of experts of a layer and the number that each token is routed to; None
    when the model is dense or uses unknown keys.

    Args:
        config: The model's `config.json`.
    """
    text = get_text_config(config)
    num_experts = next((text[name] for name in NUM_EXPERTS if text.get(name)), 0)
    top_k = text.get("num_experts_per_tok")
    return (num_experts, top_k) if num_experts and top_k else None


def has_experts(path: Path) -> bool:
    """Return whether the model in a folder in Hugging Face layout is a mixture of experts.

    Raises:
        ConfigError: The folder's `config.json` can't be read.
    """
    return read_expert_counts(read_model_json(path / "config.json")) is not None
