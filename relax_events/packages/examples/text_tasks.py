"""The prompt source `synthetic_text`: tasks of texts for agents, generated on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from relax_events.api.errors import ConfigError
from relax_events.api.events import ChatMessage, Modality
from relax_events.api.prompts import InvalidRows, PromptRow, RowsConfig, add_system_prompt
from relax_events.packages.examples.nim import make_game
from relax_events.packages.examples.repair import make_bug
from relax_events.packages.examples.retrieval import make_question

SEED_STRIDE = 1_000_003


TASKS: Mapping[str, Callable[[np.random.Generator], tuple[str, str, dict[str, Any]]]] = {
    "nim": make_game,
    "multi_hop": make_question,
    "repair": make_bug,
}
"""Makes prompt, answer and metadata of each task's problems, by name."""


@dataclass(frozen=True, slots=True)
class TextKind:
    """The kind of prompt source; see `PromptSourceKind`."""

    modality: Modality = Modality.TEXT

    def open(self, name: str, task: str, config: RowsConfig, *, seed: int) -> TextSource:
        """See `PromptSourceKind`."""
        if task not in TASKS:
            raise ConfigError(
                f"{name} has no task {task!r}; set data.source = '{name}:<task>' to one of "
                f"{', '.join(TASKS)}"
            )
        if config.options:
            raise ConfigError(
                f"{name}:{task} takes no data.options, got {dict(config.options)}; leave them out"
            )
        return TextSource(f"{name}:{task}", task, config, seed=seed)


class TextSource:
    """Problems of one task: seed and index determine a problem."""

    def __init__(self, name: str, task: str, config: RowsConfig, *, seed: int) -> None:
        """Create the source.

        Args:
            name: As in run files, for errors.
            task: Name of the task.
            config: Number of rows and system prompt.
            seed: The run's seed.
        """
        self.invalid_rows = InvalidRows("data")
        self._name, self._make, self._config, self._seed = name, TASKS[task], config, seed

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._config.num_problems

    def row(self, index: int) -> PromptRow:
        """Generate one row."""
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self._name}: data.num_problems is {self.num_rows}")
        generator = np.random.default_rng((self._seed * SEED_STRIDE, index))
        prompt, answer, metadata = self._make(generator)
        messages = add_system_prompt(
            [ChatMessage.of_text("user", prompt)], self._config.system_prompt
        )
        return PromptRow(messages, answer, orjson.dumps(metadata).decode())


SYNTHETIC_TEXT = TextKind()
