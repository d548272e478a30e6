"""Let a server load the folders that the trainer reads. Imported only by SGLang's processes,
through `plugin`.

SGLang expects a complete Qwen3-Omni: with a talker, and the prefix `thinker.` on all names of the
thinker. This module adds both for folders that hold only the thinker, and for all policy versions,
whose names have no prefix. SGLang also expects the fused experts of Qwen3-VL as published;
transformers saves them transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeThinkerConfig

from relax_events.engines.sglang.checkpoint import (
    FUSED_EXPERTS,
    THINKER,
    folder_tensors,
    to_transformers_layout,
)

OMNI_CLASS = "Qwen3OmniMoeForConditionalGeneration"


def wrap_thinker_config(config: Any, *_: Any, **__: Any) -> Any:
    """Wrap the settings of a thinker in the settings of a complete model that uses only the
    thinker.
    """
    if not isinstance(config, Qwen3OmniMoeThinkerConfig):
        return config
    return Qwen3OmniMoeConfig(
        thinker_config=config.to_dict(),
        architectures=[OMNI_CLASS],
        dtype=config.dtype,
        enable_audio_output=False,
    )


def load_thinker(
    original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]]
) -> Any:
    """Load the thinker of a complete model, with or without its prefix."""
    hidden_size = model.thinker.config.hidden_size
    return original(
        model,
        (
            (THINKER + name, tensor)
            for name, tensor in folder_tensors(weights, hidden_size=hidden_size)
        ),
    )


def load_mixture(
    original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]]
) -> Any:
    """Load a mixture whose fused experts may have either layout."""
    return original(
        model,
        (
            (name, _to_published_layout(name, tensor, hidden_size=model.config.hidden_size))
            for name, tensor in weights
        ),
    )


def _to_published_layout(name: str, tensor: Tensor, *, hidden_size: int) -> Tensor:
    is_fused = FUSED_EXPERTS.match(name) is not None and tensor.ndim == 3
    return (
        to_transformers_layout(name, tensor, hidden_size=hidden_size).transpose(1, 2)
        if is_fused
        else tensor
    )


def set_deepstack_layers(_: None, model: Any, *__: Any, **___: Any) -> None:
    """Set the layers that get deepstack features from the vision tower's number of them; SGLang
    assumes three.
    """
    if hasattr(model, "model"):  # a server that runs only the towers has no layers
        model.model.deepstack_embed_to_decoder_layer = range(model.num_deepstack_embeddings)


def encode_audio_separately(
    original: Callable[..., Tensor], model: Any, items: list[Any]
) -> Tensor:
    """Encode each audio item separately: SGLang pads several to one length, and accepts only equal
    lengths.
    """
    return torch.cat([original(model, [item]).flatten(0, -2) for item in items])
