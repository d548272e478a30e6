"""Check image headers before decoding, and decode images."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from relax_events.config.media import MediaConfig
from relax_events.errors import EnvironmentProblem, MediaError
from relax_events.media.facts import MediaFacts, broken_file, require_bytes, require_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Accepted formats; Pillow's other decoders never read untrusted bytes."""
ORIENTATION_TAG = 0x0112
SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)
WITHOUT_ORIENTATION = ("PNG",)
"""Formats whose orientation is ignored: they store it after the pixels, but width and height must
follow from the header.
"""
DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    struct.error,
    zlib.error,
)
"""Errors that Pillow raises for a file that differs from its header."""
Pixels = UInt8[np.ndarray, "height width 3"]


def inspect_image(data: bytes, *, limits: MediaConfig, location: str) -> MediaFacts:
    """Read an image's header; nothing is decoded.

    Args:
        data: The file.
        limits: Limits of bytes and pixels.
        location: File and row, for errors.
    Raises:
        MediaError: The file is too large, claims too many pixels, or has no supported format.
    """
    with _open_image(data, limits, location) as image:
        width, height = (
            image.size[::-1] if _orientation(image) in SIDEWAYS_ORIENTATIONS else image.size
        )
        return MediaFacts(f"image/{(image.format or '').lower()}", width, height)


def decode_image(
    data: bytes, *, size: tuple[int, int], limits: MediaConfig, location: str
) -> Pixels:
    """Decode an image, upright, without transparency, at a size; of several frames only the first.

    Args:
        data: The file.
        size: Height and width of the result.
        limits: Limits of bytes and pixels.
        location: File and row, for errors.
    Raises:
        MediaError: As for `inspect_image`, or the file is truncated or damaged.
    """
    from PIL import ImageOps

    with _open_image(data, limits, location) as image:
        try:
            upright = (
                image if image.format in WITHOUT_ORIENTATION else ImageOps.exif_transpose(image)
            ).convert("RGB")
        except DECODING_ERRORS as error:
            raise broken_file(location, error) from None
        return resize(upright, size)


def resize(image: Image, size: tuple[int, int]) -> Pixels:
    """Return the pixels of an image or frame at a height and width."""
    from PIL.Image import Resampling

    height, width = size
    resized = (
        image
        if image.size == (width, height)
        else image.resize((width, height), Resampling.BICUBIC)
    )
    return np.asarray(resized, np.uint8)


@contextmanager
def _open_image(data: bytes, limits: MediaConfig, location: str) -> Iterator[Image]:
    require_bytes(data, limits, location)
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise EnvironmentProblem(
            f"images need the package pillow ({error}); install relax-events[media]"
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # require_pixels has the limit; other warnings are about unusual headers
        try:
            image = Image.open(BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise MediaError(
                f"{location} claims too many pixels: {error}", reason="too_many_pixels"
            ) from None
        except (UnidentifiedImageError, *DECODING_ERRORS):
            raise MediaError(
                (
                    f"{location} begins with {data[:8]!r}, which is not an image of the formats "
                    f"{', '.join(FORMATS)}"
                ),
                reason="wrong_type",
            ) from None
        with image:
            require_pixels(image.width, image.height, limits, location)
            yield image


def _orientation(image: Image) -> int:
    return (
        1 if image.format in WITHOUT_ORIENTATION else int(image.getexif().get(ORIENTATION_TAG, 1))
    )
