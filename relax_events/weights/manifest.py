"""The manifest of a weight artifact: its tensors, files and digests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from relax_events.errors import WeightsError
from relax_events.events.parts import ObjectRef

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 3
"""Format of manifests. A release rejects formats that it does not know."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one policy version, complete and verified, in Hugging Face names, on the
    CPU.
    """

    policy_version: int
    tensors: Mapping[str, Tensor]
    digest: bytes
    transport: str = "store"
    """Name of the transport that delivered them."""
    base_digest: bytes = b""
    """Digest of the base model's folder that adapters belong to; empty for whole weights."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Dtype and shape of one tensor, and the index of its file in the manifest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    digest: bytes = b""
    """`digests.tensor_digest` of its values."""


@dataclass(frozen=True, slots=True)
class Base:
    """The version that a delta artifact applies to: its manifest, and the digest of its weights."""

    manifest: ObjectRef
    digest: bytes


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """An artifact's table of contents. It is written last, so its presence implies that all files
    exist.

    Attributes:
        digest: `artifact_writer.weights_digest` of all weights.
        files: Their digests are empty: the tensors' digests verify their content.
        base: None for a full snapshot.
        changed: Names of the tensors that the files hold as deltas to the base.
        base_digest: `base_digest.compute_base_digest` of the model that the tensors are adapters
            of; empty where they are a whole model's.
    """

    policy_version: int
    model_type: str
    digest: bytes
    files: tuple[ObjectRef, ...]
    tensors: tuple[TensorEntry, ...]
    base: Base | None = None
    changed: frozenset[str] = frozenset()
    base_digest: bytes = b""

    def to_json(self) -> bytes:
        """Return the manifest as JSON; equal manifests give equal bytes."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "policy_version": self.policy_version,
            "model_type": self.model_type,
            "digest": self.digest.hex(),
            "files": [{"uri": file.uri, "num_bytes": file.num_bytes} for file in self.files],
        }
        if self.base is not None:
            value["base"] = _reference_value(self.base.manifest) | {
                "weights_digest": self.base.digest.hex()
            }
            value["changed"] = sorted(self.changed)
        if self.base_digest:
            value["base_model"] = self.base_digest.hex()
        tensors = [asdict(tensor) | {"digest": tensor.digest.hex()} for tensor in self.tensors]
        return json.dumps(value | {"tensors": tensors}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WeightManifest:
        """Parse a manifest.

        Raises:
            WeightsError: It is not JSON, has an unknown format, or lacks a key.
        """
        try:
            value: dict[str, Any] = json.loads(data)
            number = value["format"]
            if type(number) is not int or number != FORMAT:
                raise WeightsError(
                    f"weight manifest has format {number!r}, this release reads {FORMAT}; use the "
                    "release that wrote it"
                )
            return cls(
                _number(value["policy_version"]),
                _text(value["model_type"]),
                bytes.fromhex(value["digest"]),
                tuple(_reference(file, digest=b"") for file in value["files"]),
                tuple(map(_tensor, value["tensors"])),
                _base(value["base"]) if "base" in value else None,
                frozenset(_text(name) for name in value.get("changed", ())),
                bytes.fromhex(value.get("base_model", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(
                f"weight manifest can't be read: {type(error).__name__}: {error}"
            ) from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {str(value)[:200]}")
    return value


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"expected an integer, got {str(value)[:200]}")
    return value


def _tensor(value: Mapping[str, Any]) -> TensorEntry:
    shape = tuple(_number(length) for length in value["shape"])
    digest = bytes.fromhex(value["digest"])
    return TensorEntry(
        _text(value["name"]), _text(value["dtype"]), shape, _number(value["file"]), digest
    )


def _base(value: Mapping[str, Any]) -> Base:
    manifest = _reference(value, digest=bytes.fromhex(value["digest"]))
    return Base(manifest, bytes.fromhex(value["weights_digest"]))


def _reference_value(reference: ObjectRef) -> dict[str, Any]:
    return {
        "uri": reference.uri,
        "digest": reference.digest.hex(),
        "num_bytes": reference.num_bytes,
    }


def _reference(value: Mapping[str, Any], *, digest: bytes) -> ObjectRef:
    return ObjectRef(_text(value["uri"]), digest, _number(value["num_bytes"]))
