"""Load a causal language model and replace its weights; shared by engine, trainer and scorers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from relax_events.errors import ConfigError, WeightsError
from relax_events.model_folder.tensors import read_layouts
from relax_events.regular_files import require_regular_files


def choose_device(name: str, *, local_rank: int = 0) -> torch.device:
    """Return the device of a name; `auto` and `cuda` are this rank's GPU, with its index, and
    `auto` is the CPU if there is none.

    Raises:
        ConfigError: torch does not know the device, or it is not available; the text names it.
    """
    num_gpus = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda", local_rank) if num_gpus else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"model.device = {name!r} is not a device that torch knows ({error}); set "
            "model.device = 'auto'"
        ) from error
    if device.type == "cuda" and device.index is None:  # some functions of torch need an index
        device = torch.device("cuda", local_rank)
    if device.type == "cuda" and device.index >= num_gpus:
        build = "with CUDA" if torch.backends.cuda.is_built() else "without CUDA"
        raise ConfigError(
            f"model.device = {name!r} asks for a GPU that is not available: torch "
            f"{torch.__version__}, built {build}, sees {num_gpus} GPUs; give the process a GPU, or "
            "set model.device = 'auto'"
        )
    return device


def load_causal_lm(
    path: Path,
    *,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    loader: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Load a model in evaluation mode; nothing is downloaded.

    Args:
        path: A folder in Hugging Face layout.
        attention: Name of an attention implementation that transformers knows.
        dtype: Dtype of the weights.
        device: Device of the weights.
        loader: The auto class of transformers for the model's family.
    Raises:
        ConfigError: The folder is missing or holds no causal language model.
        DamagedTensors: A file of its weights is damaged; the text names it.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path = {path} holds no config.json; set it to a folder in Hugging Face "
            "layout, or create one with `relax models prepare`"
        )
    require_regular_files(path, key="model.path")
    read_layouts(path)
    transformers_logging.disable_progress_bar()  # a worker's stderr is its log
    try:
        model: Any = loader.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path = {path} can't be loaded as a causal language model: {error}"
        ) from error
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def attention_kinds(model: PreTrainedModel) -> set[str]:
    """Return the attention types of a model's layers, in transformers' terms; `full_attention`
    attends to all earlier tokens.
    """
    config = model.config.get_text_config()
    unnamed = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return set(getattr(config, "layer_types", None) or [unnamed])


def replace_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace a model's weights, by Hugging Face name; on an error all old ones stay.

    Raises:
        WeightsError: A tensor is missing, unknown or of another shape; the text names it.
    """
    current = dict(module.state_dict())
    parameters = dict(module.named_parameters())
    if unknown := sorted(tensors.keys() - current.keys()):
        raise WeightsError(
            f"the model has no tensor {unknown[0]} ({len(unknown)} unknown in all); publish "
            "weights of the model in model.path"
        )
    if missing := sorted(parameters.keys() - tensors.keys()):
        raise WeightsError(
            f"the weights lack {missing[0]} ({len(missing)} missing in all); publish weights "
            "of the model in model.path"
        )
    for name, tensor in tensors.items():
        if tensor.shape != current[name].shape:
            raise WeightsError(
                f"{name} must be {tuple(current[name].shape)} as in the model, got "
                f"{tuple(tensor.shape)}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            current[name].copy_(tensor)
