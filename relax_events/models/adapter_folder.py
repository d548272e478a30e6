"""Folders of adapters as `peft` and transformers read them: `adapter_config.json` and
`adapter_model.safetensors`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError
from torch import Tensor

from relax_events.config import LoRAConfig
from relax_events.errors import ConfigError
from relax_events.model_folder import read_model_json
from relax_events.model_folder.tensors import StoredTensors
from relax_events.models.adapters import parameter_name

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
UNSUPPORTED = ("use_dora", "use_rslora", "alora_invocation_tokens", "modules_to_save")
"""Keys of `adapter_config.json` for adapters of other kinds."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What `adapter_config.json` says; `base` is a folder, or a name on the hub."""

    config: LoRAConfig
    base: str


def read_adapter_config(folder: Path) -> AdapterFolder:
    """Read the settings of a folder of adapters.

    Raises:
        ConfigError: They can't be read, or are those of adapters other than LoRA's.
    """
    path = folder / CONFIG_FILE
    value = read_model_json(path)
    if value.get("peft_type") != "LORA" or value.get("bias", "none") != "none":
        raise ConfigError(
            f"{path} must have peft_type LORA and no bias, got {value.get('peft_type')} with bias "
            f"{value.get('bias')}; take adapters of that kind"
        )
    if other := [key for key in UNSUPPORTED if value.get(key)]:
        raise ConfigError(f"{path} sets {other[0]}, which is not supported; take plain LoRA")
    targets = value.get("target_modules") or ()
    try:
        config = LoRAConfig(
            rank=value["r"],
            alpha=value["lora_alpha"],
            target_modules=(targets,) if isinstance(targets, str) else tuple(targets),
        )
    except (KeyError, ValidationError) as error:
        raise ConfigError(f"{path} can't be read: {error}; export the adapters again") from error
    return AdapterFolder(config, str(value.get("base_model_name_or_path") or ""))


def read_adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Read a folder's adapters onto the CPU, by the name of the parameter in the model.

    Raises:
        DamagedTensors: They can't be read.
    """
    tensors = StoredTensors.from_files([folder / TENSORS_FILE])
    return {parameter_name(name): tensor for name, tensor in tensors.items()}


def render_adapter_config(
    config: LoRAConfig, *, base: str, target_modules: Collection[str], is_causal_lm: bool
) -> bytes:
    """Return `adapter_config.json`.

    Args:
        config: Rank and scale.
        base: The base model's folder, or its name on the hub.
        target_modules: Names that fit the modules with adapters and no others.
        is_causal_lm: Whether transformers loads the base model by `AutoModelForCausalLM`.
    """
    value: Mapping[str, Any] = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": sorted(target_modules),
        "task_type": "CAUSAL_LM" if is_causal_lm else None,
    }
    return orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"
