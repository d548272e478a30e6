"""Questions about pictures that are drawn on demand: what colour, how many, where."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Annotated

import numpy as np
import orjson
from jaxtyping import UInt8
from pydantic import Field, ValidationError

from relax_events.config import RowsConfig
from relax_events.config.base import Section
from relax_events.data.placeholders import MARKERS, with_places
from relax_events.data.rows import PromptRow, UnfitRows, with_system_prompt
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.events.parts import ChatMessage, Modality
from relax_events.media.items import MediaItem

SEED_STRIDE = 1_000_003
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
NOISE, SHADE = 60, 15
"""How bright the background's noise is at most, and how far a square's colour strays."""
Canvas = UInt8[np.ndarray, "side side 3"]


class SceneOptions(Section):
    """What `data.options` may hold."""

    pixels: Annotated[int, Field(ge=16, le=1024)] = 32
    """Of a side."""


class SceneSource:
    """Pictures with one question each, made on demand: the same seed and index give the same picture, whatever was made before."""

    def __init__(self, task: str, config: RowsConfig, *, seed: int) -> None:
        """Choose a task.

        Args:
            task: `colour`, `count` or `where`.
            config: Gives the number of rows, the options and the system prompt.
            seed: The run's seed.
        Raises:
            ConfigError: There is no such task, or it does not take these options.
        """
        if task not in TASKS:
            raise ConfigError(f"there are no scenes {task!r}; set data.source = 'scenes:<task>' to one of {', '.join(TASKS)}")
        try:
            self._pixels = SceneOptions.model_validate(config.options).pixels
        except ValidationError as error:
            raise ConfigError(f"scenes:{task} does not take data.options {config.options}: {error.errors()[0]['msg']}") from None
        self.unfit = UnfitRows("data")
        self._task, self._config, self._seed = task, config, seed

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._config.size

    def row(self, index: int) -> PromptRow:
        """Draw one picture."""
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of scenes:{self._task}: data.size is {self.rows}")
        question, draw = TASKS[self._task]
        answer, canvas = draw(np.random.default_rng((self._seed * SEED_STRIDE, index)), self._pixels)
        place = f"scenes:{self._task}, row {index}"
        prompt = with_system_prompt([ChatMessage.of_text("user", f"{MARKERS[Modality.IMAGE]}{question}")], self._config.system_prompt)
        messages, media = with_places(prompt, {Modality.IMAGE: [MediaItem(Modality.IMAGE, _png(canvas), place)]}, place=place)
        return PromptRow(messages, answer, orjson.dumps({"task": self._task}).decode(), media=media)


def _colour(generator: np.random.Generator, pixels: int) -> tuple[str, Canvas]:
    name = list(COLOURS)[generator.integers(len(COLOURS))]
    canvas = _background(generator, pixels)
    side = int(generator.integers(pixels // 3, pixels // 2 + 1))
    x, y = generator.integers(0, pixels - side, 2)
    _fill(generator, canvas[y : y + side, x : x + side], name)
    return name, canvas


def _count(generator: np.random.Generator, pixels: int) -> tuple[str, Canvas]:
    number = int(generator.integers(len(COUNTS)))
    canvas, cell = _background(generator, pixels), pixels // 4
    for place in generator.choice(16, number + 1, replace=False):
        y, x = divmod(int(place), 4)
        _fill(generator, canvas[y * cell + 1 : (y + 1) * cell - 1, x * cell + 1 : (x + 1) * cell - 1], "white")
    return COUNTS[number], canvas


def _where(generator: np.random.Generator, pixels: int) -> tuple[str, Canvas]:
    corner = int(generator.integers(len(CORNERS)))
    canvas, half = _background(generator, pixels), pixels // 2
    y, x = (half * place for place in divmod(corner, 2))
    _fill(generator, canvas[y + 2 : y + half - 2, x + 2 : x + half - 2], list(COLOURS)[generator.integers(len(COLOURS))])
    return CORNERS[corner], canvas


def _background(generator: np.random.Generator, pixels: int) -> Canvas:
    return generator.integers(0, NOISE, (pixels, pixels, 3)).astype(np.uint8)


def _fill(generator: np.random.Generator, area: UInt8[np.ndarray, "rows columns 3"], colour: str) -> None:
    area[:] = np.clip(np.array(COLOURS[colour]) + generator.integers(-SHADE, SHADE, area.shape), 0, 255)


def _png(canvas: Canvas) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem(f"scenes: sources need the package pillow ({error}); install relax-events[media]") from None
    file = BytesIO()
    Image.fromarray(canvas).save(file, "PNG")
    return file.getvalue()


Draw = Callable[[np.random.Generator, int], tuple[str, Canvas]]
TASKS: dict[str, tuple[str, Draw]] = {
    "colour": ("What colour is the square?", _colour),
    "count": ("How many squares are there?", _count),
    "where": ("Where is the square?", _where),
}
