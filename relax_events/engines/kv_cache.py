"""The key-value cache of running samples: one row a sample, left-aligned, grown by need.

Rows lie dense from 0 on, so a decoding step reads one slice and no gather. Storage is `rows x tokens`, each doubled when
it overflows up to the configured bounds: it follows the longest running sample, not `max_context_tokens`, and starts
small again whenever no row is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

TOKEN_BLOCK = 64
"""Storage grows to multiples of this many tokens."""


class RowCache(Cache):
    """Keys and values of every layer, as transformers' attention asks for them."""

    def __init__(self, *, max_rows: int, max_tokens: int) -> None:
        super().__init__(layers=[])
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._rows: Tensor = torch.empty(0, dtype=torch.long)
        self._positions: Tensor = self._rows
        self._num_tokens = 0

    @property
    def num_bytes(self) -> int:
        """Storage taken at present."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers)

    def fill(self, rows: Sequence[int], prompts: DynamicCache, *, sources: Sequence[int], num_tokens: int) -> None:
        """Copy the first tokens of prefilled prompts into rows; several rows may copy the same prompt.

        Args:
            rows: Where to.
            prompts: What the prefill left.
            sources: Row in `prompts` for each of `rows`.
            num_tokens: The longest prompt; what lies behind a shorter one's end is masked until it is overwritten.
        """
        self._reserve(prompts, num_rows=max(rows) + 1, num_tokens=num_tokens)
        for (keys, values), (prompt_keys, prompt_values) in zip(self._layers, _stored(prompts), strict=True):
            target = torch.tensor(rows, device=keys.device)
            source = torch.tensor(sources, device=keys.device)
            keys[target, :, :num_tokens] = prompt_keys[source, :, :num_tokens]
            values[target, :, :num_tokens] = prompt_values[source, :, :num_tokens]

    def open_step(self, positions: Int[Tensor, " rows"], *, num_tokens: int) -> None:
        """Prepare a decoding step: the next `update` of each layer writes one token to each of the first rows.

        Args:
            positions: Where each row's token goes.
            num_tokens: How many tokens attention is shown; more than every position.
        """
        self._grow(num_rows=len(positions), num_tokens=num_tokens)
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions, self._num_tokens = positions, num_tokens

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the step's tokens and show attention the rows so far."""
        keys, values = self._layers[layer_idx]
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        num_rows = len(self._rows)
        return keys[:num_rows, :, : self._num_tokens], values[:num_rows, :, : self._num_tokens]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Give 0: rows differ in length, and their positions travel with the step."""
        return 0

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int], *, num_tokens: int) -> None:
        """Copy rows onto others that were left."""
        for layer in self._layers:
            for stored in layer:
                stored[list(targets), :, :num_tokens] = stored[list(sources), :, :num_tokens]

    def clear(self, rows: Sequence[int]) -> None:
        """Zero rows that may hold NaN, which no mask hides from the next tenant: zero times NaN is NaN."""
        for layer in self._layers:
            for stored in layer:
                stored[list(rows)] = 0.0

    def release(self) -> None:
        """Free the storage."""
        self._layers.clear()

    def _reserve(self, prompts: DynamicCache, *, num_rows: int, num_tokens: int) -> None:
        if not self._layers:
            self._layers = [(keys[:0, :, :0].contiguous(), values[:0, :, :0].contiguous()) for keys, values in _stored(prompts)]
        self._grow(num_rows=num_rows, num_tokens=num_tokens)

    def _grow(self, *, num_rows: int, num_tokens: int) -> None:
        have_rows, _, have_tokens, _ = self._layers[0][0].shape
        rows = have_rows if num_rows <= have_rows else min(max(num_rows, 2 * have_rows), self._max_rows)
        blocks = -(-max(num_tokens, 2 * have_tokens) // TOKEN_BLOCK)
        tokens = have_tokens if num_tokens <= have_tokens else min(blocks * TOKEN_BLOCK, self._max_tokens)
        if (rows, tokens) != (have_rows, have_tokens):
            for index, (keys, values) in enumerate(self._layers):  # one layer at a time: the old storage goes as the new comes
                self._layers[index] = (_enlarged(keys, rows, tokens), _enlarged(values, rows, tokens))


def _stored(prompts: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    layers: list[Any] = prompts.layers
    return [(layer.keys, layer.values) for layer in layers]


def _enlarged(stored: Float[Tensor, "rows heads tokens width"], rows: int, tokens: int) -> Float[Tensor, "_ _ _ _"]:
    # Zeros, not what the memory held: that might be NaN, see `clear`.
    larger = stored.new_zeros(rows, stored.shape[1], tokens, stored.shape[3])
    larger[: stored.shape[0], :, : stored.shape[2]] = stored
    return larger
