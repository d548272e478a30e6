"""Pictures, clips and sounds between worker and server, as the model is shown them: the server sees
no file, so it can't process one otherwise.

A request brings each array once, with its first prompt. Every prompt says where in its tokens the
arrays stand, and the rotary positions of all of
them: the server expands and counts nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.transformers.rows import Sample
from relax_events.events.parts import Modality
from relax_events.media.geometry import PictureGeometry
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.media.token_layout import MediaLayout, modality_of
from relax_events.media.towers import spectrum_of

FORMAT = "relax-events.media.2"
"""Says whose the data are, and in which form."""
HEAD = f"{FORMAT}:"
"""Before the JSON: SGLang refuses objects with keys that it doesn't know, and takes any text for an
address."""
GEOMETRY = ("patch_size", "merge_size", "temporal_patch_size", "mean", "std")
Place = tuple[int, int]
"""First and last token of a run of placeholders."""


@dataclass(frozen=True, slots=True, eq=False)
class ShownArray:
    """What a tower is shown of a piece of media.

    Attributes:
        modality: Picture, clip, or sound, that of a clip as well.
        values: Pixels of the picture, or of the clip's frames; of a sound its spectrum, [mels,
            frames].
        geometry: How pixels are cut into patches; None of a sound.
        identity: SHA-256 of all that the tower's features follow from, and of the name of the
            weights that make them.
    """

    modality: Modality
    values: NDArray[Any]
    geometry: PictureGeometry | None
    identity: bytes

    @classmethod
    def of(
        cls,
        modality: Modality,
        values: NDArray[Any],
        geometry: PictureGeometry | None,
        *,
        weights: str,
    ) -> ShownArray:
        """Give an array its identity under some weights."""
        said = repr(
            (weights, modality.value, values.shape, None if geometry is None else geometry.digest)
        ).encode()
        return cls(
            modality,
            values,
            geometry,
            hashlib.sha256(said + np.ascontiguousarray(values).data).digest(),
        )

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ShownArray:
        """Read what `_written` has written."""
        geometry = None
        if (cut := given["geometry"]) is not None:
            known: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in cut.items()
            }
            geometry = PictureGeometry(**known, min_pixels=0, max_pixels=0, side_multiple=0)
        return cls(
            Modality(given["modality"]),
            _array(given["values"]),
            geometry,
            bytes.fromhex(given["identity"]),
        )


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


def requested(samples: Sequence[Sample], model: ModelFolder, *, weights: str) -> list[str]:
    """Return what a request says of the media of its prompts, for each of them; the arrays stand in
    the first.

    Args:
        samples: Of one prompt group, and so with the same media.
        model: That is shown them.
        weights: Name of the weights that the request is for: features are kept by the server, and
            must not outlive them.
    """
    layout = model.layout
    assert layout is not None, (
        "samples with media for a model that servers are sent none for are refused before"
    )
    arrays = [
        [ShownArray.of(*shown, weights=weights) for shown in _shown(piece, layout, model.extractor)]
        for piece in samples[0].media
    ]
    shown = [_written(array) for of_piece in arrays for array in of_piece]
    kinds = [[array.modality for array in of_piece] for of_piece in arrays]
    return [
        HEAD + json.dumps(_placed(sample, layout, kinds) | ({} if place else {"shown": shown}))
        for place, sample in enumerate(samples)
    ]


def read(sent: Sequence[str]) -> list[tuple[list[ShownArray], Placing]]:
    """Read what `requested` has returned: the arrays, which all prompts share, and where they stand
    in each.

    Raises:
        KeyError, TypeError, ValueError: It is something else.
    """
    said = [json.loads(text.removeprefix(HEAD)) for text in sent]
    shown = [ShownArray.read(array) for array in said[0]["shown"]]
    return [(shown, Placing.read(one)) for one in said]


def _shown(
    piece: ProcessedMedia, layout: MediaLayout, extractor: Any
) -> Iterator[tuple[Modality, NDArray[Any], PictureGeometry | None]]:
    """Give what is seen of a piece, then what is heard: of a clip that may be both."""
    if piece.pixels is not None:
        yield modality_of(piece.reference), piece.pixels, layout.pictures.geometry
    if piece.samples is not None:
        yield Modality.AUDIO, spectrum_of(piece, extractor).numpy(), None


def _written(array: ShownArray) -> dict[str, Any]:
    geometry = (
        None
        if array.geometry is None
        else {name: getattr(array.geometry, name) for name in GEOMETRY}
    )
    return {
        "modality": array.modality.value,
        "values": _base64(array.values),
        "geometry": geometry,
        "identity": array.identity.hex(),
    }


def _placed(
    sample: Sample, layout: MediaLayout, kinds: Sequence[Sequence[Modality]]
) -> dict[str, Any]:
    """Say where arrays stand: `kinds` are those of each piece."""
    tokens, references = sample.sequence, [piece.reference for piece in sample.media]
    given = np.append(sample.given, np.zeros(len(sample.tokens), bool))
    cells = layout.cells(tokens, given, references)
    runs, first = [], 0
    for piece, modalities in zip(sample.media, kinds, strict=True):
        here = cells[first : first + sum(map(len, layout.blocks(piece.reference)))]
        runs += [
            _runs(here[tokens[here] == layout.placeholders[modality]]) for modality in modalities
        ]
        first += len(here)
    return {
        "runs": runs,
        "positions": _base64(layout.positions(len(tokens), cells, references)),
        "shift": sample.position_shift,
    }


def _runs(cells: NDArray[np.int64]) -> list[Place]:
    """Return the first and last of each run of neighbours."""
    ends = np.flatnonzero(np.diff(cells) > 1)
    firsts, lasts = cells[np.append(0, ends + 1)], cells[np.append(ends, len(cells) - 1)]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _base64(values: NDArray[Any]) -> dict[str, Any]:
    return {
        "dtype": values.dtype.str,
        "shape": list(values.shape),
        "data": base64.b64encode(np.ascontiguousarray(values).data).decode(),
    }


def _array(given: Mapping[str, Any]) -> NDArray[Any]:
    data = bytearray(base64.b64decode(given["data"], validate=True))
    return np.frombuffer(data, np.dtype(given["dtype"])).reshape(given["shape"])
