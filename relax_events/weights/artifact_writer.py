"""Writes weight artifacts to the object store: safetensors files and a manifest, written last.

`artifact_reader` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol, TypeVar

import safetensors.torch
import torch
from blake3 import blake3
from torch import Tensor

from relax_events.events.parts import ObjectRef
from relax_events.objects import ObjectStore
from relax_events.runtime.failpoints import failpoint
from relax_events.weights.delta import POSITIONS, VALUES, compute_delta
from relax_events.weights.manifest import Base, TensorEntry, WeightManifest, tensor_header

Item = TypeVar("Item")
PREFIX = "weights/"
MAX_FILE_BYTES = 1024**3
"""Tensors are grouped into files of about this size; the writer holds one such file in memory
in addition to the tensors."""


class Hash(Protocol):
    """An incremental digest."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Add bytes."""


def weights_digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the SHA-256 over names, dtypes, shapes and values, in order of the names: equal if and
    only if the weights are, bit for bit.

    Args:
        tensors: On any device.
    """
    digest = sha256()
    _update_digest(tensors, digest)
    return digest.digest()


def transit_digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the BLAKE3 digest of the same bytes as `weights_digest`, for tensors in transit: as
    hard to forge and four times as fast.
    """
    digest = blake3()
    _update_digest(tensors, digest)
    return digest.digest()


def _update_digest(tensors: Mapping[str, Tensor], digest: Hash) -> None:
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(tensor_header(name, dtype_name(tensor), tuple(tensor.shape)))
        digest.update(raw_bytes(tensor))


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """A written version with a copy of its tensors on the CPU: the base of the next delta."""

    base: Base
    tensors: Mapping[str, Tensor]


def write_weights(
    store: ObjectStore,
    tensors: Mapping[str, Tensor],
    *,
    policy_version: int,
    model_type: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
    previous: WrittenWeights | None = None,
    sent_digest: bytes | None = None,
    base_digest: bytes = b"",
) -> tuple[ObjectRef, bytes]:
    """Write an artifact; return its manifest's reference and the weights' digest.

    Object names contain version and content digest: writing a version again with other values
    leaves the first artifact unchanged.

    Args:
        store: The run's object store.
        tensors: By Hugging Face name, on any device.
        policy_version: Version of these weights.
        model_type: As in the model's config; informational.
        max_file_bytes: Size at which a file is full.
        previous: A version against which a tensor is written as a delta where that is smaller.
            A reader of the artifact then needs that version too.
        sent_digest: Its `transit_digest`, where the version is also sent to engines.
        base_digest: Digest of the base model, where the tensors are its adapters.
    Raises:
        ObjectError: The store failed; no manifest was written.
    """
    digest = weights_digest(tensors)
    files: list[ObjectRef] = []
    entries: list[TensorEntry] = []
    changed: set[str] = set()
    for names in split_into_files(tensors, max_file_bytes=max_file_bytes):
        entries += [
            TensorEntry(name, dtype_name(tensors[name]), tuple(tensors[name].shape), len(files))
            for name in names
        ]
        data, deltas = _serialize_file(names, tensors, previous=previous)
        changed |= deltas
        files.append(
            store.put_at(
                f"{_folder(policy_version)}{sha256(data).hexdigest()[:16]}.safetensors", data
            )
        )
    failpoint("weights.before_manifest")
    base = previous.base if previous is not None and changed else None
    manifest = WeightManifest(
        policy_version,
        model_type,
        digest,
        tuple(files),
        tuple(entries),
        base,
        frozenset(changed),
        sent_digest,
        base_digest,
    ).to_json()
    return store.put_at(
        f"{_folder(policy_version)}manifest-{sha256(manifest).hexdigest()[:16]}.json", manifest
    ), digest


def _serialize_file(
    names: Iterable[str], tensors: Mapping[str, Tensor], *, previous: WrittenWeights | None
) -> tuple[bytes, set[str]]:
    """Return a file's bytes, and the names of the tensors in it that are deltas."""
    stored: dict[str, Tensor] = {}
    deltas: set[str] = set()
    for name in names:
        changes = _compute_tensor_delta(previous, name, tensors[name])
        if changes is None:
            stored[name] = _copy_to_cpu(tensors[name])
        else:
            stored |= {name + POSITIONS: changes[0], name + VALUES: changes[1]}
            deltas.add(name)
    return safetensors.torch.save(stored), deltas


def _compute_tensor_delta(
    previous: WrittenWeights | None, name: str, tensor: Tensor
) -> tuple[Tensor, Tensor] | None:
    old = previous.tensors.get(name) if previous is not None else None
    if old is None or (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
        return None
    return compute_delta(old, tensor.detach().to("cpu"))


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU."""
    return {name: _copy_to_cpu(tensor) for name, tensor in tensors.items()}


def delete_weights(store: ObjectStore, *policy_versions: int) -> None:
    """Delete everything that was written for these versions, manifests first; a version that
    does not exist is skipped.

    Raises:
        ObjectError: The store failed.
    """
    for version in policy_versions:
        keys = store.list(_folder(version))
        store.delete(sorted(keys, key=lambda key: not key.endswith(".json")))


def stored_versions(store: ObjectStore) -> list[int]:
    """Return the versions with any object, incomplete ones included, oldest first.

    Raises:
        ObjectError: The store can't be read.
    """
    return sorted(
        int(folder.removeprefix(PREFIX).rstrip("/")) for folder in store.list_folders(PREFIX)
    )


def _folder(policy_version: int) -> str:
    return f"{PREFIX}{policy_version:08d}/"


def split_into_files(tensors: Mapping[str, Tensor], *, max_file_bytes: int) -> Iterable[list[str]]:
    """Split the names, in order, into files; a tensor above the limit gets a file of its own."""
    return split_by_bytes(
        sorted(tensors), lambda name: tensors[name].nbytes, max_bytes=max_file_bytes
    )


def split_by_bytes(
    items: Iterable[Item], size_of: Callable[[Item], int], *, max_bytes: int
) -> Iterator[list[Item]]:
    """Yield the items, in order, in parts of at most so many bytes; a larger item is a part of its
    own.
    """
    part: list[Item] = []
    num_bytes = 0
    for item in items:
        size = size_of(item)
        if part and num_bytes + size > max_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += size
    if part:
        yield part


def dtype_name(tensor: Tensor) -> str:
    """Name a tensor's dtype as manifests do."""
    return str(tensor.dtype).removeprefix("torch.")


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    # A copy of its own: safetensors refuses tensors that share memory, as tied embeddings and
    # slices of one flat buffer do.
    return tensor.detach().to("cpu", copy=True).contiguous()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
