"""Writes weight artifacts to the object store: safetensors files and a manifest, written last.

    part of the weights --> laid out as a file --> its tensors hashed --> named by their digests -->
    written from that memory

Each value is copied once and hashed once. `artifact_reader` reads artifacts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

from torch import Tensor

from relax_events.events.parts import ObjectRef
from relax_events.objects import ObjectStore
from relax_events.runtime.failpoints import failpoint
from relax_events.weights.delta import POSITIONS, VALUES, compute_delta
from relax_events.weights.digests import combine_digests, tensor_digest
from relax_events.weights.file_content import FileContent, lay_out
from relax_events.weights.manifest import Base, TensorEntry, WeightManifest
from relax_events.weights.tensor_files import dtype_name, raw_bytes

Item = TypeVar("Item")
PREFIX = "weights/"
MAX_FILE_BYTES = 2**28
"""Tensors are grouped into files of at most this size; a larger tensor has a file of its own."""


def weights_digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the digest over names, dtypes, shapes and values: equal if and only if the weights
    are, bit for bit.

    Args:
        tensors: On any device.
    """
    return combine_digests({name: _digest(name, tensor) for name, tensor in tensors.items()})


def _digest(name: str, tensor: Tensor) -> bytes:
    return tensor_digest(name, dtype_name(tensor), tuple(tensor.shape), raw_bytes(tensor))


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
    base_digest: bytes = b"",
) -> tuple[ObjectRef, bytes]:
    """Write tensors as an artifact; see `write_files`.

    Args:
        store: The run's object store.
        tensors: By Hugging Face name, on any device.
        policy_version: Version of these weights.
        model_type: As in the model's config; informational.
        max_file_bytes: Size at which a file is full.
        previous: As in `write_files`.
        base_digest: As in `write_files`.
    """
    return write_files(
        store,
        lay_out(split_tensors(tensors, max_file_bytes=max_file_bytes), keep=False),
        policy_version=policy_version,
        model_type=model_type,
        previous=previous,
        base_digest=base_digest,
    )


def write_files(
    store: ObjectStore,
    files: Iterable[FileContent],
    *,
    policy_version: int,
    model_type: str = "",
    previous: WrittenWeights | None = None,
    base_digest: bytes = b"",
) -> tuple[ObjectRef, bytes]:
    """Write an artifact; return its manifest's reference and the weights' digest.

    Object names contain version and content digest: writing a version again with other values
    leaves the first artifact unchanged.

    Args:
        store: The run's object store.
        files: The tensors by Hugging Face name; each file is used until the next is asked for.
        policy_version: Version of these weights.
        model_type: As in the model's config; informational.
        previous: A version against which a tensor is written as a delta where that is smaller.
            A reader of the artifact then needs that version too.
        base_digest: Digest of the base model, where the tensors are its adapters.
    Raises:
        ObjectError: The store failed; no manifest was written.
    """
    written: list[ObjectRef] = []
    entries: list[TensorEntry] = []
    changed: set[str] = set()
    for file in files:
        entries += (hashed := _hash_file(file, index=len(written)))
        name = combine_digests({entry.name: entry.digest for entry in hashed}).hex()[:16]
        stored, deltas = (file, set[str]()) if previous is None else _as_deltas(file, previous)
        changed |= deltas
        if previous is not None and deltas:  # the written bytes depend on the base as well
            name += f"-{previous.base.digest.hex()[:16]}"
        key = f"{_folder(policy_version)}{name}.safetensors"
        written.append(store.put_unhashed(key, stored.content))
    failpoint("weights.before_manifest")
    digest = combine_digests({entry.name: entry.digest for entry in entries})
    manifest = WeightManifest(
        policy_version,
        model_type,
        digest,
        tuple(written),
        tuple(sorted(entries, key=lambda entry: entry.name)),
        previous.base if previous is not None and changed else None,
        frozenset(changed),
        base_digest,
    ).to_json()
    return store.put_at(
        f"{_folder(policy_version)}manifest-{sha256(manifest).hexdigest()[:16]}.json", manifest
    ), digest


def _hash_file(file: FileContent, *, index: int) -> list[TensorEntry]:
    return [
        TensorEntry(
            name,
            layout.dtype,
            layout.shape,
            index,
            tensor_digest(name, layout.dtype, layout.shape, file.content[file.spans[name]]),
        )
        for name, layout in file.layouts.items()
    ]


def _as_deltas(file: FileContent, previous: WrittenWeights) -> tuple[FileContent, set[str]]:
    """Return a file with the tensors as deltas where that is smaller, and their names."""
    stored: dict[str, Tensor] = {}
    deltas: set[str] = set()
    for name, tensor in file.tensors.items():
        old = previous.tensors.get(name)
        is_like = old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape)
        changes = compute_delta(old, tensor) if old is not None and is_like else None
        if changes is None:
            stored[name] = tensor
        else:
            stored |= {name + POSITIONS: changes[0], name + VALUES: changes[1]}
            deltas.add(name)
    return (FileContent.of(stored) if deltas else file), deltas


def delete_weights(store: ObjectStore, *policy_versions: int) -> None:
    """Delete everything that was written for these versions, manifests first; a version that
    does not exist is skipped.

    Raises:
        ObjectError: The store failed.
    """
    for version in policy_versions:
        keys = store.list(_folder(version))
        store.delete(sorted(keys, key=lambda key: not key.endswith(".json")))
        store.delete_unfinished(_folder(version))


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


def split_tensors(
    tensors: Mapping[str, Tensor], *, max_file_bytes: int = MAX_FILE_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors, in order of their names, in parts that each make a file."""
    for names in split_into_files(tensors, max_file_bytes=max_file_bytes):
        yield {name: tensors[name] for name in names}


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
