"""Reads and verifies weight artifacts without torch, so that a worker whose engine loads no tensors
imports none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, deserialize

from relax_events.errors import ObjectError, WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.objects import ObjectStore
from relax_events.weights.delta import POSITIONS, VALUES, apply_delta
from relax_events.weights.manifest import TensorEntry, WeightManifest, Weights, tensor_header

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
"""Names of dtypes in safetensors files, and torch's."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as stored in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray


class RawTensors(Mapping[str, "Tensor"]):
    """Tensors by name, each created on access over the bytes that were read, without a copy."""

    def __init__(self, raw: Mapping[str, RawTensor]) -> None:
        self.raw = raw

    def __getitem__(self, name: str) -> Tensor:
        import torch

        raw = self.raw[name]
        dtype = getattr(torch, raw.dtype)
        return (
            torch.frombuffer(raw.data, dtype=dtype).reshape(raw.shape)
            if raw.data
            else torch.empty(raw.shape, dtype=dtype)
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


@dataclass(frozen=True, slots=True)
class CachedWeights:
    """A version that was read earlier and has not been modified."""

    digest: bytes
    tensors: RawTensors


def read_weights(
    store: ObjectStore, reference: ObjectRef, *, cached: CachedWeights | None = None
) -> Weights:
    """Read an artifact, and hand out its tensors only when every digest, name, dtype and shape
    agrees.

    Args:
        store: The store that holds it.
        reference: Of the manifest.
        cached: An artifact that holds the changes to these is read on top of them; else what it is
            based on is read as well.
    Raises:
        WeightsError: An object is missing, unreadable or altered, or does not hold what the
            manifest says; the text names it.
    """
    try:
        chain = read_chain(store, reference, cached)
        tensors: Mapping[str, RawTensor] = (
            cached.tensors.raw if cached is not None and chain[0].base is not None else {}
        )
        for manifest in chain:
            tensors = _read_files(store, manifest, tensors)
    except (ObjectError, WeightsError, SafetensorError) as error:
        raise WeightsError(f"weights {reference.uri} can't be used: {error}") from error
    newest = chain[-1]
    if (seen := _raw_digest(tensors)) != newest.digest:
        raise WeightsError(
            f"weights {reference.uri} can't be used: their digest must be "
            f"{newest.digest.hex()}, got {seen.hex()}"
        )
    return Weights(
        newest.policy_version, RawTensors(tensors), newest.digest, base_digest=newest.base_digest
    )


def is_stored(store: ObjectStore, reference: ObjectRef) -> bool:
    """Tell whether an artifact's manifest can be read, and its files have their sizes; what is in
    the files is not looked at.

    Raises:
        StoreUnavailable: The store does not answer.
    """
    try:
        manifest = WeightManifest.from_json(store.get(reference))
        return all(
            store.num_bytes(store.key(file.uri)) == file.num_bytes for file in manifest.files
        )
    except (ObjectError, WeightsError):
        return False


def read_chain(
    store: ObjectStore, reference: ObjectRef, cached: CachedWeights | None = None
) -> list[WeightManifest]:
    """Return the manifests that have to be read one on top of the other, the oldest first.

    Args:
        store: The store that holds them.
        reference: Of the newest manifest.
        cached: Weights at which the chain ends.
    Raises:
        ObjectError: One is gone.
        WeightsError: One is unreadable, or they lead back for ever.
    """
    chain = [WeightManifest.from_json(store.get(reference))]
    while (base := chain[0].base) is not None and not (
        cached is not None and cached.digest == base.digest
    ):
        older = WeightManifest.from_json(store.get(base.manifest))
        if older.policy_version >= chain[0].policy_version:
            raise WeightsError(
                f"policy version {chain[0].policy_version} is a delta to version "
                f"{older.policy_version}, which is not older"
            )
        chain.insert(0, older)
    return chain


def _read_files(
    store: ObjectStore, manifest: WeightManifest, tensors: Mapping[str, RawTensor]
) -> dict[str, RawTensor]:
    """Return the tensors of a manifest, read on top of those of its base.

    Raises:
        ObjectError: A file is gone or altered.
        WeightsError: A file does not hold what the manifest says.
    """
    read: dict[str, RawTensor] = {}
    for number, file in enumerate(manifest.files):
        loaded = {name: _raw_tensor(fields) for name, fields in _deserialize(store.get(file))}
        entries = [entry for entry in manifest.tensors if entry.file == number]
        for entry in entries:
            if entry.name in manifest.changed:
                loaded[entry.name] = _apply_tensor_delta(
                    entry,
                    tensors,
                    loaded.pop(entry.name + POSITIONS, None),
                    loaded.pop(entry.name + VALUES, None),
                )
        _check_file(file.uri, loaded, entries)
        read |= loaded
    return read


def _apply_tensor_delta(
    entry: TensorEntry,
    tensors: Mapping[str, RawTensor],
    positions: RawTensor | None,
    values: RawTensor | None,
) -> RawTensor:
    old = tensors.get(entry.name)
    if (
        old is None
        or positions is None
        or values is None
        or positions.dtype not in ("int32", "int64")
    ):
        raise WeightsError(
            f"{entry.name} can't be changed: its positions, its values or what they are to "
            "be applied to are missing"
        )
    offsets = np.frombuffer(positions.data, dtype=positions.dtype)
    return RawTensor(old.dtype, old.shape, apply_delta(entry.name, old.data, offsets, values.data))


def _deserialize(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    fields: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]  # the package carries no types
    return fields


def _raw_tensor(fields: Mapping[str, Any]) -> RawTensor:
    return RawTensor(
        DTYPES.get(fields["dtype"], fields["dtype"]), tuple(fields["shape"]), fields["data"]
    )


def _raw_digest(tensors: Mapping[str, RawTensor]) -> bytes:
    """Give what `artifacts.weights_digest` gives of the same tensors."""
    digest = sha256()
    for name in sorted(tensors):
        raw = tensors[name]
        digest.update(tensor_header(name, raw.dtype, raw.shape))
        digest.update(raw.data)
    return digest.digest()


def _check_file(uri: str, loaded: Mapping[str, RawTensor], entries: list[TensorEntry]) -> None:
    if different := sorted(loaded.keys() ^ {entry.name for entry in entries}):
        raise WeightsError(f"{different[0]} is not in both the manifest and {uri}")
    for entry in entries:
        seen = loaded[entry.name]
        if (seen.dtype, seen.shape) != (entry.dtype, entry.shape):
            raise WeightsError(
                f"{entry.name} in {uri} must be {entry.dtype} {list(entry.shape)}, got "
                f"{seen.dtype} {list(seen.shape)}"
            )
