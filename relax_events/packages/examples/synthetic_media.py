"""Synthetic media tasks.

Images: colour, number and position of squares. Audio: the pitch of a tone, the order of tones.
Videos: the direction of a movement, the order of colours.
"""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float64, UInt8
from pydantic import Field

from relax_events.api.errors import EnvironmentProblem
from relax_events.api.events import Modality
from relax_events.api.prompts import RATE_HERTZ, Section, encode_wav
from relax_events.packages.examples.media_tasks import SyntheticItem, SyntheticKind

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
SHARE_OF_RIGHT_CALLS = 0.5
"""Of the warm-up in `deepeyes`."""
MAX_NOISE, MAX_SHADE = 60, 15
"""Maximum brightness of the background noise, and maximum deviation of a square's colour."""
Canvas = UInt8[np.ndarray, "side side 3"]


class ImageOptions(Section):
    """The keys of `data.options`."""

    pixels: Annotated[int, Field(ge=16, le=1024)] = 32
    """Width and height in pixels."""


def _colour(generator: np.random.Generator, options: ImageOptions) -> SyntheticItem:
    name, canvas = (
        list(COLOURS)[generator.integers(len(COLOURS))],
        background(generator, options.pixels),
    )
    _square(generator, canvas, name)
    return SyntheticItem(name, _png(canvas))


def _count(generator: np.random.Generator, options: ImageOptions) -> SyntheticItem:
    number = int(generator.integers(len(COUNTS)))
    canvas, cell = background(generator, options.pixels), options.pixels // 4
    for cell_index in generator.choice(16, number + 1, replace=False):
        y, x = divmod(int(cell_index), 4)
        fill(
            generator,
            canvas[y * cell + 1 : (y + 1) * cell - 1, x * cell + 1 : (x + 1) * cell - 1],
            "white",
        )
    return SyntheticItem(COUNTS[number], _png(canvas))


def _where(generator: np.random.Generator, options: ImageOptions) -> SyntheticItem:
    corner = int(generator.integers(len(CORNERS)))
    canvas, half = background(generator, options.pixels), options.pixels // 2
    y, x = (half * index for index in divmod(corner, 2))
    fill(
        generator,
        canvas[y + 2 : y + half - 2, x + 2 : x + half - 2],
        list(COLOURS)[generator.integers(len(COLOURS))],
    )
    return SyntheticItem(CORNERS[corner], _png(canvas))


def _zoom(generator: np.random.Generator, options: ImageOptions) -> SyntheticItem:
    """Generate an image with a coloured square in one quarter, and a small grey copy of it.

    The prompt shows the grey copy: only the zoomed quarter shows the colour.
    """
    name, corner = (
        list(COLOURS)[generator.integers(len(COLOURS))],
        int(generator.integers(len(CORNERS))),
    )
    canvas, half = background(generator, options.pixels * 2), options.pixels
    y, x = (half * index for index in divmod(corner, 2))
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


def _deepeyes(generator: np.random.Generator, options: ImageOptions) -> SyntheticItem:
    """Generate the images of `zoom`, with the turns of DeepEyes: a tool call, and a tagged answer.

    The tool call of the warm-up zooms into the quarter with the square in half of the rows, into a
    random quarter in the others: so the model learns to read the colour of a square that it sees.
    """
    item = _zoom(generator, options)
    row, column = (int(generator.integers(2)) for _ in range(2))
    if generator.random() < SHARE_OF_RIGHT_CALLS:
        row, column = divmod(CORNERS.index(item.metadata["answers"][0]), 2)
    corners = [500 * column, 500 * row, 500 * column + 500, 500 * row + 500]
    box = f'{{"name": "image_zoom_in_tool", "arguments": {{"bbox_2d": {corners}}}}}'
    turns = [f"<tool_call>{box}</tool_call>", f"<answer>{item.answer}</answer>"]
    metadata = {"original": item.metadata["original"], "calls": turns}
    return SyntheticItem(item.answer, item.file, metadata)


def _square(generator: np.random.Generator, area: Canvas, colour: str) -> None:
    pixels = len(area)
    side = int(generator.integers(pixels // 3, pixels // 2 + 1))
    x, y = generator.integers(0, pixels - side, 2)
    fill(generator, area[y : y + side, x : x + side], colour)


def background(generator: np.random.Generator, pixels: int) -> Canvas:
    """Generate a square image of dark noise."""
    return generator.integers(0, MAX_NOISE, (pixels, pixels, 3)).astype(np.uint8)


def fill(
    generator: np.random.Generator, area: UInt8[np.ndarray, "rows columns 3"], colour: str
) -> None:
    """Paint an area in a shade of a colour."""
    area[:] = np.clip(
        np.array(COLOURS[colour]) + generator.integers(-MAX_SHADE, MAX_SHADE, area.shape), 0, 255
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
    ImageOptions,
    {
        "colour": (QUESTIONS["colour"], _colour),
        "count": (QUESTIONS["count"], _count),
        "where": (QUESTIONS["where"], _where),
        "zoom": (QUESTIONS["colour"], _zoom),
        "deepeyes": (QUESTIONS["colour"], _deepeyes),
    },
)


NOTES = {"do": 262.0, "re": 392.0, "mi": 587.0, "fa": 880.0, "sol": 1319.0, "la": 1976.0}
"""Frequencies in hertz, a fifth apart."""
AMPLITUDE, AUDIO_NOISE, DETUNING = 0.3, 0.02, 0.02
"""Amplitude of a tone, amplitude of its noise, and relative deviation of its frequency."""


class AudioOptions(Section):
    """The keys of `data.options`."""

    seconds: Annotated[float, Field(ge=0.05, le=60)] = 0.4
    """Duration of a tone."""


def _pitch(generator: np.random.Generator, options: AudioOptions) -> SyntheticItem:
    name = list(NOTES)[generator.integers(len(NOTES))]
    return SyntheticItem(name, encode_wav(_tone(generator, NOTES[name], options.seconds)))


def _order(generator: np.random.Generator, options: AudioOptions) -> SyntheticItem:
    """Generate two tones in sequence; the answer is the second."""
    first, last = generator.choice(list(NOTES), 2, replace=False)
    return SyntheticItem(
        str(last),
        encode_wav(
            np.concatenate(
                [_tone(generator, NOTES[name], options.seconds) for name in (first, last)]
            )
        ),
    )


def _tone(
    generator: np.random.Generator, hertz: float, seconds: float
) -> Float64[np.ndarray, " samples"]:
    """Generate a slightly detuned note with noise."""
    time = np.arange(round(seconds * RATE_HERTZ)) / RATE_HERTZ
    frequency = hertz * (1 + DETUNING * generator.standard_normal())
    phase = generator.random() * 2 * np.pi
    tone = AMPLITUDE * np.sin(2 * np.pi * frequency * time + phase)
    return tone + AUDIO_NOISE * generator.standard_normal(len(time))


SYNTHETIC_AUDIO = SyntheticKind(
    Modality.AUDIO,
    AudioOptions,
    {"pitch": ("Which note is it?", _pitch), "order": ("Which note is the last?", _order)},
)


DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
FRAMES_PER_SECOND = 2


class VideoOptions(Section):
    """The keys of `data.options`."""

    pixels: Annotated[int, Field(ge=16, le=1024, multiple_of=2)] = 32
    """Width and height in pixels."""
    frames: Annotated[int, Field(ge=4, le=1024, multiple_of=2)] = 4
    """Number of frames of a video, at two per second."""


def _direction(generator: np.random.Generator, options: VideoOptions) -> SyntheticItem:
    """Generate a video of a square that moves from one side to the other."""
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


def _video_order(generator: np.random.Generator, options: VideoOptions) -> SyntheticItem:
    """Generate a video of a square in two colours in sequence; the answer is the second colour."""
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
    VideoOptions,
    {
        "direction": ("Where does the square move?", _direction),
        "order": ("What colour is the last square?", _video_order),
    },
)
