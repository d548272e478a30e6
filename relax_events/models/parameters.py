"""The names and shapes of a model's parameters, from its folder and without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from relax_events.config import ModelConfig
from relax_events.errors import ConfigError
from relax_events.models.families import find_part, read_family
from relax_events.regular_files import require_regular_files


@dataclass(frozen=True, slots=True)
class ModelParameters:
    """A model's parameters as the trainer publishes them.

    Attributes:
        shapes: Of each parameter, by its name in transformers; tied ones once.
        tied: The other names of tied parameters, with the names in `shapes`.
        frozen: Names of parameters that the run does not train.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    frozen: frozenset[str]


def read_parameters(path: Path, config: ModelConfig) -> ModelParameters:
    """Return the parameters of the model in a folder; no weights are read and no memory is needed
    for them.

    Args:
        path: A folder in Hugging Face layout.
        config: Its section of the run file: frozen parts and media settings.
    Raises:
        ConfigError: The folder is missing or describes no model that transformers knows.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path = {path} holds no config.json, and the exported folder takes the "
            "tokenizer and what is not trained from there; give the base model's folder as --base"
        )
    require_regular_files(path, key="model.path")
    family = read_family(path, config.media)
    module = _build_empty(path, family.loader)
    names: dict[int, str] = {}
    shapes, tied = {}, {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first == name:
            shapes[name] = tuple(parameter.shape)
        else:
            tied[name] = first
    frozen = frozenset(name for name in shapes if find_part(name, family=family) in config.frozen)
    return ModelParameters(shapes, tied, frozen)


def _build_empty(path: Path, loader: Any) -> nn.Module:
    """Build a model without memory for its weights."""
    is_model_class = isinstance(loader, type) and issubclass(loader, PreTrainedModel)
    try:
        with torch.device("meta"):
            if is_model_class:
                config = loader.config_class.from_pretrained(path, local_files_only=True)
                part: nn.Module = loader._from_config(config)  # noqa: SLF001  # its auto class calls it
                return part
            config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
            module: nn.Module = loader.from_config(config, trust_remote_code=False)
            return module
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path = {path} can't be read as a causal language model: {error}"
        ) from error
