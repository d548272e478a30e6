"""Pictures and clips between worker and server, as the model is shown them: the server sees no file, so it can't process one otherwise.

A request brings each array once, with its first prompt. Every prompt says where in its tokens the arrays stand, and the rotary positions of all of
them: the server expands and counts nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.engines.rows import Sample
from relax_events.events.parts import Modality
from relax_events.models.geometry import PictureGeometry
from relax_events.models.media_layout import MediaLayout, modality_of

FORMAT = "relax-events.media.1"
"""Says whose the data are, and in which form."""
HEAD = f"{FORMAT}:"
"""Before the JSON: SGLang refuses objects with keys that it doesn't know, and takes any text for an address."""
GEOMETRY = ("patch_size", "merge_size", "temporal_patch_size", "mean", "std")
Place = tuple[int, int]
"""First and last token of a run of placeholders."""


@dataclass(frozen=True, slots=True, eq=False)
class ShownArray:
    """What the vision tower is shown of a piece of media.

    Attributes:
        modality: Picture or clip.
        pixels: Of the picture, or of the clip's frames.
        geometry: How they are cut into patches.
        identity: SHA-256 of all that the tower's features follow from, and of the name of the weights that make them.
    """

    modality: Modality
    pixels: NDArray[np.uint8]
    geometry: PictureGeometry
    identity: bytes

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ShownArray:
        """Read what `_written` has written."""
        geometry: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given["geometry"].items()}
        whole = PictureGeometry(**geometry, min_pixels=0, max_pixels=0, side_multiple=0)
        return cls(Modality(given["modality"]), _array(given["pixels"]), whole, bytes.fromhex(given["identity"]))


@dataclass(frozen=True, slots=True, eq=False)
class Placing:
    """Where a prompt's arrays stand.

    Attributes:
        runs: Of each array.
        positions: Rotary positions of all tokens, [3, tokens].
        shift: How far the position behind the prompt is from its length.
    """

    runs: list[list[Place]]
    positions: NDArray[np.int64]
    shift: int

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Placing:
        """Read what `_placed` has written."""
        runs = [[(int(first), int(last)) for first, last in one] for one in given["runs"]]
        return cls(runs, _array(given["positions"]), int(given["shift"]))


def requested(samples: Sequence[Sample], layout: MediaLayout, *, weights: str) -> list[str]:
    """Return what a request says of the media of its prompts, for each of them; the arrays stand in the first.

    Args:
        samples: Of one prompt group, and so with the same media.
        layout: Of the model.
        weights: Name of the weights that the request is for: features are kept by the server, and must not outlive them.
    """
    shown = [_written(array) for array in _shown(samples[0], layout, weights)]
    return [HEAD + json.dumps(_placed(sample, layout) | ({} if place else {"shown": shown})) for place, sample in enumerate(samples)]


def read(sent: Sequence[str]) -> list[tuple[list[ShownArray], Placing]]:
    """Read what `requested` has returned: the arrays, which all prompts share, and where they stand in each.

    Raises:
        KeyError, TypeError, ValueError: It is something else.
    """
    said = [json.loads(text.removeprefix(HEAD)) for text in sent]
    shown = [ShownArray.read(array) for array in said[0]["shown"]]
    return [(shown, Placing.read(one)) for one in said]


def _shown(sample: Sample, layout: MediaLayout, weights: str) -> list[ShownArray]:
    geometry = layout.pictures.geometry
    found = []
    for piece in sample.media:
        modality = modality_of(piece.reference)
        assert piece.pixels is not None, "what is heard is refused before: no model of `families.SEEING` hears"
        said = repr((weights, modality.value, piece.pixels.shape, geometry.digest)).encode()
        identity = hashlib.sha256(said + np.ascontiguousarray(piece.pixels).data).digest()
        found.append(ShownArray(modality, piece.pixels, geometry, identity))
    return found


def _written(array: ShownArray) -> dict[str, Any]:
    geometry = {name: getattr(array.geometry, name) for name in GEOMETRY}
    return {"modality": array.modality.value, "pixels": _base64(array.pixels), "geometry": geometry, "identity": array.identity.hex()}


def _placed(sample: Sample, layout: MediaLayout) -> dict[str, Any]:
    tokens, references = sample.sequence, [piece.reference for piece in sample.media]
    given = np.append(sample.given, np.zeros(len(sample.tokens), bool))
    cells = layout.cells(tokens, given, references)
    runs, first = [], 0
    for piece in sample.media:
        size = sum(map(len, layout.blocks(piece.reference)))
        runs.append(_runs(cells[first : first + size]))
        first += size
    return {"runs": runs, "positions": _base64(layout.positions(len(tokens), cells, references)), "shift": sample.position_shift}


def _runs(cells: NDArray[np.int64]) -> list[Place]:
    """Return the first and last of each run of neighbours."""
    ends = np.flatnonzero(np.diff(cells) > 1)
    firsts, lasts = cells[np.append(0, ends + 1)], cells[np.append(ends, len(cells) - 1)]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _base64(values: NDArray[Any]) -> dict[str, Any]:
    return {"dtype": values.dtype.str, "shape": list(values.shape), "data": base64.b64encode(np.ascontiguousarray(values).data).decode()}


def _array(given: Mapping[str, Any]) -> NDArray[Any]:
    data = bytearray(base64.b64decode(given["data"], validate=True))
    return np.frombuffer(data, np.dtype(given["dtype"])).reshape(given["shape"])
