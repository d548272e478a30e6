"""Describes algorithms for the command line and the reference."""

from __future__ import annotations

from typing import Any

from relax_events.config import AlgorithmConfig
from relax_events.config.algorithm_spec import AlgorithmSpec, find_algorithm
from relax_events.errors import ConfigError
from relax_events.plugins import ALGORITHMS, list_installed


def installed_algorithms() -> list[AlgorithmSpec]:
    """Return the installed algorithms by name."""
    return [find_algorithm(name) for name in sorted(list_installed(ALGORITHMS))]


def describe_algorithm(name: str) -> dict[str, Any]:
    """Return an algorithm's parts, its default settings, and what it needs.

    Raises:
        ConfigError: There is no such algorithm, or its default settings are invalid.
    """
    spec = find_algorithm(name)
    try:
        algorithm = AlgorithmConfig(name=name)
    except ValueError as error:
        raise ConfigError(
            f"algorithm {name!r} can't be used with its default settings: {error}"
        ) from None
    excluded = {"name", "options", *(spec.excluded.keys() - spec.settings.keys())}
    settings = {
        key: value
        for key, value in algorithm.model_dump(mode="json").items()
        if value is not None and key not in excluded
    }
    return {
        "name": spec.name,
        "summary": spec.summary,
        "source": spec.source,
        "needs": "; ".join(needs(spec, algorithm)) or "nothing but rewards",
        **({"notes": spec.notes} if spec.notes else {}),
        "settings": {key: _format_value(value) for key, value in settings.items()},
        **(
            {"options": {key: _format_value(value) for key, value in spec.options.items()}}
            if spec.options
            else {}
        ),
        "formula": spec.formula,
    }


def needs(spec: AlgorithmSpec, algorithm: AlgorithmConfig) -> list[str]:
    """Return what an algorithm needs besides rewards, with the given settings."""
    needs_by_text = {
        "an answer with each prompt, no rewards": spec.learns_from == "answers",
        "a chosen and a rejected answer with each prompt, no rewards": spec.learns_from == "pairs",
        "rewards in components": spec.components,
        "the reference role": algorithm.needs_reference,
        "the actor-forward role": algorithm.old_logprobs == "actor",
        "the critic role": algorithm.needs_critic,
        "the teacher role": algorithm.distills,
        "the whole step before its first backward pass": algorithm.needs_whole_step,
    }
    return [text for text, is_needed in needs_by_text.items() if is_needed]


def _format_value(value: Any) -> str:
    """Format a value as in a run file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:g}" if isinstance(value, float) else str(value)
