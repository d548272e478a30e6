"""Entry point of a conversion that runs in a process of its own: values in and out are JSON's.

The process needs to read the source and the base, and to write the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relax_events.errors import ConfigError


def convert(
    setup: Mapping[str, Any], *, report: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Convert a model folder or a distributed checkpoint.

    Args:
        setup: `folder`, `to` and `format` (megatron or hf), and with hf `base`: as the arguments of
            `relax models convert`.
        report: Called with a line for each stage.
    Returns:
        The fields of `Conversion`.
    Raises:
        ConfigError: `base` does not fit the format, or the conversion fails.
        KeyError: `setup` lacks a key.
        EnvironmentProblem: The target can't be written.
    """
    from relax_events.ops.model_convert import convert_to_folder, convert_to_megatron

    folder, target = Path(setup["folder"]), Path(setup["to"])
    base = setup.get("base")
    if setup["format"] == "megatron":
        if base is not None:
            raise ConfigError("--base is for --format hf; leave it out")
        return asdict(convert_to_megatron(folder, target, report=report))
    if base is None:
        raise ConfigError(
            "--format hf takes configuration, tokenizer and the tensors' names from a model "
            "folder of the same architecture; give it as --base"
        )
    return asdict(convert_to_folder(folder, target, base=Path(base), report=report))
