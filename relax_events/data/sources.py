"""Open the prompt sources of a run file."""

from __future__ import annotations

import re
from pathlib import Path

import structlog

from relax_events.config import DataConfig, EvaluationDatasetConfig, RowsConfig, RunConfig
from relax_events.data.generated import GeneratedSource
from relax_events.data.jsonl import JsonlSource
from relax_events.data.rows import PromptSource, PromptSourceKind
from relax_events.data.stream import PromptStream
from relax_events.errors import ConfigError
from relax_events.events.parts import Modality
from relax_events.plugins import PROMPT_SOURCES, list_installed

log = structlog.get_logger()
GENERATED = "reasoning_gym"
SLICE = re.compile(r"(.*)\[([0-9]*):([0-9]*)\]")
KINDS = "'jsonl:<path>', 'parquet:<file or folder>', 'reasoning_gym:<task>'"


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
    chosen = config.shuffle if shuffle is None else shuffle
    return PromptStream(
        *sources,
        seed=seed if order_seed is None else order_seed,
        shuffle=chosen,
        weights=config.weights,
    )


def named_sources(config: DataConfig) -> list[tuple[str, RowsConfig]]:
    """Return the sources of a data section, each with its section name in the run file."""
    if not config.datasets:
        return [("data", config)]
    return [(f"data.datasets[{number}]", dataset) for number, dataset in enumerate(config.datasets)]


def named_evaluation_datasets(config: RunConfig) -> list[tuple[str, EvaluationDatasetConfig]]:
    """Return the evaluation datasets of a run, each with its section name in the run file."""
    return [
        (f"evaluation.datasets[{number}]", dataset)
        for number, dataset in enumerate(config.evaluation.datasets)
    ]


def media_modalities(config: RowsConfig) -> set[Modality]:
    """Return the modalities of media that a source's rows may have."""
    kind = _installed_kind(config.source.partition(":")[0])
    return {Modality(name) for name in config.multimodal_keys} | (
        {kind.modality} if kind else set()
    )


def is_generated(config: RowsConfig) -> bool:
    """Return whether a package that takes seconds to import generates a source's rows."""
    return config.source.startswith(f"{GENERATED}:")


def _open(config: RowsConfig, *, seed: int, section: str) -> PromptSource:
    kind, _, path = config.source.partition(":")
    if kind == GENERATED and path:
        return GeneratedSource(path, config, seed=seed)
    if path and (plugin := _installed_kind(kind)) is not None:
        return plugin.open(kind, path, config, seed=seed)
    path, span = _parse_slice(path)
    if kind == "jsonl" and path:
        return JsonlSource(Path(path), config, span=span, section=section)
    if kind == "parquet" and path:
        from relax_events.data.parquet import ParquetSource

        return ParquetSource(Path(path), config, span=span, section=section)
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
