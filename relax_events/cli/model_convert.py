"""`relax models convert`: between Hugging Face folders and checkpoints of megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from relax_events.cli.output import print_json, print_pairs, print_progress
from relax_events.cli.parameters import Output

Format = Literal["megatron", "hf"]


def convert(
    folder: Path,
    *,
    to: Path,
    format: Format,  # noqa: A002  # the option's name
    base: Path | None = None,
    output: Output = "table",
) -> None:
    """Convert a model between a folder in Hugging Face layout and a distributed checkpoint of
    megatron-core; every weight keeps its bits.

    Example: relax models convert Qwen3-4B --to Qwen3-4B-megatron --format megatron

    The checkpoint holds the whole model: megatron-core loads it in any tensor, pipeline and expert
    parallelism. The families are Qwen3, Qwen3-VL, their mixtures of experts, and the thinker of
    Qwen3-Omni. Towers for images and audio are stored under `towers.` by their names in
    transformers.

    Args:
        folder: What to convert: a model folder, or a distributed checkpoint.
        to: The folder to write.
        format: Of the new folder: megatron or hf.
        base: With hf: a model folder of the same architecture, from which configuration, tokenizer
            and the tensors' names are taken.
    """
    from dataclasses import asdict

    from relax_events.errors import ConfigError
    from relax_events.ops.model_convert import convert_to_folder, convert_to_megatron

    if format == "megatron":
        if base is not None:
            raise ConfigError("--base is for --format hf; leave it out")
        done = convert_to_megatron(folder, to, report=print_progress)
    else:
        if base is None:
            raise ConfigError(
                "--format hf takes configuration, tokenizer and the tensors' names from a model "
                "folder of the same architecture; give it as --base"
            )
        done = convert_to_folder(folder, to, base=base, report=print_progress)
    if output == "json":
        print_json(asdict(done))
    else:
        print_pairs(asdict(done))
