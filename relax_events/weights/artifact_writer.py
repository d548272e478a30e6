"""Weight artifacts in the object store: safetensors files and a manifest, written last. `reading`
reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import safetensors.torch
import torch
from blake3 import blake3
from torch import Tensor

from relax_events.events.parts import ObjectRef
from relax_events.objects import ObjectStore
from relax_events.runtime.failpoints import failpoint
from relax_events.weights.delta import POSITIONS, VALUES, compute_delta
from relax_events.weights.manifest import Base, TensorEntry, WeightManifest, tensor_header

PREFIX = "weights/"
MAX_FILE_BYTES = 1024**3
"""Tensors are grouped into files of about this size; the writer holds one such file in memory
beside the tensors."""


class Hash(Protocol):
    """Takes a digest, a piece at a time."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Go on with more bytes."""


def weights_digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Give the SHA-256 over names, dtypes, shapes and values, in order of the names: equal if and
    only if the weights are, bit for bit.

    Args:
        tensors: On any device.
    """
    digest = sha256()
    _update_digest(tensors, digest)
    return digest.digest()


def transit_digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Give the BLAKE3 digest over what `weights_digest` is taken of: as hard to forge and four
    times as fast, for tensors on their way.
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
    """A version that was written, with a copy of its tensors on the CPU: what the next one may be
    written as changes of.
    """

    base: Base
    tensors: Mapping[str, Tensor]


def write_weights(
    store: ObjectStore,
    tensors: Mapping[str, Tensor],
    *,
    policy_version: int,
    model_type: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
    former: WrittenWeights | None = None,
    in_transit: bytes | None = None,
) -> tuple[ObjectRef, bytes]:
    """Write an artifact; return where its manifest lies, and the weights' digest.

    Objects are named by version and content: writing a version again with other values leaves the
        first artifact as it was.

    Args:
        store: The run's object store.
        tensors: By Hugging Face name, on any device.
        policy_version: The version that these weights are.
        model_type: As in the model's config; for people.
        max_file_bytes: Size at which a file is full.
        in_transit: Its `transit_digest`, where the version is sent to engines besides.
        former: A version to which only the changes are written, tensor by tensor, where they are
            smaller. Who reads them needs it as well.
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
        stored: dict[str, Tensor] = {}
        for name in names:
            changes = _compute_tensor_delta(former, name, tensors[name])
            stored |= (
                {name: _copy_to_cpu(tensors[name])}
                if changes is None
                else {name + POSITIONS: changes[0], name + VALUES: changes[1]}
            )
            changed |= set() if changes is None else {name}
        data = safetensors.torch.save(stored)
        files.append(
            store.put_at(
                f"{_folder(policy_version)}{sha256(data).hexdigest()[:16]}.safetensors", data
            )
        )
    failpoint("weights.before_manifest")
    base = former.base if former is not None and changed else None
    manifest = WeightManifest(
        policy_version,
        model_type,
        digest,
        tuple(files),
        tuple(entries),
        base,
        frozenset(changed),
        in_transit,
    ).to_json()
    return store.put_at(
        f"{_folder(policy_version)}manifest-{sha256(manifest).hexdigest()[:16]}.json", manifest
    ), digest


def _compute_tensor_delta(former: WrittenWeights | None, name: str, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    old = former.tensors.get(name) if former is not None else None
    if old is None or (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
        return None
    return compute_delta(old, tensor.detach().to("cpu"))


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU."""
    return {name: _copy_to_cpu(tensor) for name, tensor in tensors.items()}


def delete_weights(store: ObjectStore, *policy_versions: int) -> None:
    """Delete everything that was written for these versions, manifests first; a version that is
    gone is passed over.

    Raises:
        ObjectError: The store refused.
    """
    for version in policy_versions:
        keys = store.list(_folder(version))
        store.delete(sorted(keys, key=lambda key: not key.endswith(".json")))


def stored_versions(store: ObjectStore) -> list[int]:
    """Return the versions that something was written for, oldest first, half-written ones too.

    Raises:
        ObjectError: The store can't be read.
    """
    return sorted(int(folder.removeprefix(PREFIX).rstrip("/")) for folder in store.list_folders(PREFIX))


def _folder(policy_version: int) -> str:
    return f"{PREFIX}{policy_version:08d}/"


def split_into_files(tensors: Mapping[str, Tensor], *, max_file_bytes: int) -> Iterable[list[str]]:
    """Split the names, in order, into files; a tensor above the limit gets a file of its own."""
    share: list[str] = []
    num_bytes = 0
    for name in sorted(tensors):
        if share and num_bytes + tensors[name].nbytes > max_file_bytes:
            yield share
            share, num_bytes = [], 0
        share.append(name)
        num_bytes += tensors[name].nbytes
    if share:
        yield share


def dtype_name(tensor: Tensor) -> str:
    """Name a tensor's dtype as manifests do."""
    return str(tensor.dtype).removeprefix("torch.")


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    # A copy of its own: safetensors refuses tensors that share memory, as tied embeddings and
    # slices of one flat buffer do.
    return tensor.detach().to("cpu", copy=True).contiguous()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Give a tensor's values as they lie in memory, row after row."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
