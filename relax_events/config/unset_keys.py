"""Which keys of a run file are yet to be derived, and how their values get there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_events.config.base import Section
from relax_events.config.run_config import RunConfig

THREAD_KEYS = (
    "engine.threads",
    "judge.engine.threads",
    "critic.threads",
    "teacher.threads",
    "trainer.threads",
)
OF_MACHINE = frozenset({*THREAD_KEYS, "trainer.max_tokens_per_micro_batch"})
"""Keys that the machine decides too: a worker that is started by itself takes those of its own
machine."""
OF_RUN = (
    "trainer.learning_rate",
    "model.dtype",
    "judge.dtype",
    "teacher.dtype",
    "engine.max_context_tokens",
    "engine.sampling.max_new_tokens",
    "workers.drain_seconds",
)


def value_of(config: Section, key: str) -> Any:
    """Return the value of a dotted key; None for one that is yet to be derived."""
    found: Any = config
    for name in key.split("."):
        found = _member(found, name)
    return found


def _member(section: Any, name: str) -> Any:
    return section[name] if isinstance(section, Mapping) else getattr(section, name)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with these values of dotted keys; an evaluation that names no
    longest answer takes that of the training.
    """
    filled: RunConfig = _with(config, values)
    longest = filled.engine.sampling.max_new_tokens
    datasets = [
        dataset
        if dataset.sampling is None or dataset.sampling.max_new_tokens
        else _with(dataset, {"sampling.max_new_tokens": longest})
        for dataset in filled.evaluation.datasets
    ]
    return _with(filled, {"evaluation.datasets": tuple(datasets)}) if datasets else filled


def _with(section: Any, values: Mapping[str, Any]) -> Any:
    own, inner = {}, dict[str, dict[str, Any]]()
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    own |= {name: _with(_member(section, name), further) for name, further in inner.items()}
    if isinstance(section, Mapping):
        return {**section, **own}
    return section.model_copy(update=own) if own else section


def missing_keys(config: RunConfig) -> list[str]:
    """Return the keys that are yet to be derived; those of a judge or a teacher only where the run
    has one.
    """
    absent = [
        name
        for name, path in (
            ("judge", config.judge.model_path),
            ("teacher", config.teacher.model_path),
        )
        if path is None
    ]
    of_teachers = (f"teachers.{name}.dtype" for name in config.teachers)
    return [
        key
        for key in (*OF_RUN, *of_teachers, *sorted(OF_MACHINE))
        if key.partition(".")[0] not in absent and value_of(config, key) is None
    ]
