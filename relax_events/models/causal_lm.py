"""Load a causal language model and replace its weights; shared by engine, trainer and scorers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from relax_events.errors import ConfigError, WeightsError
from relax_events.model_folder.tensors import read_layouts
from relax_events.models.folder_weights import FolderWeights, describe_untied, require_finite
from relax_events.regular_files import require_regular_files

log = structlog.get_logger()
EXPERT = re.compile(r"(.+\.experts\.)(\d+)(\..+)")
MAX_NAMES = 4
"""Of missing tensors in an error."""
WEIGHT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Of a folder without quantization."""


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


def open_device(name: str, *, local_rank: int = 0) -> torch.device:
    """Choose a device, and make a GPU the current one of this thread: what takes no device of its
    own, as FSDP2, NCCL and kernels do, then takes this one and not GPU 0.

    Raises:
        ConfigError: See `choose_device`.
    """
    device = choose_device(name, local_rank=local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def load_causal_lm(
    path: Path,
    *,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    loader: Any = AutoModelForCausalLM,
    needs_head: bool = True,
) -> PreTrainedModel:
    """Load a model in evaluation mode; nothing is downloaded.

    Args:
        path: A folder in Hugging Face layout.
        attention: Name of an attention implementation that transformers knows.
        dtype: Dtype of the weights.
        device: Device of the weights.
        loader: The auto class of transformers for the model's family.
        needs_head: Whether the output head is used.
    Raises:
        ConfigError: The folder is missing, holds no causal language model, lacks a tensor of it, or
            a tensor is not what its config.json describes; the text names the tensor.
        DamagedTensors: A file of its weights is damaged; the text names it.
    """
    model = _load_whole(
        path, loader, needs_head=needs_head, dtype=dtype, attn_implementation=attention
    )
    loaded: PreTrainedModel = model.to(device).eval()
    for name, weight in loaded.named_parameters():
        if weight.dtype.itemsize > 1:
            require_finite(path, name, weight)
    return loaded


def build_causal_lm(
    path: Path,
    *,
    attention: str,
    dtype: torch.dtype,
    loader: Any = AutoModelForCausalLM,
    needs_head: bool = True,
) -> tuple[PreTrainedModel, FolderWeights | None]:
    """Build a model in evaluation mode without memory for its weights, on device `meta`; return it
    and what fills it. One that is quantized, or stored in a way that can't be read by tensor, is
    loaded into the host's memory, and nothing fills it.

    Args:
        path: A folder in Hugging Face layout.
        attention: Name of an attention implementation that transformers knows.
        dtype: Dtype of the weights.
        loader: The auto class of transformers for the model's family.
        needs_head: Whether the output head is used.
    Raises:
        ConfigError, DamagedTensors: As `load_causal_lm`.
    """
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    model = _load_whole(path, loader, needs_head=needs_head, device_map="meta", **settings)
    unused = () if needs_head else _list_head_names(model)
    if getattr(model.config, "quantization_config", None) is None:
        weights = FolderWeights(path, model, unused=unused)
        if not weights.unreadable:
            return model.eval(), weights
        log.warning("model.loaded_whole", path=str(path), tensor=weights.unreadable[0])
    host = torch.device("cpu")
    whole = load_causal_lm(
        path, attention=attention, dtype=dtype, device=host, loader=loader, needs_head=needs_head
    )
    return whole, None


def require_all_tensors(path: Path, *, loader: Any, needs_head: bool = True) -> Any:
    """Return the model of a folder that holds every tensor of it, by the headers of its files, on
    device meta; no memory is needed for the weights.

    Raises:
        ConfigError, DamagedTensors: As `load_causal_lm`.
    """
    return _load_whole(path, loader, needs_head=needs_head, device_map="meta")


def _load_whole(path: Path, loader: Any, *, needs_head: bool, **settings: Any) -> Any:
    """Load a model, and refuse tensors of transformers' own making: it fills those with random
    values that the folder lacks, in each process with others.
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
        model, report = loader.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **settings,
        )
    except (OSError, ValueError, RuntimeError) as error:
        lacking = [f"; it lacks {name}" for name in _list_absent_experts(read_layouts(path))[:1]]
        raise ConfigError(
            f"model.path = {path} can't be loaded as a causal language model: {error}"
            f"{''.join(lacking)}"
        ) from error
    unused = () if needs_head else _list_head_names(model)
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, shape = mismatched[0]
        raise ConfigError(
            f"model.path = {path} holds {name} as {list(stored)}, and its config.json describes "
            f"{list(shape)}; use the folder as it was published"
        )
    if missing := sorted(set(report["missing_keys"]) - set(unused)):
        names = ", ".join(missing[:MAX_NAMES]) + (", ..." if len(missing) > MAX_NAMES else "")
        raise ConfigError(
            f"model.path = {path} lacks {len(missing)} of the tensors that its config.json "
            f"describes: {names}; use the folder as it was published, with tie_word_embeddings = "
            "true in config.json where the output head is the embedding"
        )
    _require_described_weights(path, model)
    return model


def _require_described_weights(path: Path, model: PreTrainedModel) -> None:
    """Refuse tensors that the folder's config.json describes otherwise.

    Raises:
        ConfigError: Weights are integers without a quantization, or are tied and differ.
    """
    layouts = read_layouts(path)
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    for name, _ in () if is_quantized else model.named_parameters():
        if name in layouts and layouts[name].dtype not in WEIGHT_DTYPES:
            raise ConfigError(
                f"model.path = {path} holds {name} as {layouts[name]}, and its config.json has no "
                "quantization_config; use the folder as it was published, or one with weights of "
                "bfloat16"
            )
    described = model.get_expanded_tied_weights_keys(all_submodels=True)
    tied = {frozenset(pair) for pair in model.all_tied_weights_keys.items()}
    for pair in described.items() if model.device.type != "meta" else ():  # needs their values
        if frozenset(pair) not in tied:
            raise ConfigError(describe_untied(path, *pair))


def _list_absent_experts(names: Iterable[str]) -> list[str]:
    """Return the experts' tensors that some layers of a folder have and others lack; transformers
    joins the experts of a layer, and names none of them.
    """
    numbers: dict[tuple[str, str], set[str]] = {}
    for name in names:
        if match := EXPERT.fullmatch(name):
            numbers.setdefault((match[1], match[3]), set()).add(match[2])
    present = set[str]().union(*numbers.values())
    return sorted(
        f"{layer}{number}{tensor}"
        for (layer, tensor), layer_numbers in numbers.items()
        for number in present - layer_numbers
    )


def _list_head_names(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    prefixes = [f"{name}." for name, module in model.named_modules() if module is head]
    return [name for name in model.state_dict() if name.startswith(tuple(prefixes))]


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
