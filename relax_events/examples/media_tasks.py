"""Questions about media that are made on demand: pictures of `scenes`, `clips` and `tones`, each a
file as anybody's would be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from pydantic import ValidationError

from relax_events.config import RowsConfig
from relax_events.config.base import Section
from relax_events.data.placeholders import MARKERS, with_places
from relax_events.data.rows import PromptRow, UnfitRows, with_system_prompt
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage, Modality
from relax_events.media.items import MediaItem

SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class Drawn:
    """An answer, a file, and what the row's metadata say besides."""

    answer: str
    file: bytes
    metadata: Mapping[str, str | Sequence[str]] = field(default_factory=dict)


Draw = Callable[[np.random.Generator, Any], Drawn]
"""Makes them from a source of chance and the options."""


@dataclass(frozen=True, slots=True)
class DrawnKind:
    """What is made.

    Attributes:
        modality: Of the files.
        options: What `data.options` may hold.
        tasks: A question for each, and what makes its files.
    """

    modality: Modality
    options: type[Section]
    tasks: Mapping[str, tuple[str, Draw]]

    def open(self, name: str, task: str, config: RowsConfig, *, seed: int) -> DrawnSource:
        """See `PromptSourceKind`."""
        return DrawnSource(name, self, task, config, seed=seed)


class DrawnSource:
    """Files with one question each, made on demand: the same seed and index give the same file,
    whatever was made before.
    """

    def __init__(
        self, name: str, kind: DrawnKind, task: str, config: RowsConfig, *, seed: int
    ) -> None:
        """Choose a task.

        Args:
            name: Of the kind, as a run file names it.
            kind: What is made.
            task: One of the kind's.
            config: Gives the number of rows, the options and the system prompt.
            seed: The run's seed.
        Raises:
            ConfigError: There is no such task, or it does not take these options.
        """
        if task not in kind.tasks:
            raise ConfigError(
                f"there are no {name} {task!r}; set data.source = '{name}:<task>' to one of "
                f"{', '.join(kind.tasks)}"
            )
        try:
            self._options = kind.options.model_validate(config.options)
        except ValidationError as error:
            raise ConfigError(
                f"{name}:{task} does not take data.options {config.options}: "
                f"{error.errors()[0]['msg']}"
            ) from None
        self.unfit = UnfitRows("data")
        self._name, self._kind, self._task, self._config, self._seed = (
            f"{name}:{task}",
            kind,
            task,
            config,
            seed,
        )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._config.size

    def row(self, index: int) -> PromptRow:
        """Make one file."""
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self._name}: data.size is {self.rows}")
        question, draw = self._kind.tasks[self._task]
        drawn = draw(np.random.default_rng((self._seed * SEED_STRIDE, index)), self._options)
        modality, place = self._kind.modality, f"{self._name}, row {index}"
        prompt = with_system_prompt(
            [ChatMessage.of_text("user", f"{MARKERS[modality]}{question}")],
            self._config.system_prompt,
        )
        messages, media = with_places(
            prompt, {modality: [MediaItem(modality, drawn.file, place)]}, place=place
        )
        return PromptRow(
            messages,
            drawn.answer,
            orjson.dumps({"task": self._task, **drawn.metadata}).decode(),
            media=media,
        )
