"""A checkpoint's state in files of this machine, read piece by piece whatever ranks wrote it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_events.errors import DamagedTensors, ObjectError
from relax_events.events.parts import ObjectRef
from relax_events.model_folder.tensors import RawTensor, StoredTensors
from relax_events.objects import ObjectStore
from relax_events.objects.download import download
from relax_events.training.backend.state import StateShard, cut

Shape = tuple[int, ...]


class MismatchedShards(ObjectError):
    """The shards don't have what their manifest lists."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece of a tensor in a checkpoint; `key` is its name in the shard's file."""

    key: str
    offset: Shape
    shape: Shape


def piece_key(name: str, offset: Shape) -> str:
    """Return the name of a tensor's piece in its file, which no other piece has."""
    return f"{name}@{','.join(map(str, offset))}"


def describe_piece(shard: StateShard) -> dict[str, Any]:
    """Return the manifest's entry of a piece."""
    return {
        "name": shard.name,
        "global_shape": list(shard.global_shape),
        "offset": list(shard.offset),
        "shape": list(shard.tensor.shape),
    }


class StoredState:
    """The state in a checkpoint; implements `StateSource`. Its files stay mapped, so memory holds
    what was read alone, and a deleted checkpoint stays readable.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifest: Mapping[str, Any],
        shards: Sequence[ObjectRef],
        *,
        folder: Path,
    ) -> None:
        """Copy the shards' files to this machine, and verify them.

        Args:
            store: The store that holds them.
            manifest: Of the checkpoint.
            shards: Its shards.
            folder: Takes the files; it may be deleted once this returns.
        Raises:
            ObjectError: A shard is missing or altered, or a tensor or a part of one is missing.
        """
        self.policy_version: int = manifest["policy_version"]
        tensors: dict[str, RawTensor] = {}
        for number, shard in enumerate(shards):
            path = download(store, shard, folder / f"checkpoint-{number:05d}.safetensors")
            try:
                tensors |= StoredTensors.from_files([path]).raw
            except DamagedTensors as error:
                raise ObjectError(f"shard {shard.uri} can't be used: {error}") from error
        self._files = StoredTensors(tensors)
        self._pieces: dict[str, list[StoredPiece]] = defaultdict(list)
        self._shapes: dict[str, Shape] = {}
        for entry in (entry for shard in manifest["shards"] for entry in shard.get("pieces", ())):
            self._add(entry)
        keys = {piece.key for pieces in self._pieces.values() for piece in pieces}
        whole = set(manifest["tensors"])
        if different := sorted((whole | keys) ^ self._files.layouts.keys()):
            raise MismatchedShards(f"{different[0]} is not in both manifest and shards")
        self._shapes |= {name: self._files.layouts[name].shape for name in whole}
        self._require_whole()

    def _add(self, entry: Mapping[str, Any]) -> None:
        name, offset = entry["name"], tuple(entry["offset"])
        self._shapes[name] = tuple(entry["global_shape"])
        self._pieces[name].append(
            StoredPiece(piece_key(name, offset), offset, tuple(entry["shape"]))
        )

    def _require_whole(self) -> None:
        """Require that the pieces of each tensor have all of its elements."""
        for name, pieces in self._pieces.items():
            held = sum(prod(piece.shape) for piece in pieces)
            if held != (num_elements := prod(self._shapes[name])):
                raise MismatchedShards(
                    f"{name} must have {num_elements} elements, its pieces have {held}"
                )

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each whole tensor."""
        return self._shapes

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, whole; for a small model."""
        return {name: self.read(name) for name in sorted(self._shapes)}

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor, named as torch does."""
        pieces = self._pieces.get(name)
        return self._files.layouts[pieces[0].key if pieces else name].dtype

    def read(self, name: str, *, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """Return a piece; see `StateSource`. A whole tensor of one rank is a view of its file."""
        if name not in self._pieces:
            return cut(self._files.read(name), offset=offset, shape=shape)
        offset, shape = offset or (0,) * len(self._shapes[name]), shape or self._shapes[name]
        target = torch.empty(shape, dtype=getattr(torch, self.dtype_name(name)))
        for piece in self._pieces[name]:
            first = tuple(max(*pair) for pair in zip(offset, piece.offset, strict=True))
            end = tuple(
                min(ours + length, theirs + size)
                for ours, length, theirs, size in zip(
                    offset, shape, piece.offset, piece.shape, strict=True
                )
            )
            common = tuple(last - at for at, last in zip(first, end, strict=True))
            if min(common, default=1) <= 0:
                continue
            inside = tuple(at - base for at, base in zip(first, piece.offset, strict=True))
            ours = tuple(at - base for at, base in zip(first, offset, strict=True))
            values = cut(self._files.read(piece.key), offset=inside, shape=common)
            cut(target, offset=ours, shape=common).copy_(values)
        return target
