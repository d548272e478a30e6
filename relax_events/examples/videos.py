"""Synthetic videos: tasks on the direction of a movement and on the order of scenes."""

from __future__ import annotations

from io import BytesIO
from typing import Annotated, Any

import numpy as np
from jaxtyping import UInt8
from pydantic import Field

from relax_events.config.base import Section
from relax_events.errors import EnvironmentProblem
from relax_events.events.parts import Modality
from relax_events.examples.images import COLOURS, background, fill
from relax_events.examples.media_tasks import SyntheticItem, SyntheticKind

DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
FRAMES_PER_SECOND = 2


class ClipOptions(Section):
    """What `data.options` may hold."""

    pixels: Annotated[int, Field(ge=16, le=1024, multiple_of=2)] = 32
    """Pixels of a side."""
    frames: Annotated[int, Field(ge=4, le=1024, multiple_of=2)] = 4
    """Of a clip, two a second."""


def _direction(generator: np.random.Generator, options: ClipOptions) -> SyntheticItem:
    """Generate a square that moves from one side to the other."""
    name = list(DIRECTIONS)[generator.integers(len(DIRECTIONS))]
    pixels, colour = options.pixels, list(COLOURS)[generator.integers(len(COLOURS))]
    side = pixels // 3
    across = int(generator.integers(0, pixels - side + 1))
    steps = np.linspace(0, pixels - side, options.frames).round().astype(int)
    down, right = DIRECTIONS[name]
    frames = []
    for step in steps if down + right > 0 else steps[::-1]:
        y, x = (int(step), across) if down else (across, int(step))
        canvas = background(generator, pixels)
        fill(generator, canvas[y : y + side, x : x + side], colour)
        frames.append(canvas)
    return SyntheticItem(name, encode_video(frames))


def _order(generator: np.random.Generator, options: ClipOptions) -> SyntheticItem:
    """Generate a square of one colour and then of another; the answer is the second."""
    first, last = generator.choice(list(COLOURS), 2, replace=False)
    side = options.pixels // 2
    frames = []
    for index in range(options.frames):
        canvas = background(generator, options.pixels)
        y, x = generator.integers(0, options.pixels - side, 2)
        fill(
            generator,
            canvas[y : y + side, x : x + side],
            str(first if index < options.frames // 2 else last),
        )
        frames.append(canvas)
    return SyntheticItem(str(last), encode_video(frames))


def encode_video(frames: list[UInt8[np.ndarray, "side side 3"]]) -> bytes:
    """Write frames as an MP4 file; the same frames give the same bytes.

    Raises:
        EnvironmentProblem: The package av is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise EnvironmentProblem(
            f"synthetic_videos: sources need the package av ({error}); install relax-events[media]"
        ) from None
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream(
            "mpeg4", rate=FRAMES_PER_SECOND, options={"qmin": "2", "qmax": "2"}
        )
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv420p"
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


SYNTHETIC_VIDEOS = SyntheticKind(
    Modality.VIDEO,
    ClipOptions,
    {
        "direction": ("Where does the square move?", _direction),
        "order": ("What colour is the last square?", _order),
    },
)
