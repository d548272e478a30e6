"""Reduces media of samples to what a page shows: re-encoded from the model's inputs, never the
original file of an untrusted producer.
"""

from __future__ import annotations

from io import BytesIO

import numpy as np
from jaxtyping import UInt8

from relax_events.errors import EnvironmentProblem
from relax_events.media.model_inputs import ProcessedMedia

MAX_SIDE = 320
MAX_FRAMES = 8
MAX_SECONDS = 10
Frame = UInt8[np.ndarray, "height width 3"]


def select_frames(media_input: ProcessedMedia) -> list[Frame]:
    """Return the image, or frames of the video: all that the model gets, or an even selection of
    many.
    """
    if media_input.pixels is None:
        return []
    frames = media_input.pixels if media_input.pixels.ndim == 4 else media_input.pixels[None]
    chosen = np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES)).round().astype(int)
    return [frames[index] for index in chosen]


def encode_png(frame: Frame, file: BytesIO) -> None:
    """Write a frame as PNG, reduced where it is large.

    Raises:
        EnvironmentProblem: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem(
            f"images in a page need the package pillow ({error}); install relax-events[media]"
        ) from None
    image = Image.fromarray(frame)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    image.save(file, "PNG")
