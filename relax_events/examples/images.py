"""Synthetic images: tasks on the colour, number and position of shapes."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Annotated

import numpy as np
from jaxtyping import UInt8
from pydantic import Field

from relax_events.config.base import Section
from relax_events.errors import EnvironmentProblem
from relax_events.events.parts import Modality
from relax_events.examples.media_tasks import SyntheticItem, SyntheticKind

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 220),
    "yellow": (220, 220, 30),
    "white": (240, 240, 240),
    "pink": (240, 100, 200),
}
COUNTS = ("one", "two", "three", "four")
CORNERS = ("top left", "top right", "bottom left", "bottom right")
QUESTIONS = {
    "colour": "What colour is the square?",
    "count": "How many squares are there?",
    "where": "Where is the square?",
}
GREY = 180
NOISE, SHADE = 60, 15
"""Maximum brightness of the background noise, and maximum deviation of a square's colour."""
Canvas = UInt8[np.ndarray, "side side 3"]


class SceneOptions(Section):
    """What `data.options` may hold."""

    pixels: Annotated[int, Field(ge=16, le=1024)] = 32
    """Pixels of a side."""


def _colour(generator: np.random.Generator, options: SceneOptions) -> SyntheticItem:
    name, canvas = (
        list(COLOURS)[generator.integers(len(COLOURS))],
        background(generator, options.pixels),
    )
    _square(generator, canvas, name)
    return SyntheticItem(name, _png(canvas))


def _count(generator: np.random.Generator, options: SceneOptions) -> SyntheticItem:
    number = int(generator.integers(len(COUNTS)))
    canvas, cell = background(generator, options.pixels), options.pixels // 4
    for place in generator.choice(16, number + 1, replace=False):
        y, x = divmod(int(place), 4)
        fill(
            generator,
            canvas[y * cell + 1 : (y + 1) * cell - 1, x * cell + 1 : (x + 1) * cell - 1],
            "white",
        )
    return SyntheticItem(COUNTS[number], _png(canvas))


def _where(generator: np.random.Generator, options: SceneOptions) -> SyntheticItem:
    corner = int(generator.integers(len(CORNERS)))
    canvas, half = background(generator, options.pixels), options.pixels // 2
    y, x = (half * place for place in divmod(corner, 2))
    fill(
        generator,
        canvas[y + 2 : y + half - 2, x + 2 : x + half - 2],
        list(COLOURS)[generator.integers(len(COLOURS))],
    )
    return SyntheticItem(CORNERS[corner], _png(canvas))


def _zoom(generator: np.random.Generator, options: SceneOptions) -> SyntheticItem:
    """Draw a square in a quarter of an image, and a small image of the whole, in grey: only the
    zoomed image shows the colour.
    """
    name, corner = (
        list(COLOURS)[generator.integers(len(COLOURS))],
        int(generator.integers(len(CORNERS))),
    )
    canvas, half = background(generator, options.pixels * 2), options.pixels
    y, x = (half * place for place in divmod(corner, 2))
    _square(generator, canvas[y : y + half, x : x + half], name)
    small, quarter = np.repeat(background(generator, half)[..., :1], 3, axis=-1), half // 2
    small[y // 2 + 2 : y // 2 + quarter - 2, x // 2 + 2 : x // 2 + quarter - 2] = GREY
    original = base64.b64encode(_png(canvas)).decode()
    metadata = {
        "original": f"data:image/png;base64,{original}",
        "then": QUESTIONS["colour"],
        "answers": [CORNERS[corner], name],
    }
    return SyntheticItem(name, _png(small), metadata)


def _square(generator: np.random.Generator, area: Canvas, colour: str) -> None:
    pixels = len(area)
    side = int(generator.integers(pixels // 3, pixels // 2 + 1))
    x, y = generator.integers(0, pixels - side, 2)
    fill(generator, area[y : y + side, x : x + side], colour)


def background(generator: np.random.Generator, pixels: int) -> Canvas:
    """Generate dark noise."""
    return generator.integers(0, NOISE, (pixels, pixels, 3)).astype(np.uint8)


def fill(
    generator: np.random.Generator, area: UInt8[np.ndarray, "rows columns 3"], colour: str
) -> None:
    """Paint an area in a shade of a colour."""
    area[:] = np.clip(
        np.array(COLOURS[colour]) + generator.integers(-SHADE, SHADE, area.shape), 0, 255
    )


def _png(canvas: Canvas) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem(
            f"synthetic_images: sources need the package pillow ({error}); install "
            "relax-events[media]"
        ) from None
    file = BytesIO()
    Image.fromarray(canvas).save(file, "PNG")
    return file.getvalue()


SYNTHETIC_IMAGES = SyntheticKind(
    Modality.IMAGE,
    SceneOptions,
    {
        "colour": (QUESTIONS["colour"], _colour),
        "count": (QUESTIONS["count"], _count),
        "where": (QUESTIONS["where"], _where),
        "zoom": (QUESTIONS["colour"], _zoom),
    },
)
