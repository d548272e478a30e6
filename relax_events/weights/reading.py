"""Reads weight artifacts and proves them, all without torch: a worker whose engine loads no tensors itself stays light."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, deserialize

from relax_events.errors import ObjectError, WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.objects import ObjectStore
from relax_events.weights.manifest import TensorEntry, WeightManifest, Weights, tensor_header

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
"""Names of dtypes in safetensors files, and torch's."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray


class RawTensors(Mapping[str, "Tensor"]):
    """Tensors by name, each made when it is asked for, on the bytes that were read: nothing is copied."""

    def __init__(self, raw: Mapping[str, RawTensor]) -> None:
        self._raw = raw

    def __getitem__(self, name: str) -> Tensor:
        import torch

        raw = self._raw[name]
        dtype = getattr(torch, raw.dtype)
        return torch.frombuffer(raw.data, dtype=dtype).reshape(raw.shape) if raw.data else torch.empty(raw.shape, dtype=dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


def read_weights(store: ObjectStore, reference: ObjectRef) -> Weights:
    """Read an artifact, and hand out its tensors only when every digest, name, dtype and shape agrees.

    Args:
        store: The store that holds it.
        reference: Of the manifest.
    Raises:
        WeightsError: An object is missing, unreadable or altered, or does not hold what the manifest says; the text names it.
    """
    try:
        manifest = WeightManifest.from_json(store.get(reference))
        tensors: dict[str, RawTensor] = {}
        for number, file in enumerate(manifest.files):
            loaded = {name: _raw_tensor(fields) for name, fields in _deserialize(store.get(file))}
            _check_file(file.uri, loaded, [entry for entry in manifest.tensors if entry.file == number])
            tensors |= loaded
    except (ObjectError, WeightsError, SafetensorError) as error:
        raise WeightsError(f"weights {reference.uri} can't be used: {error}") from error
    if (seen := _raw_digest(tensors)) != manifest.digest:
        raise WeightsError(f"weights {reference.uri} can't be used: their digest must be {manifest.digest.hex()}, got {seen.hex()}")
    return Weights(manifest.policy_version, RawTensors(tensors), manifest.digest)


def _deserialize(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    fields: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]  # the package carries no types
    return fields


def _raw_tensor(fields: Mapping[str, Any]) -> RawTensor:
    return RawTensor(DTYPES.get(fields["dtype"], fields["dtype"]), tuple(fields["shape"]), fields["data"])


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
            raise WeightsError(f"{entry.name} in {uri} must be {entry.dtype} {list(entry.shape)}, got {seen.dtype} {list(seen.shape)}")
