"""Verify that a server has loaded the right weights: compare its checksums with expected ones.

A server reports a digest of each of its tensors. Each is a concatenation of checkpoint tensors (the
projections of attention, all experts of a layer, the padded vocabulary), followed by zeros. The
parts of a tensor are guessed from its name. A guess is confirmed if it reproduces the server's
digest of the weights that it was started on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from relax_events.weights.tensor_files import raw_bytes

NUM_DIGITS = 16
"""A server reports this many hexadecimal digits of a tensor's SHA-256."""
VOCABULARY_BLOCK = 64
"""A server pads the rows of its vocabulary to a multiple of this."""
FUSED_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PREFIXES = {"model.": "model.language_model.", "visual.": "model.visual.", "thinker.": ""}
"""Name prefixes of a model with towers: the server's, and the checkpoint's."""
TOWER_NAMES = {".attn.qkv_proj.": ".attn.qkv.", ".self_attn.proj.": ".self_attn.out_proj."}
"""Other name differences within the towers."""
NO_WEIGHTS = re.compile(r"\.rotary_emb\.|\.positional_embedding\.")
"""Names of a server's tensors that are computed from the model's settings."""
EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class TensorRecipe:
    """A server's tensor: checkpoint tensors concatenated, then zeros."""

    parts: tuple[str, ...]
    num_zero_rows: int = 0

    def digest(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> str:
        """Compute the checksum that a server reports for the tensor."""
        digest = sha256()
        for name in self.parts:
            tensor = tensors[name].to(dtype)
            digest.update(raw_bytes(tensor))
            digest.update(bytes(self.num_zero_rows * tensor[0].nbytes))
        return digest.hexdigest()[:NUM_DIGITS]


class WeightChecksums:
    """Computes the checksums that a server must report for its weights."""

    def __init__(self, recipes: Mapping[str, TensorRecipe], *, dtype: torch.dtype) -> None:
        self._recipes, self._dtype = recipes, dtype

    @classmethod
    def infer(
        cls, checksums: Mapping[str, str], tensors: Mapping[str, Tensor], *, dtype: torch.dtype
    ) -> tuple[WeightChecksums, list[str]]:
        """Infer how a server concatenates its tensors.

        Args:
            checksums: The server's, by its own names.
            tensors: The checkpoint that it holds.
            dtype: Dtype of the server's tensors.
        Returns:
            The inferred recipes, and the unverified names: server tensors that no recipe
            reproduces, and checkpoint tensors in none of them.
        """
        recipes: dict[str, TensorRecipe] = {}
        weights = {name: value for name, value in checksums.items() if not NO_WEIGHTS.search(name)}
        for name, digest in weights.items():
            matching = (
                recipe
                for recipe in _candidates(name, tensors)
                if recipe.digest(tensors, dtype=dtype) == digest
            )
            if (recipe := next(matching, None)) is not None:
                recipes[name] = recipe
        used = {part for recipe in recipes.values() for part in recipe.parts}
        return cls(recipes, dtype=dtype), sorted(
            (weights.keys() - recipes.keys()) | (tensors.keys() - used)
        )

    def compute(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the checksums of a server that holds these weights, by the server's names."""
        return {
            name: recipe.digest(tensors, dtype=self._dtype)
            for name, recipe in self._recipes.items()
        }


def _candidates(name: str, tensors: Mapping[str, Tensor]) -> Iterator[TensorRecipe]:
    """Yield the possible recipes of a server's tensor, by its name."""
    names = [name, "model.embed_tokens.weight"] if name == "lm_head.weight" else [name]
    names += [
        checkpoint_prefix + one.removeprefix(server_prefix)
        for one in names
        for server_prefix, checkpoint_prefix in PREFIXES.items()
        if one.startswith(server_prefix)
    ]
    others = [
        (one.replace(server_part, checkpoint_part),)
        for one in names
        for server_part, checkpoint_part in TOWER_NAMES.items()
        if server_part in one
    ]
    for parts in [_parts(one, tensors) for one in names] + others:
        if parts and all(part in tensors for part in parts):
            yield TensorRecipe(parts)
            if len(parts) == 1 and (num_zero_rows := -len(tensors[parts[0]]) % VOCABULARY_BLOCK):
                yield TensorRecipe(parts, num_zero_rows)


def _parts(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    if found := re.match(r"(.+\.experts)\.(w13_weight|w2_weight)$", name):
        experts = sorted(
            {
                int(number[1])
                for one in tensors
                if (number := re.match(re.escape(found[1]) + r"\.(\d+)\.", one))
            }
        )
        return tuple(
            f"{found[1]}.{expert}.{part}.weight"
            for expert in experts
            for part in EXPERT_PARTS[found[2]]
        )
    for fused, parts in FUSED_PARTS.items():
        if f".{fused}." in name:
            return tuple(name.replace(fused, part) for part in parts)
    return (name,)
