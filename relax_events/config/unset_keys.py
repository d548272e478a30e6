"""Which keys of a run file are yet to be derived, and how their values get there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_origin

from pydantic import BaseModel

from relax_events.config.base import BY_MACHINE, Section, is_derived
from relax_events.config.external_values import find_table
from relax_events.config.run_config import RunConfig


def _list_derived(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Give the derived keys of sections, each with whether the machine decides it too."""
    for name, field in model.model_fields.items():
        if is_derived(field):
            yield f"{prefix}{name}", BY_MACHINE in field.metadata
        elif get_origin(field.annotation) is None and (section := find_table(field.annotation)):
            yield from _list_derived(section, f"{prefix}{name}.")


OF_MACHINE = tuple(key for key, is_by_machine in _list_derived(RunConfig) if is_by_machine)
"""Derived keys that the machine decides too."""
OF_RUN = tuple(key for key, is_by_machine in _list_derived(RunConfig) if not is_by_machine)
"""Derived keys that follow from the run file and its model."""


def get_value(config: Section, key: str) -> Any:
    """Return the value of a dotted key; None for a key that is yet to be derived."""
    value: Any = config
    for name in key.split("."):
        value = _member(value, name)
    return value


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
    updates, inner = {}, dict[str, dict[str, Any]]()
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            updates[name] = value
    updates |= {name: _with(_member(section, name), further) for name, further in inner.items()}
    if isinstance(section, Mapping):
        return {**section, **updates}
    return section.model_copy(update=updates) if updates else section


def missing_keys(config: RunConfig) -> list[str]:
    """Return the keys that are yet to be derived; keys of a judge or a teacher only if the run has
    one.
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
        for key in (*OF_RUN, *of_teachers, *OF_MACHINE)
        if key.partition(".")[0] not in absent and get_value(config, key) is None
    ]
