"""Verify that a server holds the weights it was given: compare its checksums with our own.

A server reports a digest for each of its tensors, which concatenate those of a checkpoint: the
projections of attention, all experts of a layer, the vocabulary rounded up. In memory each is the
bytes of its parts in order, then zeros. The parts of a tensor are guessed from its name, and
confirmed with the weights that the server was started on: a guess with the server's digest is
right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from relax_events.weights.artifact_writer import raw_bytes

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
    """The checksums that a server must report for given weights."""

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
            dtype: Of the server's tensors.
        Returns:
            The inferred recipes, and the unverified names: server tensors that no recipe
            reproduces, and checkpoint tensors in none of them.
        """
        recipes: dict[str, TensorRecipe] = {}
        held = {name: digest for name, digest in checksums.items() if not NO_WEIGHTS.search(name)}
        for name, seen in held.items():
            fitting = (
                recipe
                for recipe in _candidates(name, tensors)
                if recipe.digest(tensors, dtype=dtype) == seen
            )
            if (recipe := next(fitting, None)) is not None:
                recipes[name] = recipe
        used = {part for recipe in recipes.values() for part in recipe.parts}
        return cls(recipes, dtype=dtype), sorted(
            (held.keys() - recipes.keys()) | (tensors.keys() - used)
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
        other + one.removeprefix(begin)
        for one in names
        for begin, other in PREFIXES.items()
        if one.startswith(begin)
    ]
    others = [
        (one.replace(here, there),)
        for one in names
        for here, there in TOWER_NAMES.items()
        if here in one
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
    for whole, parts in FUSED_PARTS.items():
        if f".{whole}." in name:
            return tuple(name.replace(whole, part) for part in parts)
    return (name,)
