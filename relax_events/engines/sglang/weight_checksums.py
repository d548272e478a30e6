"""Proof that a server holds the weights it was given: its checksums beside those that we compute of
the same weights.

A server names a digest for each of its tensors, which are a checkpoint's put together: the
projections of attention side by side, all experts of a layer in one, the vocabulary rounded up. In
memory each is the parts' bytes one behind the other, and zeros. Which parts a tensor is made of is
guessed from its name, and proven with the weights that the server was started on: a guess whose
digest is the server's is right.
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
"""A server on a CPU gives so many hexadecimal digits of a tensor's SHA-256."""
VOCABULARY_BLOCK = 64
"""A server rounds the rows of its vocabulary up to a multiple of this."""
FUSED_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
BEGINNINGS = {"model.": "model.language_model.", "visual.": "model.visual.", "thinker.": ""}
"""What a server calls otherwise of a model that has towers."""
OTHER_NAMES = {".attn.qkv_proj.": ".attn.qkv.", ".self_attn.proj.": ".self_attn.out_proj."}
"""Within the towers."""
NO_WEIGHTS = re.compile(r"\.rotary_emb\.|\.positional_embedding\.")
"""In the names of a server's tensors that follow from the model's settings."""
EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A server's tensor: a checkpoint's tensors one behind the other, then zeros."""

    parts: tuple[str, ...]
    num_zero_rows: int = 0

    def digest(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> str:
        """Compute the checksum that a server gives of the tensor."""
        digest = sha256()
        for name in self.parts:
            tensor = tensors[name].to(dtype)
            digest.update(raw_bytes(tensor))
            digest.update(bytes(self.num_zero_rows * tensor[0].nbytes))
        return digest.hexdigest()[:NUM_DIGITS]


class Fingerprints:
    """What a server's checksums have to be for given weights."""

    def __init__(self, recipes: Mapping[str, Recipe], *, dtype: torch.dtype) -> None:
        self._recipes, self._dtype = recipes, dtype

    @classmethod
    def learnt(
        cls, checksums: Mapping[str, str], tensors: Mapping[str, Tensor], *, dtype: torch.dtype
    ) -> tuple[Fingerprints, list[str]]:
        """Find out how a server puts its tensors together.

        Args:
            checksums: The server's, by its own names.
            tensors: The checkpoint that it holds.
            dtype: In which it keeps them.
        Returns:
            What it knows, and what stays unproven: tensors of the server whose checksum no recipe
                gives, and tensors of the
            checkpoint that are in none of the server's.
        """
        recipes: dict[str, Recipe] = {}
        held = {name: digest for name, digest in checksums.items() if not NO_WEIGHTS.search(name)}
        for name, seen in held.items():
            fitting = (
                recipe
                for recipe in _guesses(name, tensors)
                if recipe.digest(tensors, dtype=dtype) == seen
            )
            if (recipe := next(fitting, None)) is not None:
                recipes[name] = recipe
        used = {part for recipe in recipes.values() for part in recipe.parts}
        return cls(recipes, dtype=dtype), sorted(
            (held.keys() - recipes.keys()) | (tensors.keys() - used)
        )

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Give the checksums of a server that holds these weights, by the server's names."""
        return {
            name: recipe.digest(tensors, dtype=self._dtype)
            for name, recipe in self._recipes.items()
        }


def _guesses(name: str, tensors: Mapping[str, Tensor]) -> Iterator[Recipe]:
    """Give what a server's tensor could be made of, by its name."""
    names = [name, "model.embed_tokens.weight"] if name == "lm_head.weight" else [name]
    names += [
        other + one.removeprefix(begin)
        for one in names
        for begin, other in BEGINNINGS.items()
        if one.startswith(begin)
    ]
    others = [
        (one.replace(here, there),)
        for one in names
        for here, there in OTHER_NAMES.items()
        if here in one
    ]
    for parts in [_parts(one, tensors) for one in names] + others:
        if parts and all(part in tensors for part in parts):
            yield Recipe(parts)
            if len(parts) == 1 and (num_zero_rows := -len(tensors[parts[0]]) % VOCABULARY_BLOCK):
                yield Recipe(parts, num_zero_rows)


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
