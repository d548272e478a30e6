"""Computes the activations of decoder layers again in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

KEPT_OPERATORS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001  # operators have no public names
    torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001  # operators have no public names
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001  # operators have no public names
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001  # operators have no public names
)
"""Attention, whose cost grows with the square of a sample's length while its result does not."""


Bind = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function that calls another in the state of now, whenever it is called."""


def recompute_layers(
    layers: nn.ModuleList, mode: str, *, bind: Bind = lambda forward: forward
) -> None:
    """Make layers compute their activations again.

    Args:
        layers: The decoder layers of a model; changed in place.
        mode: `none`; `whole`, which keeps a layer's input alone; or `selective`, which keeps the
            results of attention too.
        bind: Applied to a layer's computation in each forward pass, for the backward pass.
    """
    if mode == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _choose)
    for layer in layers:
        layer.forward = _recomputed(layer.forward, settings, bind)


def _recomputed(
    forward: Callable[..., Any], settings: dict[str, Any], bind: Bind
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(bind(forward), *args, **settings, **kwargs)

    return run


def _choose(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operator in KEPT_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
