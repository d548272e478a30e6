"""Encode media with a model's vision and audio towers: features for the first decoder layer and,
for images and video, for the next layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from transformers import WhisperFeatureExtractor

from relax_events.media.geometry import ImageGeometry
from relax_events.media.model_inputs import ProcessedMedia

MAX_PIXEL_VALUE = 255.0
Layers = list[Float[Tensor, "features hidden"]]
"""Features of a file: the input of the first decoder layer, then those added after the next layers.
"""


@dataclass(frozen=True, slots=True)
class VisionTower:
    """The vision tower; encodes all files of a forward together, or each `separately`."""

    tower: Any
    geometry: ImageGeometry
    separately: bool

    def encode(self, pieces: Sequence[ProcessedMedia]) -> Iterator[Layers]:
        """Yield the layers of each file."""
        weight = next(self.tower.parameters())
        frames = [torch.from_numpy(piece.pixels).to(weight.device) for piece in pieces]
        patches = [
            cut_patches(one if one.ndim == 4 else one[None], self.geometry).to(weight.dtype)
            for one in frames
        ]
        grids = [self._grid(one) for one in frames]
        for part in (
            (slice(index, index + 1) for index in range(len(pieces)))
            if self.separately
            else (slice(None),)
        ):
            visual = self.tower(
                torch.cat(patches[part]),
                grid_thw=torch.tensor(grids[part], device=weight.device),
                return_dict=True,
            )
            sizes = [
                num_patches * rows * columns // self.geometry.merge_size**2
                for num_patches, rows, columns in grids[part]
            ]
            deep = getattr(visual, "deepstack_features", ())  # missing in Qwen3.5
            yield from map(
                list,
                zip(*(layer.split(sizes) for layer in (visual.pooler_output, *deep)), strict=True),
            )

    def _grid(self, frames: Tensor) -> list[int]:
        num_patches = len(frames) // self.geometry.temporal_patch_size if frames.ndim == 4 else 1
        return [num_patches, *(side // self.geometry.patch_size for side in frames.shape[-3:-1])]


@dataclass(frozen=True, slots=True)
class AudioTower:
    """The audio tower; encodes audio of equal length together, or each `separately`.

    The tower pads different lengths to the longest window, and its convolutions read the padding:
    then features would depend on the other audio in the batch.
    """

    tower: Any
    extractor: Any
    separately: bool

    def encode(self, pieces: Sequence[ProcessedMedia]) -> list[Layers]:
        """Return the layers of each file; audio has one layer."""
        weight = next(self.tower.parameters())
        spectra = [
            log_mel_spectrogram(piece, self.extractor).to(weight.device, weight.dtype)
            for piece in pieces
        ]
        audio: list[Layers] = [[] for _ in pieces]
        for indices in _batches_of_equal_length(
            [spectrum.shape[1] for spectrum in spectra], separately=self.separately
        ):
            lengths = torch.tensor(
                [spectra[index].shape[1] for index in indices], device=weight.device
            )
            features = self.tower(
                torch.cat([spectra[index] for index in indices], dim=1),
                feature_lens=lengths,
                return_dict=True,
            ).last_hidden_state
            for index, part in zip(indices, features.chunk(len(indices)), strict=True):
                audio[index] = [part]
        return audio


def _batches_of_equal_length(lengths: Sequence[int], *, separately: bool) -> Iterable[list[int]]:
    if separately:
        return ([index] for index in range(len(lengths)))
    return (
        [index for index, length in enumerate(lengths) if length == batch_length]
        for batch_length in dict.fromkeys(lengths)
    )


def concatenate_layers(
    pieces: Sequence[Layers],
) -> tuple[Float[Tensor, "features hidden"], list[Float[Tensor, "features hidden"]]]:
    """Concatenate the files' layers; audio has zeros in all but the first layer."""
    depth = max(map(len, pieces))
    first, *others = (
        torch.cat(
            [
                layers[index] if index < len(layers) else torch.zeros_like(layers[0])
                for layers in pieces
            ]
        )
        for index in range(depth)
    )
    return first, others


def load_feature_extractor(path: Path) -> Any:
    """Load the audio feature extractor of the model in a folder."""
    return WhisperFeatureExtractor.from_pretrained(path)


def log_mel_spectrogram(piece: ProcessedMedia, extractor: Any) -> Float[Tensor, "mels frames"]:
    """Compute the log-mel spectrogram of a file's audio, with the extractor of
    `load_feature_extractor`.
    """
    output = extractor(
        piece.samples,
        sampling_rate=extractor.sampling_rate,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="pt",
    )
    spectrum: Tensor = output["input_features"][0][:, output["attention_mask"][0].bool()]
    return spectrum


def cut_patches(
    frames: UInt8[Tensor, "frames height width 3"], geometry: ImageGeometry
) -> Float[Tensor, "patches values"]:
    """Cut frames into normalised patches, ordered by temporal patch, with the patches of a token
    adjacent; a single frame is repeated to fill its temporal patch.

    Source: `Qwen2VLImageProcessor` and `Qwen3VLVideoProcessor` of transformers.
    """
    patch, merge, depth = geometry.patch_size, geometry.merge_size, geometry.temporal_patch_size
    mean, std = (
        torch.tensor(values, device=frames.device) for values in (geometry.mean, geometry.std)
    )
    normal = (frames.float() / MAX_PIXEL_VALUE - mean) / std
    if len(normal) == 1:
        normal = normal.expand(depth, -1, -1, -1)
    num_patches, rows, columns = (
        len(normal) // depth,
        frames.shape[1] // (patch * merge),
        frames.shape[2] // (patch * merge),
    )
    patches = normal.view(num_patches, depth, rows, merge, patch, columns, merge, patch, 3).permute(
        0, 2, 5, 3, 6, 8, 1, 4, 7
    )
    return patches.reshape(num_patches * rows * columns * merge * merge, -1)
