"""The bodies of the token route, in the format of vLLM's `POST /inference/v1/generate`.

Fields that would change the result and are not supported are rejected; others are ignored.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator

from relax_events.serving.schemas import UNSUPPORTED_SAMPLING, without_neutral_fields

UNSUPPORTED_MEDIA = ("features", "content_parts")
NEUTRAL = {key: values for key, values in UNSUPPORTED_SAMPLING.items() if key != "regex"} | {
    "n": (1, None),
    "best_of": (1, None),
    "stop": (None, [], ""),
    "min_tokens": (0, None),
    "prompt_logprobs": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "guided_decoding": (None,),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None, -1),
}
"""Unsupported sampling settings of vLLM, with the values that have no effect."""


class TokenSampling(BaseModel):
    """Sampling parameters, in vLLM's names."""

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        return without_neutral_fields(data, NEUTRAL)


class TokenBody(BaseModel):
    """`POST /inference/v1/generate`.

    `min_policy_version` is ours: the engine must serve at least that version, else the request is
    refused with 503 and `Retry-After`.
    """

    model: str = ""
    token_ids: list[int] = Field(min_length=1)
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    request_id: str = Field(default="", max_length=128)
    stream: bool = False
    cache_salt: str | None = None
    priority: int = 0
    min_policy_version: int = 0

    @model_validator(mode="before")
    @classmethod
    def _reject_media(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in UNSUPPORTED_MEDIA:
                if data.get(key):
                    raise ValueError(
                        f"{key} is not accepted here, the route feeds its model token ids only; "
                        "leave it out"
                    )
            if data.get("stream"):
                raise ValueError("stream is not supported by this route; leave it out")
        return data
