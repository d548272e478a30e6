"""The sections `teacher` and `teachers`: the models that a distillation learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from relax_events.config.base import DERIVED, OrDerived, Section, Threads
from relax_events.config.engine import ModelConfig
from relax_events.config.external_values import Addresses, Text, Texts
from relax_events.config.hub_names import ModelFolder
from relax_events.config.resume_rules import SPEED, free


class TeacherModelConfig(Section):
    """One teacher. Its tokenizer must be the policy's."""

    model_path: ModelFolder | None = None
    """A folder in Hugging Face layout, or a name as in `model.path`: config, safetensors,
    tokenizer. With `urls` the tokenizer is enough."""
    urls: Annotated[Addresses, free("where the teacher runs")] = ()
    """SGLang servers of the teacher. Given, the teacher workers load no model: they send each
    sample to the server with the fewest tokens to score, and take another one where it fails."""
    dtype: OrDerived[Literal["float32", "bfloat16"]] = DERIVED
    """Type of the weights. Derived: that of its checkpoint."""
    device: Annotated[Text, free(SPEED)] = "auto"
    """`auto` takes a GPU where there is one, else the CPU."""

    def as_model(self, path: Path) -> ModelConfig:
        """Return the teacher as code takes it that loads any model."""
        return ModelConfig.model_validate(
            {"path": path, "dtype": self.dtype, "device": self.device}
        )


class TeacherConfig(TeacherModelConfig):
    """The teacher of a distillation, which `algorithm.distill_coefficient` above 0 needs: of all
    samples, or of those whose source no table of `teachers` names.
    """

    threads: Annotated[Threads, free(SPEED)] = DERIVED
    """CPU threads of the role; 0 takes all processors that the process may use. Derived as
    `trainer.threads`."""


class SourceTeacherConfig(TeacherModelConfig):
    """A teacher of the samples of some sources, next to or instead of `teacher`."""

    sources: Annotated[Texts, Field(min_length=1)]
    """The sources: values of the metadata key `reward.route_key`."""
