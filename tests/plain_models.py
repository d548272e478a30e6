"""Small random models whose layers have the plain form that is computed without modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def write_plain_model(folder: Path, family: str, dtype: str = "float32", **shape: Any) -> None:
    """Write a random model of a family; `shape` overrides `SHAPE`."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **SHAPE | shape)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():  # norms of one and biases of zero would hide a wrong one
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    model.save_pretrained(folder)
