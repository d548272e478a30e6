"""Encode preprocessed images, video and audio for a server, which never processes a file itself.

A request contains each array once, with its first prompt. Every prompt contains the token ranges of
the arrays and all rotary positions, so the server does not expand placeholders.
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

from relax_events.engines.requests import SampleState
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.events.parts import Modality
from relax_events.media.geometry import ImageGeometry
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.media.token_layout import MediaLayout, read_modality
from relax_events.media.towers import log_mel_spectrogram

FORMAT = "relax-events.media.3"
"""Name and version of the format."""
PREFIX = f"{FORMAT}:"
"""Prefix of the JSON text. SGLang rejects objects with unknown keys, but accepts any text as a URL.
"""
GEOMETRY = ("patch_size", "merge_size", "temporal_patch_size", "mean", "std")
TokenRange = tuple[int, int]
"""First and last token of a run of placeholders."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaArray:
    """Input of a tower for one media file.

    Attributes:
        modality: Image, video, or audio, also for the audio of a video.
        values: Pixels of the image or of the video's frames; for audio the spectrogram, [mels,
            frames].
        geometry: Geometry of the patches; None for audio.
        identity: SHA-256 of all inputs that determine the tower's features, including the name of
            the weights.
    """

    modality: Modality
    values: NDArray[Any]
    geometry: ImageGeometry | None
    identity: bytes

    @classmethod
    def new(
        cls,
        modality: Modality,
        values: NDArray[Any],
        geometry: ImageGeometry | None,
        *,
        weights: str,
    ) -> MediaArray:
        """Create an array with its identity under some weights."""
        settings = repr(
            (weights, modality.value, values.shape, None if geometry is None else geometry.digest)
        ).encode()
        return cls(
            modality,
            values,
            geometry,
            hashlib.sha256(settings + np.ascontiguousarray(values).data).digest(),
        )

    @classmethod
    def parse(cls, encoded: Mapping[str, Any]) -> MediaArray:
        """Parse the output of `_encode_array`."""
        geometry = None
        if (fields := encoded["geometry"]) is not None:
            geometry_fields: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in fields.items()
            }
            geometry = ImageGeometry(**geometry_fields, min_pixels=0, max_pixels=0, side_multiple=0)
        return cls(
            Modality(encoded["modality"]),
            _decode_array(encoded["values"]),
            geometry,
            bytes.fromhex(encoded["identity"]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MediaPlacement:
    """Token ranges of a prompt's arrays.

    Attributes:
        runs: Token ranges of each array.
        positions: Rotary positions of all tokens, [3, tokens].
        shift: Rotary position after the prompt minus its length.
    """

    runs: list[list[TokenRange]]
    positions: NDArray[np.int64]
    shift: int

    @classmethod
    def parse(cls, encoded: Mapping[str, Any]) -> MediaPlacement:
        """Parse the output of `_encode_placement`."""
        runs = [[(int(first), int(last)) for first, last in one] for one in encoded["runs"]]
        return cls(runs, _decode_array(encoded["positions"]), int(encoded["shift"]))


def build_image_data(
    samples: Sequence[SampleState], model: ModelFolder, *, weights: str
) -> list[str]:
    """Return a request's `image_data`, one text per prompt; the first one has the arrays.

    Args:
        samples: Samples of one prompt group, and so with the same media.
        model: The served model.
        weights: Name of the loaded weights; the server must not use cached features of others.
    """
    layout = model.layout
    assert layout is not None, (
        "samples with media are rejected earlier if the engine can't send them"
    )
    arrays = [
        [
            MediaArray.new(*parts, weights=weights)
            for parts in _split_modalities(piece, layout, model.extractor)
        ]
        for piece in samples[0].media
    ]
    encoded = [_encode_array(array) for of_piece in arrays for array in of_piece]
    kinds = [[array.modality for array in of_piece] for of_piece in arrays]
    return [
        PREFIX
        + json.dumps(
            _encode_placement(sample, layout, kinds) | ({} if index else {"arrays": encoded})
        )
        for index, sample in enumerate(samples)
    ]


def parse_image_data(sent: Sequence[str]) -> list[tuple[list[MediaArray], MediaPlacement]]:
    """Parse the output of `build_image_data`: the arrays, shared by all prompts, and their token
    ranges in each prompt.

    Raises:
        KeyError, TypeError, ValueError: It has another format.
    """
    messages = [json.loads(text.removeprefix(PREFIX)) for text in sent]
    arrays = [MediaArray.parse(array) for array in messages[0]["arrays"]]
    return [(arrays, MediaPlacement.parse(message)) for message in messages]


def _split_modalities(
    piece: ProcessedMedia, layout: MediaLayout, extractor: Any
) -> Iterator[tuple[Modality, NDArray[Any], ImageGeometry | None]]:
    """Yield the visual input of a file, then its audio input; a video may have both."""
    if piece.pixels is not None:
        yield read_modality(piece.reference), piece.pixels, layout.images.geometry
    if piece.samples is not None:
        yield Modality.AUDIO, log_mel_spectrogram(piece, extractor).numpy(), None


def _encode_array(array: MediaArray) -> dict[str, Any]:
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


def _encode_placement(
    sample: SampleState, layout: MediaLayout, kinds: Sequence[Sequence[Modality]]
) -> dict[str, Any]:
    """Encode the token ranges of a prompt's arrays; `kinds` are the modalities of each file."""
    tokens, references = sample.sequence, [piece.reference for piece in sample.media]
    is_input = np.append(sample.is_input, np.zeros(len(sample.tokens), bool))
    indices = layout.find_media_tokens(tokens, is_input, references)
    runs, first = [], 0
    for piece, modalities in zip(sample.media, kinds, strict=True):
        of_piece = indices[first : first + sum(map(len, layout.blocks(piece.reference)))]
        runs += [
            _token_ranges(of_piece[tokens[of_piece] == layout.placeholders[modality]])
            for modality in modalities
        ]
        first += len(of_piece)
    return {
        "runs": runs,
        "positions": _base64(layout.rotary_positions(len(tokens), indices, references)),
        "shift": sample.position_shift,
    }


def _token_ranges(indices: NDArray[np.int64]) -> list[TokenRange]:
    """Return the first and last index of each consecutive run."""
    ends = np.flatnonzero(np.diff(indices) > 1)
    firsts, lasts = indices[np.append(0, ends + 1)], indices[np.append(ends, len(indices) - 1)]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _base64(values: NDArray[Any]) -> dict[str, Any]:
    return {
        "dtype": values.dtype.str,
        "shape": list(values.shape),
        "data": base64.b64encode(np.ascontiguousarray(values).data).decode(),
    }


def _decode_array(encoded: Mapping[str, Any]) -> NDArray[Any]:
    data = bytearray(base64.b64decode(encoded["data"], validate=True))
    return np.frombuffer(data, np.dtype(encoded["dtype"])).reshape(encoded["shape"])
