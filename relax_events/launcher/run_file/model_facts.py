"""What a run file needs to know of a model's folder: its size, its context, its precision."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from relax_events.errors import ConfigError
from relax_events.regular_files import read_regular_text

GIGA = 1e9
TRAINED_BYTES_PER_PARAMETER = 16
"""Weights and gradients in float32, and AdamW's two moments; activations come on top."""
SERVED_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_HEADER_BYTES = 100 * 1024**2


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
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json; give the folder of a model in Hugging Face layout"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors; convert the weights to safetensors")
    try:
        config = json.loads(read_regular_text(folder / "config.json"))
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} is not JSON: {error}") from None
    tensors = [tensor for file in files for tensor in _read_header(file).values()]
    text = (
        config.get("text_config") or config.get("thinker_config", {}).get("text_config") or config
    )
    given = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "")
    return ModelFacts(
        num_parameters=sum(prod(tensor["shape"]) for tensor in tensors),
        max_context_tokens=int(text.get("max_position_embeddings") or 0),
        dtype=given if given in SERVED_BYTES else "float32",
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
    )


def _read_header(file: Path) -> dict[str, Any]:
    """Return the tensors that a safetensors file names, without their data."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ConfigError(f"{file} is no safetensors file; fetch it again")
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
        except ValueError:
            raise ConfigError(f"{file} is no safetensors file; fetch it again") from None
    header.pop("__metadata__", None)
    return header
