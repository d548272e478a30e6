"""What a weight artifact says of itself: which tensors, in which files, with which digests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from relax_events.errors import WeightsError
from relax_events.events.parts import ObjectRef

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one policy version, complete and verified, in Hugging Face names, on the CPU."""

    policy_version: int
    tensors: Mapping[str, Tensor]
    digest: bytes
    transport: str = "store"
    """How the tensors came."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: where it is and what it must look like; `file` counts the manifest's files from 0."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """An artifact's table of contents. It is written last, so whoever holds it knows that all files are there."""

    policy_version: int
    model_type: str
    digest: bytes
    files: tuple[ObjectRef, ...]
    tensors: tuple[TensorEntry, ...]

    def to_json(self) -> bytes:
        """Give the manifest as JSON, the same bytes for the same manifest."""
        files = [{"uri": file.uri, "digest": file.digest.hex(), "num_bytes": file.num_bytes} for file in self.files]
        value = {"format": FORMAT, "policy_version": self.policy_version, "model_type": self.model_type, "digest": self.digest.hex(), "files": files}
        return json.dumps(value | {"tensors": [asdict(tensor) for tensor in self.tensors]}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WeightManifest:
        """Read a manifest.

        Raises:
            WeightsError: It is not JSON, of another format, or lacks a key.
        """
        try:
            value: dict[str, Any] = json.loads(data)
            if value["format"] != FORMAT:
                raise WeightsError(f"weight manifest has format {value['format']!r}, this release reads {FORMAT}; use the release that wrote it")
            files = tuple(ObjectRef(file["uri"], bytes.fromhex(file["digest"]), file["num_bytes"]) for file in value["files"])
            tensors = tuple(TensorEntry(item["name"], item["dtype"], tuple(item["shape"]), item["file"]) for item in value["tensors"])
            return cls(value["policy_version"], value["model_type"], bytes.fromhex(value["digest"]), files, tensors)
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"weight manifest can't be read: {type(error).__name__}: {error}") from error


def tensor_header(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Give what stands before a tensor's values where the digest of weights is taken."""
    return f"{name}\0{dtype}\0{list(shape)}\0".encode()
