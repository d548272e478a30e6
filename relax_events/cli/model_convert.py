"""`relax models convert`: between Hugging Face folders and checkpoints of megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from relax_events.cli.output import print_fields
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
    from relax_events.ops.model_conversion import convert_model

    done = convert_model(folder, to, format=format, base=base)
    print_fields(done, output)
