"""Open the prompt sources of a run file, and generate prompts by tasks of the package
reasoning-gym.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import orjson
import structlog

from relax_events.config import DataConfig, EvaluationConfig, EvaluationDatasetConfig, RowsConfig
from relax_events.config.hub_names import PREFIX
from relax_events.data.hub_files import locate_files
from relax_events.data.jsonl import JsonlSource
from relax_events.data.rows import (
    InvalidRows,
    PromptRow,
    PromptSource,
    PromptSourceKind,
    add_system_prompt,
)
from relax_events.data.stream import PromptStream
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.events.parts import ChatMessage, Modality
from relax_events.plugins import PROMPT_SOURCES, list_installed

# A task's problem i comes from seed + i; the stride separates the problems of runs with
# neighbouring seeds.
SEED_STRIDE = 1_000_003


class GeneratedSource:
    """Problems of one reasoning-gym task, generated on demand: the same seed and index give the
    same problem.

    A row's metadata holds the task, its options and the generator's entry. The task's verifier
    needs them to score an answer in another process.
    """

    def __init__(self, task: str, config: RowsConfig, *, seed: int) -> None:
        """Set up the generator.

        Args:
            task: A name that reasoning-gym registers, such as `spell_backward`.
            config: Number of rows, options of the generator, and system prompt.
            seed: The run's seed.
        Raises:
            ConfigError: There is no such task, or it rejects these options.
            EnvironmentProblem: reasoning-gym is not installed.
        """
        self.invalid_rows = InvalidRows("data")
        self._task = task
        self._config = config
        self._problems = create_task(
            task, size=config.num_problems, seed=seed * SEED_STRIDE % 2**31, options=config.options
        )

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._config.num_problems

    def row(self, index: int) -> PromptRow:
        """Generate one problem."""
        if not 0 <= index < self.num_rows:
            raise IndexError(
                f"row {index} of reasoning_gym:{self._task}: data.num_problems is {self.num_rows}"
            )
        entry = self._problems[index]
        messages = add_system_prompt(
            [ChatMessage.of_text("user", entry["question"])], self._config.system_prompt
        )
        metadata = {"task": self._task, "options": self._config.options, "entry": entry}
        text = orjson.dumps(
            metadata, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        ).decode()
        return PromptRow(messages, str(entry["answer"] or ""), text)


def create_task(
    task: str, *, size: int = 1, seed: int = 0, options: dict[str, Any] | None = None
) -> Any:
    """Set up a reasoning-gym task.

    Raises:
        ConfigError: There is no such task, or it rejects these options.
        EnvironmentProblem: reasoning-gym is not installed.
    """
    package = import_reasoning_gym()
    tasks = package.factory.DATASETS
    if task not in tasks:
        raise ConfigError(
            f"reasoning-gym has no task {task!r}; set data.source = 'reasoning_gym:<task>' "
            f"to one of {', '.join(sorted(tasks))}"
        )
    try:
        return package.create_dataset(task, size=size, seed=seed, **(options or {}))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym's task {task!r} rejects data.options {options}: {error}"
        ) from None


def import_reasoning_gym() -> Any:
    """Import the package, which takes seconds.

    Raises:
        EnvironmentProblem: reasoning-gym is not installed.
    """
    try:
        with warnings.catch_warnings():
            # A dependency compares with a string by `is`; users can't fix that warning.
            warnings.simplefilter("ignore")
            import reasoning_gym
    except ImportError as error:
        raise EnvironmentProblem(
            f"reasoning_gym: sources need the package reasoning-gym ({error}); install "
            "relax-events[tasks]"
        ) from None
    return reasoning_gym


log = structlog.get_logger()
GENERATED = "reasoning_gym"
SLICE = re.compile(r"(.*)\[([0-9]*):([0-9]*)\]")
KINDS = "'jsonl:<path>', 'parquet:<file or folder>', 'hf:<org/name>', 'reasoning_gym:<task>'"


def open_source(config: RowsConfig, *, seed: int, section: str = "data") -> PromptSource:
    """Open one source, and log its invalid rows.

    Args:
        config: A dataset of the run file, or its data section if that names a single source.
        seed: The run's seed; generated problems depend on it.
        section: Section of the run file that names the source, for errors.
    Raises:
        ConfigError: The kind of source is unknown, or its file, rows, task or options are invalid.
        EnvironmentProblem: The source needs a package that is not installed.
    """
    source = _open(config, seed=seed, section=section)
    if source.invalid_rows.count:
        log.warning(
            "rows.skipped",
            source=config.source,
            num_rows=source.invalid_rows.count,
            named=source.invalid_rows.examples,
        )
    return source


def open_stream(
    config: DataConfig, *, seed: int, order_seed: int | None = None, shuffle: bool | None = None
) -> PromptStream:
    """Open all sources of a data section as one stream, in the order of the run.

    Args:
        config: The run file's data section.
        seed: The run's seed.
        order_seed: A different seed for the order.
        shuffle: Overrides `data.shuffle`.
    Raises:
        ConfigError: See `open_source`.
        EnvironmentProblem: See `open_source`.
    """
    sources = [
        open_source(part, seed=seed, section=section) for section, part in named_sources(config)
    ]
    is_shuffled = config.shuffle if shuffle is None else shuffle
    return PromptStream(
        *sources,
        seed=seed if order_seed is None else order_seed,
        shuffle=is_shuffled,
        weights=config.weights,
    )


def named_sources(config: DataConfig) -> list[tuple[str, RowsConfig]]:
    """Return the sources of a data section, each with its section name in the run file."""
    if not config.datasets:
        return [("data", config)]
    return [(f"data.datasets[{number}]", dataset) for number, dataset in enumerate(config.datasets)]


def named_evaluation_datasets(
    evaluation: EvaluationConfig,
) -> list[tuple[str, EvaluationDatasetConfig]]:
    """Return the evaluation datasets of a run, each with its section name in the run file."""
    return [
        (f"evaluation.datasets[{number}]", dataset)
        for number, dataset in enumerate(evaluation.datasets)
    ]


def media_modalities(config: RowsConfig) -> set[Modality]:
    """Return the modalities of media that a source's rows may have."""
    kind = _installed_kind(config.source.partition(":")[0])
    return {Modality(name) for name in config.multimodal_keys} | (
        {kind.modality} if kind and kind.modality is not Modality.TEXT else set()
    )


def is_generated(config: RowsConfig) -> bool:
    """Return whether a source's rows are generated by reasoning-gym, whose import takes seconds."""
    return config.source.startswith(f"{GENERATED}:")


def _open(config: RowsConfig, *, seed: int, section: str) -> PromptSource:
    kind, _, path = config.source.partition(":")
    if kind == GENERATED and path:
        return GeneratedSource(path, config, seed=seed)
    if path and (plugin := _installed_kind(kind)) is not None:
        return plugin.open(kind, path, config, seed=seed)
    path, span = _parse_slice(path)
    files: list[Path] = []
    if config.source.startswith(PREFIX):
        files = locate_files(config.source, config.split, key=f"{section}.source")
        kind, path = "parquet" if files[0].suffix == ".parquet" else "jsonl", str(files[0])
    if kind == "jsonl" and path:
        return JsonlSource(Path(path), config, span=span, section=section)
    if kind == "parquet" and path:
        from relax_events.data.parquet import ParquetSource

        return ParquetSource(Path(path), config, files=files, span=span, section=section)
    names = "".join(f", '{name}:<task>'" for name in sorted(list_installed(PROMPT_SOURCES)))
    raise ConfigError(
        f"{section}.source must be one of {KINDS}{names}, got {config.source!r}; set "
        f"{section}.source"
    )


def _installed_kind(name: str) -> PromptSourceKind | None:
    entry = list_installed(PROMPT_SOURCES).get(name)
    if entry is None:
        return None
    kind: PromptSourceKind = entry.load()
    return kind


def _parse_slice(path: str) -> tuple[str, slice]:
    match = SLICE.fullmatch(path)
    if match is None:
        return path, slice(None)
    return match[1], slice(int(match[2] or 0), int(match[3]) if match[3] else None)
