"""Compute an image's target size and number of tokens. Pure arithmetic, without torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Self

from relax_events.config.media import MediaConfig
from relax_events.errors import ConfigError

MAX_ASPECT_RATIO = 200
KNOWN_PROCESSORS = (
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorFast",
    "Qwen2VLImageProcessorPil",
)


@dataclass(frozen=True, slots=True)
class ImageGeometry:
    """The patch size of a model's images, and the number of patches per token.

    Sides are resized to multiples of `side_multiple` pixels; 0 leaves an image unchanged.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_pixels: int
    max_pixels: int
    side_multiple: int

    @classmethod
    def from_settings(cls, processor: Mapping[str, Any], config: MediaConfig) -> Self:
        """Read the patch sizes from a model's `preprocessor_config.json`, and the limits from the
        run file.

        Raises:
            ConfigError: The model's image processor is not supported.
        """
        name = str(processor.get("image_processor_type", KNOWN_PROCESSORS[0]))
        if name not in KNOWN_PROCESSORS:
            raise ConfigError(
                f"the model's image processor is a {name}; supported are "
                f"{', '.join(KNOWN_PROCESSORS)}; use a model of their family"
            )
        patch, merge = int(processor["patch_size"]), int(processor["merge_size"])
        token_pixels = (patch * merge) ** 2
        mean, std = (
            tuple(float(value) for value in processor[key]) for key in ("image_mean", "image_std")
        )
        if len(mean) != 3 or len(std) != 3:
            raise ConfigError(
                "the model's image_mean and image_std must have three values each, got "
                f"{mean} and {std}"
            )
        return cls(
            patch_size=patch,
            merge_size=merge,
            temporal_patch_size=int(processor.get("temporal_patch_size", 2)),
            mean=mean,
            std=std,
            min_pixels=config.image_min_token_num * token_pixels,
            max_pixels=config.image_max_token_num * token_pixels,
            side_multiple=config.image_resize_scale_factor * patch * merge,
        )

    @property
    def token_side(self) -> int:
        """Side of a token in pixels."""
        return self.patch_size * self.merge_size

    @property
    def digest(self) -> str:
        """Identifies these settings in cache names, in hexadecimal."""
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:16]

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """Return height and width of the preprocessed image.

        Raises:
            ValueError: The aspect ratio is too large, or the image must not be resized and its
                sides are not multiples of a token's side.
        Source: `smart_resize` of Qwen2-VL's image processor.
        """
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ValueError(
                f"one side must be at most {MAX_ASPECT_RATIO} times the other, got {width} x "
                f"{height}"
            )
        unit = self.side_multiple
        if not unit:
            if width % self.token_side or height % self.token_side:
                raise ValueError(
                    "model.media.image_resize_scale_factor = 0 resizes nothing, so sides must be "
                    f"multiples of {self.token_side}, got {width} x {height}"
                )
            return height, width
        sides = round(height / unit) * unit, round(width / unit) * unit
        if sides[0] * sides[1] > self.max_pixels:
            excess = math.sqrt(height * width / self.max_pixels)
            return max(unit, math.floor(height / excess / unit) * unit), max(
                unit, math.floor(width / excess / unit) * unit
            )
        if sides[0] * sides[1] < self.min_pixels:
            lack = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * lack / unit) * unit, math.ceil(width * lack / unit) * unit
        return sides

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tokens."""
        target = self.target_size(width, height)
        return target[0] // self.token_side, target[1] // self.token_side
