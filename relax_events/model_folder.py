"""The JSON files beside a model's weights.

What a model's folder says of its experts, before anything of it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from relax_events.errors import ConfigError
from relax_events.regular_files import read_regular_text


def read_settings(path: Path) -> dict[str, Any]:
    """Read such a file, as `config.json`.

    Raises:
        ConfigError: It can't be read, or holds no JSON object.
    """
    try:
        tree = orjson.loads(read_regular_text(path))
    except (OSError, ValueError) as error:
        remedy = (
            "take the model's folder as it was published, or have `relax models prepare` make one"
        )
        raise ConfigError(f"{path} can't be read: {error}; {remedy}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds no JSON object; take the model's folder as it was published"
        )
    return tree


def thinker_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a `config.json` about the model that is trained: a folder that has a
    talker as well keeps the thinker's apart.
    """
    part: Mapping[str, Any] = config.get("thinker_config", config)
    return part


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a `config.json` about the language model: one that reads media keeps it
    apart.
    """
    thinker = thinker_of(config)
    part: Mapping[str, Any] = thinker.get("text_config", thinker)
    return part


NUM_EXPERTS = ("num_experts", "num_local_experts")
"""What transformers calls their number, by family."""


def mixture_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many experts a layer has, and through how many a token goes; None where a model
    has none, or says it otherwise.

    Args:
        config: Its `config.json`.
    """
    text = text_of(config)
    num_experts = next((text[name] for name in NUM_EXPERTS if text.get(name)), 0)
    top_k = text.get("num_experts_per_tok")
    return (num_experts, top_k) if num_experts and top_k else None


def has_experts(path: Path) -> bool:
    """Tell whether the model in a folder in Hugging Face layout is a mixture of experts.

    Raises:
        ConfigError: Its `config.json` can't be read.
    """
    return mixture_of(read_settings(path / "config.json")) is not None
