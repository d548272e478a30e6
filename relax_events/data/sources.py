"""Opens the source of prompts that a run file names."""

from __future__ import annotations

from pathlib import Path

from relax_events.config import DataConfig
from relax_events.data.generated import GeneratedSource
from relax_events.data.jsonl import JsonlSource
from relax_events.data.rows import PromptSource
from relax_events.errors import ConfigError


def open_source(config: DataConfig, *, seed: int) -> PromptSource:
    """Open `data.source`.

    Args:
        config: The run file's data section.
        seed: The run's seed; generated problems follow it.
    Raises:
        ConfigError: The source is of no known kind, or its file, rows, task or options are unfit.
        EnvironmentProblem: The source needs a package that is not installed.
    """
    kind, _, place = config.source.partition(":")
    if kind == "jsonl" and place:
        return JsonlSource(Path(place), config)
    if kind == "reasoning_gym" and place:
        return GeneratedSource(place, config, seed=seed)
    raise ConfigError(f"data.source must be 'jsonl:<path>' or 'reasoning_gym:<task>', got {config.source!r}; set data.source")
