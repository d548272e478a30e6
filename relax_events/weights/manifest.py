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

FORMAT, DELTA_FORMAT = 1, 2
"""A release that knows only the first format rejects the second."""


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
        base: None for a full snapshot.
        changed: Names of the tensors that the files hold as deltas to the base.
        transit_digest: `artifact_writer.transit_digest` of all weights; None where the version was
            not sent to an engine.
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
    transit_digest: bytes | None = None
    base_digest: bytes = b""

    def to_json(self) -> bytes:
        """Return the manifest as JSON; equal manifests give equal bytes."""
        number = FORMAT if self.base is None else DELTA_FORMAT
        files = [_reference_value(file) for file in self.files]
        value = {
            "format": number,
            "policy_version": self.policy_version,
            "model_type": self.model_type,
            "digest": self.digest.hex(),
            "files": files,
        }
        if self.base is not None:
            value["base"] = _reference_value(self.base.manifest) | {
                "weights_digest": self.base.digest.hex()
            }
            value["changed"] = sorted(self.changed)
        if self.transit_digest is not None:
            value["in_transit"] = self.transit_digest.hex()
        if self.base_digest:
            value["base_model"] = self.base_digest.hex()
        return json.dumps(
            value | {"tensors": [asdict(tensor) for tensor in self.tensors]}, indent=1
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WeightManifest:
        """Parse a manifest.

        Raises:
            WeightsError: It is not JSON, has an unknown format, or lacks a key.
        """
        try:
            value: dict[str, Any] = json.loads(data)
            if value["format"] not in (FORMAT, DELTA_FORMAT):
                known = f"{FORMAT} and {DELTA_FORMAT}"
                raise WeightsError(
                    f"weight manifest has format {value['format']!r}, this release reads "
                    f"{known}; use the release that wrote it"
                )
            files = tuple(_reference(file) for file in value["files"])
            base = (
                Base(_reference(value["base"]), bytes.fromhex(value["base"]["weights_digest"]))
                if value["format"] != FORMAT
                else None
            )
            tensors = tuple(_tensor(item) for item in value["tensors"])
            changed = frozenset(_text(name) for name in value.get("changed", ()))
            transit_digest = bytes.fromhex(value["in_transit"]) if "in_transit" in value else None
            digest = bytes.fromhex(value["digest"])
            return cls(
                _number(value["policy_version"]),
                _text(value["model_type"]),
                digest,
                files,
                tensors,
                base,
                changed,
                transit_digest,
                bytes.fromhex(value.get("base_model", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(
                f"weight manifest can't be read: {type(error).__name__}: {error}"
            ) from error


def tensor_header(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the bytes that precede a tensor's values in the digest of weights."""
    return f"{name}\0{dtype}\0{list(shape)}\0".encode()


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
    return TensorEntry(_text(value["name"]), _text(value["dtype"]), shape, _number(value["file"]))


def _reference_value(reference: ObjectRef) -> dict[str, Any]:
    return {
        "uri": reference.uri,
        "digest": reference.digest.hex(),
        "num_bytes": reference.num_bytes,
    }


def _reference(value: Mapping[str, Any]) -> ObjectRef:
    return ObjectRef(
        _text(value["uri"]), bytes.fromhex(value["digest"]), _number(value["num_bytes"])
    )
