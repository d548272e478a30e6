"""Lets a server read the folders that the trainer reads. Imported by SGLang's processes alone, by
way of `plugin`.

SGLang knows Qwen3-Omni as it is published whole: with a talker, and all names of the thinker
beginning with `thinker.`. Of a folder that holds the thinker alone, and of the versions of both,
whose names are the thinker's, it is told the rest here. It takes the fused experts of Qwen3-VL as
they are published alone; transformers saves others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeThinkerConfig

from relax_events.engines.sglang.checkpoint import FUSED_EXPERTS, THINKER, as_kept, folder_tensors

WHOLE_CLASS = "Qwen3OmniMoeForConditionalGeneration"


def whole(config: Any, *_: Any, **__: Any) -> Any:
    """Give the settings of a thinker as those of a model of which nothing else is used."""
    if not isinstance(config, Qwen3OmniMoeThinkerConfig):
        return config
    return Qwen3OmniMoeConfig(
        thinker_config=config.to_dict(),
        architectures=[WHOLE_CLASS],
        dtype=config.dtype,
        enable_audio_output=False,
    )


def load_thinker(
    original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]]
) -> Any:
    """Load the thinker of a whole model, whatever its names begin with."""
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
    """Load a mixture whose experts, where they are fused, lie in either order."""
    return original(
        model,
        (
            (name, _published(name, tensor, hidden_size=model.config.hidden_size))
            for name, tensor in weights
        ),
    )


def _published(name: str, tensor: Tensor, *, hidden_size: int) -> Tensor:
    is_fused = FUSED_EXPERTS.match(name) is not None and tensor.ndim == 3
    return as_kept(name, tensor, hidden_size=hidden_size).transpose(1, 2) if is_fused else tensor


def note_depth(_: None, model: Any, *__: Any, **___: Any) -> None:
    """Add what is seen behind as many layers as the vision tower gives something for, where SGLang
    counts on three.
    """
    if hasattr(model, "model"):  # a server of towers alone has no layers
        model.model.deepstack_embed_to_decoder_layer = range(model.num_deepstack_embeddings)


def heard_apart(original: Callable[..., Tensor], model: Any, items: list[Any]) -> Tensor:
    """Hear each sound by itself: SGLang pads several to one length, and takes no others than of one
    length.
    """
    return torch.cat([original(model, [item]).flatten(0, -2) for item in items])
