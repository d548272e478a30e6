"""Reads and verifies weight artifacts without torch, so that a worker whose engine loads no tensors
imports none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from relax_events.errors import DamagedTensors, ObjectError, WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.model_folder.tensors import RawTensor, StoredTensors, TensorLayout, split_file
from relax_events.objects import ObjectStore
from relax_events.weights.delta import POSITIONS, VALUES, apply_delta
from relax_events.weights.digests import combine_digests, tensor_digest
from relax_events.weights.manifest import TensorEntry, WeightManifest, Weights


@dataclass(frozen=True, slots=True)
class CachedWeights:
    """A version that was read earlier and has not been modified."""

    digest: bytes
    tensors: StoredTensors


def read_weights(
    store: ObjectStore, reference: ObjectRef, *, cached: CachedWeights | None = None
) -> Weights:
    """Read an artifact, and hand out its tensors only when every digest, name, dtype and shape
    agrees.

    Args:
        store: The store that holds it.
        reference: Of the manifest.
        cached: An artifact that holds the changes to these is read on top of them; else its base
            versions are read as well.
    Raises:
        WeightsError: An object is missing, unreadable or altered, or contradicts the manifest; the
            text names it.
    """
    try:
        chain = read_chain(store, reference, cached)
        tensors: Mapping[str, RawTensor] = (
            cached.tensors.raw if cached is not None and chain[0].base is not None else {}
        )
        for manifest in chain:
            tensors = _read_files(store, manifest, tensors)
        _verify(chain[-1], tensors)
    except DamagedTensors:
        raise
    except (ObjectError, WeightsError) as error:
        raise WeightsError(f"weights {reference.uri} can't be used: {error}") from error
    newest = chain[-1]
    return Weights(
        newest.policy_version, StoredTensors(tensors), newest.digest, base_digest=newest.base_digest
    )


def _verify(manifest: WeightManifest, tensors: Mapping[str, RawTensor]) -> None:
    """Hash tensors, once, and compare them with the manifest.

    Raises:
        WeightsError: A tensor was altered, or belongs to other weights; the text names it.
    """
    digests = {}
    for entry in manifest.tensors:
        raw = tensors[entry.name]
        seen = tensor_digest(entry.name, raw.layout.dtype, raw.layout.shape, raw.data)
        if seen != entry.digest:
            raise WeightsError(
                f"{entry.name} was altered in {manifest.files[entry.file].uri}: its BLAKE3 "
                f"must be {entry.digest.hex()}, got {seen.hex()}"
            )
        digests[entry.name] = seen
    digest = combine_digests(digests)
    if digest != manifest.digest:
        raise WeightsError(f"their digest must be {manifest.digest.hex()}, got {digest.hex()}")


def is_stored(store: ObjectStore, reference: ObjectRef) -> bool:
    """Return whether an artifact's manifest can be read, and its files have their sizes. The
    content of the files is not read.

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
    """Return the tensors of a manifest, read on top of its base's tensors.

    Raises:
        ObjectError: A file is gone or altered.
        WeightsError: A file contradicts the manifest.
    """
    read: dict[str, RawTensor] = {}
    for number, file in enumerate(manifest.files):
        loaded = split_file(store.get_buffer(file), file.uri)
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
        or positions.layout.dtype not in ("int32", "int64")
    ):
        raise WeightsError(
            f"{entry.name} can't be changed: its positions, its values or the tensor that they "
            "apply to is missing"
        )
    offsets = np.frombuffer(positions.data, dtype=positions.layout.dtype)
    return RawTensor(old.layout, apply_delta(entry.name, old.data, offsets, values.data))


def _check_file(uri: str, loaded: Mapping[str, RawTensor], entries: list[TensorEntry]) -> None:
    if different := sorted(loaded.keys() ^ {entry.name for entry in entries}):
        raise WeightsError(f"{different[0]} is not in both the manifest and {uri}")
    for entry in entries:
        expected, seen = TensorLayout(entry.dtype, entry.shape), loaded[entry.name].layout
        if seen != expected:
            raise WeightsError(f"{entry.name} in {uri} must be {expected}, got {seen}")
