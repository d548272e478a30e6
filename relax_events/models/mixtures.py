"""What a model's folder says of its experts, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_events.models.settings_file import read_settings, text_of

NUM_EXPERTS = ("num_experts", "num_local_experts")
"""What transformers calls their number, by family."""


def mixture_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many experts a layer has, and through how many a token goes; None where a model has none, or says it otherwise.

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
