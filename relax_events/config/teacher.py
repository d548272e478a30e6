"""The section `teacher`: the model that a distillation learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from relax_events.config.base import DERIVED, OrDerived, Section
from relax_events.config.engine import ModelConfig
from relax_events.config.external_values import FilePath, Text


class TeacherConfig(Section):
    """The teacher of a distillation, which `algorithm.distill_coefficient` above 0 needs. Its
    tokenizer must be the policy's.
    """

    model_path: FilePath | None = None
    """A folder in Hugging Face layout: config, safetensors, tokenizer."""
    dtype: OrDerived[Literal["float32", "bfloat16"]] = DERIVED
    """Type of the weights. Derived: that of its checkpoint."""
    device: Text = "auto"
    """`auto` takes a GPU where there is one, else the CPU."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of the model."""
    threads: OrDerived[Annotated[int, Field(ge=0)]] = DERIVED
    """CPU threads of the role; 0 takes all processors that the process may use. Derived as
    `trainer.threads`."""

    def as_model(self, path: Path) -> ModelConfig:
        """Return the teacher as code takes it that loads any model."""
        return ModelConfig.model_validate(
            {"path": path, "dtype": self.dtype, "device": self.device, "attention": self.attention}
        )
