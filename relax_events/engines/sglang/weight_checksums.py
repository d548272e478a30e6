"""Verify that a server has loaded the right weights: compare its checksums with expected ones.

A server reports a digest of each of its tensors, and hashes those on a GPU differently. Each is a
concatenation of checkpoint tensors (projections of attention, all experts of a layer, the padded
vocabulary), followed by zeros. Of several ranks each has a part: whole tensors, or a slice of rows
or columns. The parts of a tensor are guessed from its name. A guess is confirmed if it reproduces
the server's digest of the weights that it was started on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256

import torch
from torch import Tensor

from relax_events.engines.sglang.gpu_digest import GpuDigest
from relax_events.weights.tensor_files import raw_bytes

NUM_DIGITS = 16
"""A server reports this many hexadecimal digits of the SHA-256 of a tensor on a CPU."""
BLOCK_BYTES = 1 << 24
"""Bytes of a tensor that are converted to the server's dtype at a time, as whole rows."""
MAX_THREADS = 8
"""Tensors that are hashed at a time."""
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
class Part:
    """A checkpoint tensor, or a slice of it.

    Attributes:
        name: Of the tensor.
        dim: Of the slice: 0 for rows, 1 for columns.
        start: Its first row or column.
        length: Its number of rows or columns; None for the whole tensor.
    """

    name: str
    dim: int = 0
    start: int = 0
    length: int | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the slice."""
        whole = tensors[self.name]
        return whole if self.length is None else whole.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True, slots=True)
class TensorRecipe:
    """A server's tensor: checkpoint tensors or slices of them concatenated, then zeros."""

    parts: tuple[Part, ...]
    num_zero_rows: int = 0
    is_on_gpu: bool = False

    def digest(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> str:
        """Compute the checksum that a server reports for the tensor."""
        digest = GpuDigest() if self.is_on_gpu else sha256()
        for part in self.parts:
            for rows in _split_rows(part.take(tensors)):
                digest.update(raw_bytes(rows.to(dtype)))
            if self.num_zero_rows:
                row = tensors[part.name][0].to(dtype)
                digest.update(bytes(self.num_zero_rows * row.nbytes))
        return digest.hexdigest()[:NUM_DIGITS]


@dataclass(slots=True)
class RecipeSearch:
    """Searches the recipes of a server's tensors; used by several threads.

    Attributes:
        tensors: The checkpoint that the server holds.
        dtype: Dtype of the server's tensors.
        num_ranks: Of the server.
        is_on_gpu: Where the last explained tensor lies; the others are probably there too.
    """

    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    num_ranks: int
    is_on_gpu: bool = False

    def find(self, name: str, digest: str) -> TensorRecipe | None:
        """Return the recipe that reproduces a digest of the server; None if there is none."""
        rank, own_name = _split_name(name)
        for is_on_gpu in (self.is_on_gpu, not self.is_on_gpu):
            for whole in _candidates(own_name, self.tensors):
                for recipe in _of_rank(whole, self.tensors, rank=rank, num_ranks=self.num_ranks):
                    placed = replace(recipe, is_on_gpu=is_on_gpu)
                    if placed.digest(self.tensors, dtype=self.dtype) == digest:
                        self.is_on_gpu = is_on_gpu
                        return placed
        return None


class WeightChecksums:
    """Computes the checksums that a server must report for its weights."""

    def __init__(self, recipes: Mapping[str, TensorRecipe], *, dtype: torch.dtype) -> None:
        self._recipes, self._dtype = recipes, dtype

    @property
    def names(self) -> Collection[str]:
        """The server's names of the tensors whose checksums can be computed."""
        return self._recipes.keys()

    @classmethod
    def infer(
        cls,
        checksums: Sequence[Mapping[str, str]],
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
    ) -> tuple[WeightChecksums, list[str]]:
        """Infer how a server concatenates its tensors.

        Args:
            checksums: Of each rank of the server, by its own names.
            tensors: The checkpoint that it holds.
            dtype: Dtype of the server's tensors.
        Returns:
            The inferred recipes, and the unverified names: server tensors that no recipe
            reproduces, and checkpoint tensors in none of them.
        """
        named = name_by_rank(checksums)
        weights = {name: value for name, value in named.items() if not NO_WEIGHTS.search(name)}
        search = RecipeSearch(tensors, dtype, len(checksums))
        with _open_pool() as pool:
            matches = pool.map(search.find, weights, weights.values())
            recipes = {name: one for name, one in zip(weights, matches, strict=True) if one}
        used = {part.name for recipe in recipes.values() for part in recipe.parts}
        return cls(recipes, dtype=dtype), sorted(
            (weights.keys() - recipes.keys()) | (tensors.keys() - used)
        )

    def compute(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the checksums of a server that holds these weights, by the server's names."""
        with _open_pool() as pool:
            digests = pool.map(
                lambda recipe: recipe.digest(tensors, dtype=self._dtype), self._recipes.values()
            )
            return dict(zip(self._recipes, digests, strict=True))


def _open_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))))


def _split_rows(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in blocks of whole rows."""
    rows = torch.atleast_1d(tensor)
    row_bytes = rows[:1].nbytes
    yield from rows.split(max(1, BLOCK_BYTES // max(1, row_bytes)))


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
            whole = tuple(map(Part, parts))
            yield TensorRecipe(whole)
            if len(parts) == 1 and (num_zero_rows := -len(tensors[parts[0]]) % VOCABULARY_BLOCK):
                yield TensorRecipe(whole, num_zero_rows)


def _parts(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    if match := re.match(r"(.+\.experts)\.(w13_weight|w2_weight)$", name):
        experts = sorted(
            {
                int(number[1])
                for one in tensors
                if (number := re.match(re.escape(match[1]) + r"\.(\d+)\.", one))
            }
        )
        return tuple(
            f"{match[1]}.{expert}.{part}.weight"
            for expert in experts
            for part in EXPERT_PARTS[match[2]]
        )
    for fused, parts in FUSED_PARTS.items():
        if f".{fused}." in name:
            return tuple(name.replace(fused, part) for part in parts)
    return (name,)


def name_by_rank(checksums: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the digests of all ranks by one name each: with several ranks `rank/name`."""
    if len(checksums) == 1:
        return dict(checksums[0])
    return {
        f"{rank}/{name}": digest
        for rank, of_rank in enumerate(checksums)
        for name, digest in of_rank.items()
    }


def _split_name(name: str) -> tuple[int, str]:
    rank, slash, own_name = name.partition("/")
    return (int(rank), own_name) if slash and rank.isdigit() else (0, name)


def _of_rank(
    whole: TensorRecipe, tensors: Mapping[str, Tensor], *, rank: int, num_ranks: int
) -> Iterator[TensorRecipe]:
    """Yield what a rank may hold of a tensor: all of it, or its slice of rows or columns."""
    names = [part.name for part in whole.parts]
    if num_ranks > 1 and ".experts." in names[0]:
        yield from _experts_of_rank(names, tensors, rank=rank, num_ranks=num_ranks)
    if num_ranks == 1 or not whole.num_zero_rows:
        yield whole
    if num_ranks == 1 or ".experts." in names[0]:
        return
    if whole.num_zero_rows or len(names) == 1:
        rows = len(tensors[names[0]]) + whole.num_zero_rows
        if rows % num_ranks == 0:
            yield _rows_of_rank(names[0], tensors, rank=rank, num_rows=rows // num_ranks)
    if ".qkv." in names[0] and len(tensors[names[0]]) % (3 * num_ranks) == 0:
        yield _thirds_of_rank(names[0], tensors, rank=rank, num_ranks=num_ranks)
    for dim in (0, 1):
        for num_slices in _divisors(num_ranks):
            # of attention with fewer heads for keys and values than ranks, several have the same
            first = _slice(names[0], tensors, dim=dim, index=rank, count=num_ranks)
            others = [
                _slice(
                    name, tensors, dim=dim, index=rank * num_slices // num_ranks, count=num_slices
                )
                for name in names[1:]
            ]
            parts = [part for part in (first, *others) if part is not None]
            if len(parts) == len(names):
                yield TensorRecipe(tuple(parts))
            if len(names) == 1:
                break


def _rows_of_rank(
    name: str, tensors: Mapping[str, Tensor], *, rank: int, num_rows: int
) -> TensorRecipe:
    """Return a rank's rows of a tensor that zeros pad to a multiple of the ranks."""
    start = min(rank * num_rows, len(tensors[name]))
    length = min(num_rows, len(tensors[name]) - start)
    return TensorRecipe((Part(name, 0, start, length),), num_rows - length)


def _thirds_of_rank(
    name: str, tensors: Mapping[str, Tensor], *, rank: int, num_ranks: int
) -> TensorRecipe:
    """Return a rank's queries, keys and values of a checkpoint tensor with those of all heads."""
    third = len(tensors[name]) // 3
    length = third // num_ranks
    return TensorRecipe(
        tuple(Part(name, 0, index * third + rank * length, length) for index in range(3))
    )


def _experts_of_rank(
    names: Sequence[str], tensors: Mapping[str, Tensor], *, rank: int, num_ranks: int
) -> Iterator[TensorRecipe]:
    """Yield what a rank may hold of a layer's experts, whose tensors have these names: a group of
    them, and of each its slice.
    """
    num_experts = len({name.rsplit(".", 2)[0] for name in names})
    for num_groups in _divisors(num_ranks):
        if num_experts % num_groups == 0:
            num_slices, num_names = num_ranks // num_groups, len(names) // num_groups
            start = rank // num_slices * num_names
            group = names[start : start + num_names]
            for dim in (0, 1) if num_slices > 1 else (0,):
                parts = [
                    _slice(name, tensors, dim=dim, index=rank % num_slices, count=num_slices)
                    for name in group
                ]
                if all(parts):
                    yield TensorRecipe(tuple(part for part in parts if part is not None))


def _slice(
    name: str, tensors: Mapping[str, Tensor], *, dim: int, index: int, count: int
) -> Part | None:
    """Return one of so many equal slices of a tensor; None where it can't be divided so."""
    shape = tensors[name].shape
    if dim >= len(shape) or shape[dim] % count:
        return None
    length = shape[dim] // count
    return Part(name, dim, index * length, length)


def _divisors(number: int) -> list[int]:
    return [one for one in range(number, 0, -1) if number % one == 0]
