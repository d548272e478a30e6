"""The prompt sources `synthetic_images`, `synthetic_videos` and `synthetic_audio`: questions about
media files that are generated on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from pydantic import ValidationError

from relax_events.api.errors import ConfigError
from relax_events.api.events import ChatMessage, Modality
from relax_events.api.prompts import (
    PLACEHOLDERS,
    InvalidRows,
    MediaItem,
    PromptRow,
    RowsConfig,
    Section,
    add_system_prompt,
    split_at_placeholders,
)

SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class SyntheticItem:
    """A generated media file with its answer and further metadata of the row."""

    answer: str
    file: bytes
    metadata: Mapping[str, str | Sequence[str]] = field(default_factory=dict)


ItemGenerator = Callable[[np.random.Generator, Any], SyntheticItem]
"""Generates an item from a random generator and the options."""


@dataclass(frozen=True, slots=True)
class SyntheticKind:
    """A kind of prompt source: the modality of its files, and its tasks.

    Attributes:
        modality: Modality of the files.
        options: Schema of `data.options`.
        tasks: Question and generator of each task, by name.
    """

    modality: Modality
    options: type[Section]
    tasks: Mapping[str, tuple[str, ItemGenerator]]

    def open(self, name: str, task: str, config: RowsConfig, *, seed: int) -> SyntheticSource:
        """See `PromptSourceKind`."""
        return SyntheticSource(name, self, task, config, seed=seed)


class SyntheticSource:
    """Media files with one question each, generated on demand: seed and index determine the
    file.
    """

    def __init__(
        self, name: str, kind: SyntheticKind, task: str, config: RowsConfig, *, seed: int
    ) -> None:
        """Create the source of one task.

        Args:
            name: Name of the kind in run files.
            kind: The kind.
            task: Name of a task of the kind.
            config: Number of rows, options and system prompt.
            seed: The run's seed.
        Raises:
            ConfigError: There is no such task, or it rejects these options.
        """
        if task not in kind.tasks:
            raise ConfigError(
                f"{name} has no task {task!r}; set data.source = '{name}:<task>' to one of "
                f"{', '.join(kind.tasks)}"
            )
        try:
            self._options = kind.options.model_validate(config.options)
        except ValidationError as error:
            raise ConfigError(
                f"{name}:{task} rejects data.options {config.options}: {error.errors()[0]['msg']}"
            ) from None
        self.invalid_rows = InvalidRows("data")
        self._name, self._kind, self._task, self._config, self._seed = (
            f"{name}:{task}",
            kind,
            task,
            config,
            seed,
        )

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._config.num_problems

    def row(self, index: int) -> PromptRow:
        """Generate one row."""
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self._name}: data.num_problems is {self.num_rows}")
        question, generate = self._kind.tasks[self._task]
        item = generate(np.random.default_rng((self._seed * SEED_STRIDE, index)), self._options)
        modality, location = self._kind.modality, f"{self._name}, row {index}"
        prompt = add_system_prompt(
            [ChatMessage.of_text("user", f"{PLACEHOLDERS[modality]}{question}")],
            self._config.system_prompt,
        )
        messages, media = split_at_placeholders(
            prompt, {modality: [MediaItem(modality, item.file, location)]}, location=location
        )
        return PromptRow(
            messages,
            item.answer,
            orjson.dumps({"task": self._task, **item.metadata}).decode(),
            media=media,
        )
