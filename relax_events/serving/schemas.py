"""Request bodies in SGLang's and OpenAI's format. Unsupported fields that would change the result
are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from relax_events.config import SamplingConfig

UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "min_p": (0, None),
    "min_new_tokens": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "regex": (None,),
    "stop_regex": (None, [], ""),
    "json_schema": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None,),
    "beam_width": (None, 1),
    "spaces_between_special_tokens": (True, None),
    "stream_interval": (None, 1),
}
"""Unsupported sampling settings of SGLang, with the values that have no effect."""
UNSUPPORTED_FIELDS = (
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
    "lora_path",
    "session_params",
    "custom_logit_processor",
)
"""Unsupported fields of SGLang's requests."""
UNSUPPORTED_OPENAI_FIELDS = (
    "tools",
    "logit_bias",
    "response_format",
    "functions",
    "top_logprobs",
    "return_routed_experts",
    "frequency_penalty",
    "presence_penalty",
)
"""Unsupported fields of OpenAI's requests, unless they are empty or 0."""


def without_neutral_fields(data: Any, neutral: Mapping[str, tuple[Any, ...]]) -> Any:
    """Return a body without nulls; what is no JSON object is returned as it is.

    Args:
        data: The body.
        neutral: Fields that are not supported, with the values that have no effect.
    Raises:
        ValueError: Such a field has another value; the text names it.
    """
    if not isinstance(data, dict):
        return data
    for key, values in neutral.items():
        if key in data and data[key] not in values:
            raise ValueError(f"{key} = {data[key]!r} is not supported here; leave it out")
    return {key: value for key, value in data.items() if value is not None}


class SamplingParams(BaseModel):
    """Sampling parameters of a completion, in SGLang's format."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int = Field(default=128, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = Field(default=1, ge=1, le=1024)
    sampling_seed: int | None = Field(default=None, ge=0, lt=2**63)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        """Drop settings without effect."""
        if not isinstance(data, dict):
            return data
        if unsupported := [
            key
            for key, values in UNSUPPORTED_SAMPLING.items()
            if key in data and data[key] not in values
        ]:
            raise ValueError(
                f"sampling by {unsupported[0]} is not supported here; leave it out, or use an "
                "SGLang server"
            )
        return {key: value for key, value in data.items() if key not in UNSUPPORTED_SAMPLING}

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the completion."""
        return tuple(
            text
            for text in ([self.stop] if isinstance(self.stop, str) else self.stop or [])
            if text
        )

    @property
    def sampling(self) -> SamplingConfig:
        """The engine's sampling parameters; temperature 0 takes the most probable token."""
        top_k = 1 if self.temperature == 0 else max(0, self.top_k)
        return SamplingConfig(
            temperature=self.temperature or 1.0,
            top_p=1.0 if top_k == 1 else self.top_p,
            top_k=top_k,
            max_new_tokens=max(1, self.max_new_tokens),
        )


class GenerateBody(BaseModel):
    """`POST /generate`: one prompt, or several in lists; unknown fields are ignored, as in
    SGLang.
    """

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SamplingParams | list[SamplingParams] = SamplingParams()
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    return_text_in_logprobs: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = Field(default=0, ge=0)
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict) and (
            unsupported := [key for key in UNSUPPORTED_FIELDS if data.get(key)]
        ):
            raise ValueError(
                f"{unsupported[0]} is not accepted here, the engine feeds its model text only; "
                f"leave "
                "it out, or use an SGLang server"
            )
        if isinstance(data, dict) and data.get("sampling_params") is None:
            return {key: value for key, value in data.items() if key != "sampling_params"}
        return data

    @model_validator(mode="after")
    def _prompts_are_given_once(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give the prompt once, as text or as input_ids")
        for key in (
            "sampling_params",
            "rid",
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
        ):
            value = getattr(self, key)
            if isinstance(value, list) and len(value) != self.num_prompts:
                raise ValueError(
                    f"{key} must be a list with one entry per prompt, {self.num_prompts}, "
                    f"got {len(value)}"
                )
        if self.num_prompts > 1 and isinstance(self.rid, str):
            raise ValueError(
                f"each of {self.num_prompts} prompts needs a rid of its own; give a list"
            )
        return self

    @property
    def is_batch(self) -> bool:
        """Whether the response is a list."""
        prompts = self.text if self.input_ids is None else self.input_ids
        return isinstance(prompts, list) and (
            self.input_ids is None or (bool(prompts) and isinstance(prompts[0], list))
        )

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        prompts = self.text if self.input_ids is None else self.input_ids
        return len(prompts) if self.is_batch and prompts is not None else 1

    def value_for(self, key: str, index: int) -> Any:
        """Return a setting for the prompt at an index; a scalar applies to all prompts."""
        value = getattr(self, key)
        return (
            value[index]
            if isinstance(value, list) and (key != "input_ids" or self.is_batch)
            else value
        )


class AbortBody(BaseModel):
    """`POST /abort_request`."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(BaseModel):
    """`POST /pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class LoadBody(BaseModel):
    """`POST /update_weights_from_disk`."""

    model_path: str
    weight_version: str = ""
    abort_all_requests: bool = False


class CheckBody(BaseModel):
    """`POST /weights_checker`."""

    action: Literal["checksum"]


class OpenAIBody(BaseModel):
    """Common fields of OpenAI's two routes."""

    model: str = ""
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1, le=1024)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict) and (
            unsupported := [key for key in UNSUPPORTED_OPENAI_FIELDS if data.get(key)]
        ):
            raise ValueError(f"{unsupported[0]} is not supported here; leave it out")
        return data

    def params(self, max_new_tokens: int) -> SamplingParams:
        """Return the parameters in SGLang's format."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            n=self.n,
            stop=self.stop,
            sampling_seed=self.seed,
        )


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(default=16, ge=1)


class ChatPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessageBody(BaseModel):
    """A message."""

    role: str
    content: str | list[ChatPart]

    @property
    def text(self) -> str:
        """The text of all parts."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


class ChatBody(OpenAIBody):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessageBody] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
