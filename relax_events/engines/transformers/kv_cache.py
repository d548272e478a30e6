"""The key-value cache of running samples: one row per sample, left-aligned, grown as needed.

For layers with full attention it holds keys and values of every token, for those with linear
attention a state that each token updates.

Rows are dense from 0 on, so a decoding step reads one slice without a gather. Storage is `rows x
tokens`; each dimension doubles when it overflows, up to the configured bounds. So it follows the
longest running sample, not `max_context_tokens`. When no row is in use, large storage is freed, and
starts small again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

TOKEN_BLOCK = 64
"""Storage grows to multiples of this many tokens."""
KEPT_BYTES = 2**26
"""Storage of up to this size is kept while no row is in use."""


@dataclass(slots=True)
class LayerState:
    """Two tensors of a layer, one row per sample: keys and values, or if `is_state` the states of
    convolution and recurrence.
    """

    tensors: tuple[Tensor, Tensor]
    is_state: bool

    def first_tokens(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the tensors' first tokens; a state is returned whole."""
        if self.is_state:
            return self.tensors
        keys, values = self.tensors
        return keys[:, :, :num_tokens], values[:, :, :num_tokens]


@dataclass(frozen=True, slots=True)
class DecodingLayer:
    """A layer's state as transformers' linear attention reads it while decoding; empty for full
    attention.
    """

    conv_states: tuple[Tensor, ...] = ()
    recurrent_states: tuple[Tensor, ...] = ()
    record_past: bool = False


class RowCache(Cache):
    """Keys and values, or states, of every layer, behind transformers' `Cache` interface."""

    def __init__(self, *, max_rows: int, max_tokens: int) -> None:
        super().__init__(layers=[])
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._layers: list[LayerState] = []
        self._rows: Tensor = torch.empty(0, dtype=torch.long)
        self._positions: Tensor = self._rows
        self._num_tokens = 0

    @property
    def num_bytes(self) -> int:
        """Storage in use."""
        return sum(tensor.nbytes for layer in self._layers for tensor in layer.tensors)

    def fill(
        self, rows: range, prompts: DynamicCache, *, sources: Sequence[int], num_tokens: int
    ) -> None:
        """Copy the first tokens of prefilled prompts into rows; several rows may copy the same
        prompt.

        Args:
            rows: The target rows, one after another.
            prompts: The cache of the prefill.
            sources: Row in `prompts` for each of `rows`.
            num_tokens: Length of the longest prompt. The padding of a shorter one is masked until
                it is overwritten.
        """
        self._reserve(prompts, num_rows=rows.stop, num_tokens=num_tokens)
        source = torch.tensor(sources, device=self._layers[0].tensors[0].device)
        for layer, prefilled in zip(self._layers, _layer_states(prompts), strict=True):
            for stored, prompt in zip(
                layer.first_tokens(num_tokens), prefilled.first_tokens(num_tokens), strict=True
            ):
                stored[rows.start : rows.stop] = prompt[source]

    def begin_step(self, positions: Int[Tensor, " rows"], *, num_tokens: int) -> None:
        """Prepare a decoding step: the next `update` of each layer writes one token to each of the
        first rows.

        Args:
            positions: Index of each row's token.
            num_tokens: Attention length; more than every position.
        """
        self._grow(num_rows=len(positions), num_tokens=num_tokens)
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions, self._num_tokens = positions, num_tokens
        if any(layer.is_state for layer in self._layers):
            self.layers = [self._decoding_layer(layer) for layer in self._layers]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the step's tokens and return the rows so far for attention."""
        keys, values = self._layers[layer_idx].tensors
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        num_rows = len(self._rows)
        return keys[:num_rows, :, : self._num_tokens], values[:num_rows, :, : self._num_tokens]

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return True: linear attention continues from prefilled rows."""
        return True

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Tensor:
        """Store the states after the step's tokens; the convolution's state was written in
        place.
        """
        layer: Any = self.layers[layer_idx]
        stored: Tensor = layer.recurrent_states[0].copy_(recurrent_states)
        return stored

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: rows differ in length, and positions are passed with each step."""
        return 0

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int], *, num_tokens: int) -> None:
        """Copy rows to free rows."""
        for layer in self._layers:
            for stored in layer.first_tokens(num_tokens):
                stored[list(targets)] = stored[list(sources)]

    def clear(self, rows: Sequence[int]) -> None:
        """Zero rows that may hold NaN, which no mask hides from the row's next sample: zero times
        NaN is NaN.
        """
        for layer in self._layers:
            for stored in layer.tensors:
                stored[list(rows)] = 0.0

    def release_large(self) -> None:
        """Free the storage unless it is small: to allocate and zero a small one again for each
        batch takes a tenth of the time of generating short samples.
        """
        if self.num_bytes > KEPT_BYTES:
            self.release()

    def release(self) -> None:
        """Free the storage."""
        self._layers.clear()

    def _decoding_layer(self, layer: LayerState) -> Any:
        convolution, recurrence = (tensor[: len(self._rows)] for tensor in layer.tensors)
        return DecodingLayer((convolution,), (recurrence,)) if layer.is_state else DecodingLayer()

    def _reserve(self, prompts: DynamicCache, *, num_rows: int, num_tokens: int) -> None:
        if not self._layers:
            for prefilled in _layer_states(prompts):
                first, second = prefilled.first_tokens(0)
                self._layers.append(
                    LayerState(
                        (first[:0].contiguous(), second[:0].contiguous()), prefilled.is_state
                    )
                )
        self._grow(num_rows=num_rows, num_tokens=num_tokens)

    def _grow(self, *, num_rows: int, num_tokens: int) -> None:
        old_rows = len(self._layers[0].tensors[0])
        old_tokens = next(
            (layer.tensors[0].shape[2] for layer in self._layers if not layer.is_state), num_tokens
        )
        rows = (
            old_rows if num_rows <= old_rows else min(max(num_rows, 2 * old_rows), self._max_rows)
        )
        blocks = -(-max(num_tokens, 2 * old_tokens) // TOKEN_BLOCK)
        tokens = (
            old_tokens if num_tokens <= old_tokens else min(blocks * TOKEN_BLOCK, self._max_tokens)
        )
        if (rows, tokens) != (old_rows, old_tokens):
            for (
                layer
            ) in self._layers:  # one at a time: the old storage is freed as the new is allocated
                first, second = layer.tensors
                length = None if layer.is_state else tokens
                layer.tensors = _enlarge(first, rows, length), _enlarge(second, rows, length)


def _layer_states(prompts: DynamicCache) -> list[LayerState]:
    layers: list[Any] = prompts.layers
    return [
        LayerState((layer.conv_states[0], layer.recurrent_states[0]), is_state=True)
        if hasattr(layer, "recurrent_states")
        else LayerState((layer.keys, layer.values), is_state=False)
        for layer in layers
    ]


def _enlarge(
    stored: Float[Tensor, "rows heads *_"], rows: int, tokens: int | None
) -> Float[Tensor, "_ _ *_"]:
    # Zeros, because uninitialised memory may contain NaN; see `clear`.
    larger = (
        stored.new_zeros(rows, *stored.shape[1:])
        if tokens is None
        else stored.new_zeros(rows, stored.shape[1], tokens, stored.shape[3])
    )
    larger[tuple(map(slice, stored.shape))] = stored
    return larger
