"""Converts a model in a child process, which reads foreign checkpoints in confinement."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from relax_events.api import errors
from relax_events.api.errors import ConfigError, EnvironmentProblem, RelaxError
from relax_events.confinement import ChildLost, ChildPool, ChildSettings, Confinement, Profile
from relax_events.confinement.entry_points import CHECKPOINT_CONVERTER
from relax_events.ops.model_export.new_folder import write_folder

CONVERT_SECONDS = 24 * 3600.0
"""A checkpoint of a terabyte takes hours."""
EXIT_SECONDS = 30.0
"""For the process to delete its temporary files."""


def convert_model(source: Path, target: Path, *, format: str, base: Path | None) -> dict[str, Any]:  # noqa: A002  # the option's name
    """Convert a model folder or a distributed checkpoint.

    Args:
        source: The folder to convert.
        target: The folder to write.
        format: Of the new folder: megatron or hf.
        base: With hf: a model folder of the same architecture.
    Returns:
        The fields of `Conversion`.
    Raises:
        ConfigError: `base` does not fit the format, or the conversion fails.
        EnvironmentProblem: The target can't be written, or the process was ended from outside.
    """
    if format == "megatron" and base is not None:
        raise ConfigError("--base is for --format hf; leave it out")
    if format == "hf" and base is None:
        raise ConfigError(
            "--format hf takes configuration, tokenizer and the tensors' names from a model "
            "folder of the same architecture; give it as --base"
        )
    with write_folder(target) as folder:
        done = _convert_apart(source.resolve(), folder, format=format, base=base)
    return done | {"folder": str(target)}


def _convert_apart(
    source: Path,
    folder: Path,
    *,
    format: str,  # noqa: A002  # as above
    base: Path | None,
) -> dict[str, Any]:
    confinement = Confinement(
        Profile.PURE,
        readable=(str(source), *(() if base is None else _list_readable(base))),
        writable=(str(folder),),
    )
    setup = {
        "source": str(source),
        "folder": str(folder),
        "base": None if base is None else str(base),
        "format": format,
        "confinement": confinement.to_json(),
        "memory_bytes": resource.RLIM_INFINITY,
    }
    settings = ChildSettings(
        entry_point=CHECKPOINT_CONVERTER, setup=setup, confines_itself=True, keeps_state=True
    )
    children = ChildPool(settings)
    try:
        head = children.call({}, seconds=CONVERT_SECONDS).result().head
    except ChildLost as lost:
        raise EnvironmentProblem(f"the conversion of {source} {lost.describe('')}") from None
    finally:
        children.close(exit_seconds=EXIT_SECONDS)
    if "error" in head:
        raise _find_error(head["kind"])(head["error"])
    return head


def _list_readable(base: Path) -> list[str]:
    """Return a model's folder, and the files that it links to, as in the cache of the hub."""
    return [str(base.resolve()), *(str(file.resolve()) for file in base.glob("*"))]


def _find_error(name: str) -> type[RelaxError]:
    error_class = getattr(errors, name, ConfigError)
    return error_class if issubclass(error_class, RelaxError) else ConfigError
