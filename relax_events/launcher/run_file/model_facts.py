"""What a run file needs to know of a model's folder: its size, its context, its precision."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from relax_events.errors import ConfigError
from relax_events.model_folder import get_text_config, read_model_json
from relax_events.model_folder.tensors import require_layouts

GIGA = 1e9
TRAINED_BYTES_PER_PARAMETER = 16
"""Weights and gradients in float32, and AdamW's two moments; activations come on top."""
SERVED_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model's folder: parameters, maximum context in tokens, precision of its files."""

    num_parameters: int
    max_context_tokens: int
    dtype: str
    architecture: str

    def describe_memory(self) -> str:
        """Return what an engine and a trainer need, without activations and cache."""
        served = self.num_parameters * SERVED_BYTES[self.dtype]
        trained = self.num_parameters * TRAINED_BYTES_PER_PARAMETER
        return (
            f"{self.num_parameters / 1e6:,.1f} million parameters: an engine holds "
            f"{_format_bytes(served)} of weights, a trainer {_format_bytes(trained)} of weights, "
            "gradients and AdamW's moments; cache and activations come on top"
        )


def _format_bytes(count: int) -> str:
    return f"{count / GIGA:,.1f} GB" if count >= GIGA else f"{count / 1e6:,.1f} MB"


def read_model_facts(folder: Path) -> ModelFacts:
    """Read the facts from `config.json` and the headers of the weights' files.

    Raises:
        ConfigError: The folder holds no model in Hugging Face layout; the text says what lacks.
        DamagedTensors: A file of the weights is damaged; the text names it.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json; give the folder of a model in Hugging Face layout"
        )
    layouts = require_layouts(folder)
    config = read_model_json(folder / "config.json")
    text = get_text_config(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "")
    return ModelFacts(
        num_parameters=sum(prod(layout.shape) for layout in layouts.values()),
        max_context_tokens=int(text.get("max_position_embeddings") or 0),
        dtype=dtype if dtype in SERVED_BYTES else "float32",
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
    )
