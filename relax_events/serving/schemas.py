"""What callers send, in SGLang's words and OpenAI's. What would change the answer and is not done
here is refused.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from relax_events.config import SamplingConfig

NEUTRAL: dict[str, tuple[Any, ...]] = {
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
"""Settings of SGLang's sampling that we don't have, with the values that ask for nothing."""
NOT_DONE = (
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
    "lora_path",
    "session_params",
    "custom_logit_processor",
)
"""Fields of SGLang's requests that ask for what we don't have."""
CHAT_NOT_DONE = (
    "tools", "logit_bias", "response_format", "functions", "top_logprobs", "return_routed_experts", "frequency_penalty", "presence_penalty",
)  # fmt: skip
"""Fields of OpenAI's requests that ask for what we don't have, unless they are empty or 0."""


class SamplingParams(BaseModel):
    """How one completion is drawn, in SGLang's words."""

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
        """Drop settings that ask for nothing."""
        if not isinstance(data, dict):
            return data
        if asked := [
            key for key, values in NEUTRAL.items() if key in data and data[key] not in values
        ]:
            raise ValueError(
                f"sampling by {asked[0]} is not supported here; leave it out, or ask an "
                "SGLang server"
            )
        return {key: value for key, value in data.items() if key not in NEUTRAL}

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
        """Give it in the engine's words: without temperature the most probable token is drawn."""
        top_k = 1 if self.temperature == 0 else max(0, self.top_k)
        return SamplingConfig(
            temperature=self.temperature or 1.0,
            top_p=1.0 if top_k == 1 else self.top_p,
            top_k=top_k,
            max_new_tokens=max(1, self.max_new_tokens),
        )


class GenerateBody(BaseModel):
    """`POST /generate`: one prompt, or several in lists; what is not known is passed over, as
    SGLang does.
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
    def _only_what_is_done(cls, data: Any) -> Any:
        if isinstance(data, dict) and (asked := [key for key in NOT_DONE if data.get(key)]):
            raise ValueError(
                f"{asked[0]} is not taken here, the engine shows its model text alone; leave "
                "it out, or ask an SGLang server"
            )
        if isinstance(data, dict) and data.get("sampling_params") is None:
            return {key: value for key, value in data.items() if key != "sampling_params"}
        return data

    @model_validator(mode="after")
    def _prompts_are_given_once(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("the prompt is given once, as text or as input_ids")
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
                    f"{key} is a list of as many as there are prompts, {self.num_prompts}, "
                    f"got {len(value)}"
                )
        if self.num_prompts > 1 and isinstance(self.rid, str):
            raise ValueError(
                f"each of {self.num_prompts} prompts has a rid of its own; give a list"
            )
        return self

    @property
    def is_batch(self) -> bool:
        """Whether answers come as a list."""
        prompts = self.text if self.input_ids is None else self.input_ids
        return isinstance(prompts, list) and (
            self.input_ids is None or (bool(prompts) and isinstance(prompts[0], list))
        )

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        prompts = self.text if self.input_ids is None else self.input_ids
        return len(prompts) if self.is_batch and prompts is not None else 1

    def of(self, key: str, place: int) -> Any:
        """Give a setting that is the same for all prompts, or of the prompt at a place."""
        value = getattr(self, key)
        return (
            value[place]
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


class Asked(BaseModel):
    """What OpenAI's two ways to ask have in common."""

    model: str = ""
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1, le=1024)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_done(cls, data: Any) -> Any:
        if isinstance(data, dict) and (asked := [key for key in CHAT_NOT_DONE if data.get(key)]):
            raise ValueError(f"{asked[0]} is not supported here; leave it out")
        return data

    def params(self, max_new_tokens: int) -> SamplingParams:
        """Give it in SGLang's words."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            n=self.n,
            stop=self.stop,
            sampling_seed=self.seed,
        )


class CompletionBody(Asked):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(default=16, ge=1)


class ChatPart(BaseModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatTurn(BaseModel):
    """A message."""

    role: str
    content: str | list[ChatPart]

    @property
    def text(self) -> str:
        """All that it says."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


class ChatBody(Asked):
    """`POST /v1/chat/completions`."""

    messages: list[ChatTurn] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
