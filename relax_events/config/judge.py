"""The section `judge`: the model whose opinion is a reward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from relax_events.config.base import DERIVED, OrDerived, Positive, Section
from relax_events.config.engine import EngineConfig, ModelConfig, SamplingConfig
from relax_events.config.external_values import Names, Text
from relax_events.config.hub_names import ModelFolder
from relax_events.config.media import MediaConfig
from relax_events.config.resume_rules import SPEED, free


class JudgeSamplingConfig(SamplingConfig):
    """Sampling of the judge's response."""

    temperature: Annotated[float, Field(gt=0)] = 0.2
    """Divides the logits."""
    max_new_tokens: Positive = 1024
    """Maximum tokens of a response; one without a score by then can't be parsed."""


class JudgeEngineConfig(EngineConfig):
    """The inference engine of a judge worker. `max_prompt_groups` has no effect here."""

    max_running_samples: Annotated[Positive, free(SPEED)] = 64
    """Responses that one worker generates concurrently."""
    max_context_tokens: Positive = 8192
    """Maximum tokens of the judge's prompt and response together; a sample with a longer prompt
    fails with a reason."""
    sampling: JudgeSamplingConfig = JudgeSamplingConfig()
    """Sampling of the judge's response."""


class JudgeConfig(Section):
    """The LLM judge. With `model_path` the judge role runs it on its own engines, and scores the
    samples whose reward function is `genrm`.

    The judge's prompt is set in `reward.options`: `template`, `rubric` and `max_score`, as for
    `genrm` with the `url` of a server.
    """

    model_path: ModelFolder | None = None
    """A folder in Hugging Face layout, or a name as in `model.path`: config, safetensors, tokenizer
    with a chat template. Its tokenizer may differ from the policy's."""
    dtype: OrDerived[Literal["float32", "bfloat16"]] = DERIVED
    """Type of the weights. Derived: that of its checkpoint."""
    device: Annotated[Text, free(SPEED)] = "auto"
    """`auto` takes a GPU where there is one, else the CPU."""
    chat_template_options: Annotated[dict[str, Any], Names.NOTHING] = Field(default_factory=dict)
    """Variables for its chat template, such as `enable_thinking = false`."""
    on_parse_error: Literal["fail", "zero"] = "fail"
    """What happens to a sample whose judge response holds no score in range: scoring fails, or its
    reward is 0."""
    media: MediaConfig | None = None
    """How the judge is shown the images, videos and audio of prompt and environment, before its
    question; its model must read them. Without the table it reads text only. `[judge.media]` alone
    takes the usual settings."""
    engine: JudgeEngineConfig = JudgeEngineConfig()
    """The engine of each worker: `name = "sglang"` starts servers, or attaches to those at
    `sglang.urls`."""

    def as_model(self, path: Path) -> ModelConfig:
        """Return the judge as code takes it that loads any model."""
        media = {} if self.media is None else {"media": self.media.model_dump()}
        return ModelConfig.model_validate(
            {
                "path": path,
                "dtype": self.dtype,
                "device": self.device,
                **media,
            }
        )
