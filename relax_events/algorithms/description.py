"""Algorithms in words: for the command line and for the reference."""

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
    """Return all that there is to say of an algorithm: its parts, its settings as they are when a
    run file names it alone, what it needs.

    Raises:
        ConfigError: There is no such algorithm, or its own settings don't hold.
    """
    spec = find_algorithm(name)
    try:
        algorithm = AlgorithmConfig(name=name)
    except ValueError as error:
        raise ConfigError(
            f"algorithm {name!r} can't be used with its own settings: {error}"
        ) from None
    left_out = {"name", "options", *(spec.excluded.keys() - spec.settings.keys())}
    told = {
        key: value
        for key, value in algorithm.model_dump(mode="json").items()
        if value is not None and key not in left_out
    }
    return {
        "name": spec.name,
        "summary": spec.summary,
        "source": spec.source,
        "needs": "; ".join(needs(spec, algorithm)) or "nothing but rewards",
        **({"notes": spec.notes} if spec.notes else {}),
        "settings": {key: _written(value) for key, value in told.items()},
        **(
            {"options": {key: _written(value) for key, value in spec.options.items()}}
            if spec.options
            else {}
        ),
        "formula": spec.formula,
    }


def needs(spec: AlgorithmSpec, algorithm: AlgorithmConfig) -> list[str]:
    """Return what an algorithm asks of the run besides rewards, with the settings given."""
    wanted = {
        "an answer with each prompt, no rewards": spec.learns_from == "answers",
        "a chosen and a rejected answer with each prompt, no rewards": spec.learns_from == "pairs",
        "rewards in components": spec.components,
        "the reference role": algorithm.needs_reference,
        "the actor-forward role": algorithm.old_logprobs == "actor",
        "the critic role": algorithm.needs_critic,
        "the teacher role": algorithm.distills,
        "the whole step before its first backward pass": algorithm.needs_whole_step,
    }
    return [text for text, is_needed in wanted.items() if is_needed]


def _written(value: Any) -> str:
    """Write a value as a run file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:g}" if isinstance(value, float) else str(value)
