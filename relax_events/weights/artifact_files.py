"""Reads a weight artifact tensor by tensor from files of this machine, for models that are larger
than the memory. `artifact_reader` reads one whole.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from relax_events.errors import ObjectError, WeightsError
from relax_events.events.parts import ObjectRef
from relax_events.model_folder.tensors import StoredTensors, TensorLayout
from relax_events.objects import ObjectStore
from relax_events.objects.download import download
from relax_events.weights.artifact_reader import read_chain
from relax_events.weights.delta import POSITIONS, VALUES, apply_delta
from relax_events.weights.digests import combine_digests, tensor_digest
from relax_events.weights.manifest import WeightManifest
from relax_events.weights.tensor_files import Tensors, raw_bytes

NUM_CACHED = 2
"""Changed tensors that are kept: the parts of a layer's two fused expert tensors are asked for in
turn."""


class ArtifactTensors:
    """The tensors of a published version, full or a delta; implements `Tensors`."""

    def __init__(self, store: ObjectStore, reference: ObjectRef, folder: Path) -> None:
        """Copy the files of the artifact and of the versions that it is based on into a folder.

        Args:
            store: The store that holds them.
            reference: Of the manifest.
            folder: Exists, and stays until the last tensor is read.
        Raises:
            WeightsError: An object is missing or altered, or contradicts the manifest; the text
                names it.
            EnvironmentProblem: The folder can't be written.
        """
        try:
            chain = read_chain(store, reference)
            self._levels = [_open_files(store, manifest, folder) for manifest in chain]
            self._changed = [manifest.changed for manifest in chain]
            self._require_files_hold(chain[-1])
        except (ObjectError, WeightsError) as error:
            raise WeightsError(f"weights {reference.uri} can't be used: {error}") from error
        newest = chain[-1]
        self.policy_version, self.digest = newest.policy_version, newest.digest
        self.base_digest = newest.base_digest
        self.layouts = {
            entry.name: TensorLayout(entry.dtype, entry.shape) for entry in newest.tensors
        }
        self._cached: OrderedDict[str, Tensor] = OrderedDict()

    def _require_files_hold(self, manifest: WeightManifest) -> None:
        """Compare a manifest with the headers of its files.

        Raises:
            WeightsError: They differ; the text names the first tensor.
        """
        files = self._levels[-1].layouts
        for entry in manifest.tensors:
            if entry.name in manifest.changed:
                continue
            layout, file_layout = TensorLayout(entry.dtype, entry.shape), files.get(entry.name)
            if file_layout != layout:
                raise WeightsError(f"{entry.name} must be {layout}, got {file_layout or 'nothing'}")

    def read(self, name: str) -> Tensor:
        """Return a tensor of the version; see `Tensors`.

        Raises:
            WeightsError: Its delta does not fit; the text names it.
        """
        if name not in self._cached:
            self._cached[name] = self._read_level(name, len(self._levels) - 1)
        self._cached.move_to_end(name)
        if len(self._cached) > NUM_CACHED:
            self._cached.popitem(last=False)
        return self._cached[name]

    def _read_level(self, name: str, level: int) -> Tensor:
        """Return a tensor as it is in a version of the chain."""
        files = self._levels[level]
        if name not in self._changed[level]:
            return files.read(name)
        if level == 0 or not {name + POSITIONS, name + VALUES} <= files.layouts.keys():
            raise WeightsError(
                f"{name} can't be changed: its positions, its values or the tensor that they apply "
                "to is missing; export another version"
            )
        old = self._read_level(name, level - 1)
        positions, values = files.read(name + POSITIONS), files.read(name + VALUES)
        new = apply_delta(
            name, bytearray(raw_bytes(old)), positions.numpy(), bytearray(raw_bytes(values))
        )
        return torch.frombuffer(new, dtype=old.dtype).reshape(old.shape) if len(new) else old


def _open_files(store: ObjectStore, manifest: WeightManifest, folder: Path) -> StoredTensors:
    return StoredTensors.from_files(
        download(store, file, folder / f"{manifest.policy_version:08d}-{number:05d}.safetensors")
        for number, file in enumerate(manifest.files)
    )


def digest_tensors(tensors: Tensors) -> bytes:
    """Return the same digest as `artifact_writer.weights_digest`, reading one tensor at a time."""
    return combine_digests(
        {
            name: tensor_digest(name, layout.dtype, layout.shape, _values(tensors, name))
            for name, layout in tensors.layouts.items()
        }
    )


def _values(tensors: Tensors, name: str) -> memoryview:
    return raw_bytes(tensors.read(name).to(getattr(torch, tensors.layouts[name].dtype)))
