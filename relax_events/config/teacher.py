"""The sections `teacher` and `teachers`: the models that a distillation learns from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from relax_events.config.base import DERIVED, OrDerived, Positive, Seconds, Section, Threads
from relax_events.config.engine import ModelConfig
from relax_events.config.external_values import Addresses, FilePath, Text, Texts
from relax_events.config.resume_rules import SPEED, free

if TYPE_CHECKING:
    from relax_events.config.run_config import RunConfig


class TeacherModelConfig(Section):
    """One teacher. Its tokenizer must be the policy's."""

    model_path: FilePath | None = None
    """A folder in Hugging Face layout: config, safetensors, tokenizer. With `urls` the tokenizer is
    enough."""
    urls: Annotated[Addresses, free("where the teacher runs")] = ()
    """SGLang servers of the teacher. Given, the teacher workers load no model: they send each
    sample to the server with the fewest tokens to score, and take another one where it fails."""
    request_seconds: Annotated[Seconds, free("when a server counts as lost")] = 600.0
    """Deadline of a request to one of `urls`, which scores the samples of a record batch."""
    dtype: OrDerived[Literal["float32", "bfloat16"]] = DERIVED
    """Type of the weights. Derived: that of its checkpoint."""
    device: Annotated[Text, free(SPEED)] = "auto"
    """`auto` takes a GPU where there is one, else the CPU."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of the model."""

    def as_model(self, path: Path) -> ModelConfig:
        """Return the teacher as code takes it that loads any model."""
        return ModelConfig.model_validate(
            {"path": path, "dtype": self.dtype, "device": self.device, "attention": self.attention}
        )


class TeacherConfig(TeacherModelConfig):
    """The teacher of a distillation, which `algorithm.distill_coefficient` above 0 needs: of all
    samples, or of those whose source no table of `teachers` names.
    """

    threads: Annotated[Threads, free(SPEED)] = DERIVED
    """CPU threads of the role; 0 takes all processors that the process may use. Derived as
    `trainer.threads`."""
    route_key: Text = "data_source"
    """Metadata key of a sample that names its source."""
    max_request_tokens: Annotated[Positive, free(SPEED)] = 262_144
    """Tokens of a record batch that is sent to servers (`urls`)."""

    def source_of(self, metadata: Mapping[str, Any]) -> str:
        """Return the source of a sample with this metadata; empty where they name none."""
        source = metadata.get(self.route_key)
        return source if isinstance(source, str) else ""


class SourceTeacherConfig(TeacherModelConfig):
    """A teacher of the samples of some sources, next to or instead of `teacher`."""

    sources: Annotated[Texts, Field(min_length=1)]
    """The sources: values of the metadata key `teacher.route_key`."""


def list_teachers(config: RunConfig) -> dict[str, TeacherModelConfig]:
    """Return the teachers of a run by the section that sets them; none where it distils nothing
    that it samples.
    """
    if not config.algorithm.distills or config.is_replay:
        return {}
    default: dict[str, TeacherModelConfig] = (
        {} if config.teacher.model_path is None else {"teacher": config.teacher}
    )
    return default | {f"teachers.{name}": one for name, one in config.teachers.items()}


def check_teachers(config: RunConfig) -> None:
    """Refuse a distillation without a teacher, and a source with two.

    Raises:
        ValueError: So it is; the text names the keys.
    """
    section_of: dict[str, str] = {}
    for name, one in config.teachers.items():
        if one.model_path is None:
            raise ValueError(f"teachers.{name} names no teacher; set teachers.{name}.model_path")
        for source in one.sources:
            if (other := section_of.setdefault(source, name)) != name:
                raise ValueError(
                    f"source {source!r} has two teachers, teachers.{other} and teachers.{name}; "
                    "leave it out of one"
                )
    if config.teacher.urls and config.teacher.model_path is None:
        raise ValueError(
            "teacher.urls needs the tokenizer of the teacher, which is compared with the policy's; "
            "set teacher.model_path"
        )
    if config.algorithm.distills and not config.is_replay and not list_teachers(config):
        need = (
            f"algorithm.distill_coefficient = {config.algorithm.distill_coefficient:g} needs a "
            "teacher"
        )
        raise ValueError(
            f"{need}; set teacher.model_path to the folder of its checkpoint, or "
            "algorithm.distill_coefficient = 0"
        )
    if served := next((name for name, one in list_teachers(config).items() if one.urls), None):
        _check_served(config, served)


def _check_served(config: RunConfig, section: str) -> None:
    algorithm, temperature = config.algorithm, config.engine.sampling.temperature
    if algorithm.has_topk_loss and algorithm.distill_tokens != "teacher_topk":
        raise ValueError(
            f"{section}.urls: a server scores no given token ids, which algorithm.distill_tokens "
            f"= {algorithm.distill_tokens!r} needs; set it to 'sampled' or 'teacher_topk', or "
            "leave urls out"
        )
    if temperature != 1:
        raise ValueError(
            f"{section}.urls: a server scores at temperature 1, and policy and teacher are "
            f"compared at engine.sampling.temperature = {temperature:g}; set that to 1, or leave "
            "urls out"
        )
