"""The token route of a model without a run: token ids in; token ids and log-probabilities out, in
the format of vLLM's `POST /inference/v1/generate`, which `verifiers` and `renderers` speak.

Fields that would change the result are rejected, and so are fields that the format does not have.
"""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, model_validator

from relax_events.api.engines import GeneratedSample, GenerationRequest
from relax_events.api.errors import EngineFailed, PoisonSample
from relax_events.api.events import FinishReason
from relax_events.packages.gateway.chat_dialect import openai_error
from relax_events.packages.gateway.dialect import RETRY_SECONDS, Problem
from relax_events.packages.gateway.disconnects import cancel_on_disconnect
from relax_events.packages.gateway.sampling import (
    MAX_SHOWN,
    MAX_TOKEN_ID,
    CallSampling,
    require_characters,
)
from relax_events.packages.gateway.served_model import ServedModel

PATH = "/inference/v1/generate"
IGNORED_FIELDS = frozenset({"cache_salt", "priority", "return_token_ids", "stream_options"})
"""Fields of the format that change neither the prompt nor the tokens."""
TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)]


class TokenSampling(CallSampling):
    """Sampling parameters, in vLLM's names."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CallSampling.NEUTRAL,
        "flat_logprobs": (False,),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "detokenize",
            "include_stop_str_in_output",
            "output_kind",
            "routed_experts_prompt_start",  # the answer names its own start
            "skip_reading_prefix_cache",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        }
    )

    max_tokens: int | None = Field(default=None, ge=1)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=1)


class TokenBody(BaseModel):
    """The body of a call."""

    model: str = ""
    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    request_id: str = Field(default="", max_length=128)

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        fields = data.keys() if isinstance(data, dict) else frozenset()
        if fields:
            require_characters(data)
        for key in sorted(fields - cls.model_fields.keys() - IGNORED_FIELDS):
            if data[key]:
                name = repr(key)[1:-1][:MAX_SHOWN]
                raise ValueError(f"{name} is not accepted by this route; leave it out")
        return data


def add_token_route(app: FastAPI, model: ServedModel) -> None:
    """Add the route to an application."""

    @app.post(PATH)
    async def generate(request: Request, body: TokenBody) -> Response:
        """Continue token ids."""
        if body.model not in ("", model.name):
            text = f"model {body.model!r} is not served here; this server has {model.name!r}"
            return _refuse(Problem(status=404, text=text, code="model_not_found"))
        try:
            generation = build_token_request(model, body)
            sample = await cancel_on_disconnect(request, model.engine.generate(generation))
        except PoisonSample as error:
            return _refuse(Problem(status=400, text=str(error), code="invalid_tokens"))
        except EngineFailed as error:
            return _refuse(_describe_failure(str(error)))
        if sample.finish_reason is FinishReason.ERROR:
            return _refuse(_describe_failure(sample.error))
        return JSONResponse(build_token_answer(body, generation, sample))


def build_token_request(model: ServedModel, body: TokenBody) -> GenerationRequest:
    """Build the engine's request.

    Raises:
        PoisonSample: The prompt fills the context.
    """
    tokens, sampling = np.array(body.token_ids, np.int32), body.sampling_params
    if (room := model.max_context_tokens - len(tokens)) < 1:
        raise PoisonSample(
            f"token_ids has {len(tokens)} tokens, and the context ends at "
            f"{model.max_context_tokens}; send a shorter prompt"
        )
    end_token_ids = () if sampling.ignore_eos else model.stop_token_ids
    return model.build_request(
        sampling,
        prompt_tokens=tokens,
        max_new_tokens=min(room, sampling.max_tokens or room),
        stop_token_ids=tuple(dict.fromkeys((*end_token_ids, *sampling.stop_token_ids))),
    )


def build_token_answer(
    body: TokenBody, request: GenerationRequest, sample: GeneratedSample
) -> dict[str, Any]:
    """Build the answer to a call."""
    num_prompt, num_sampled = len(request.prompt_tokens), len(sample.tokens)
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True)
    ]
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": sample.tokens.tolist(),
        "logprobs": {"content": content},
        "finish_reason": sample.finish_reason.value,
    }
    if (experts := sample.routed_experts) is not None:
        choice["routed_experts"] = {
            "data": b64encode(np.ascontiguousarray(experts).data).decode(),
            "shape": list(experts.shape),
            "dtype": str(experts.dtype),
            "start": 0,
        }
    return {
        "request_id": body.request_id or secrets.token_hex(16),
        "prompt_token_ids": request.prompt_tokens.tolist(),
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }


def _describe_failure(text: str) -> Problem:
    return Problem(status=503, text=text, code="engine_failed", retry_after_seconds=RETRY_SECONDS)


def _refuse(problem: Problem) -> JSONResponse:
    body = openai_error(problem)
    return JSONResponse(body, status_code=problem.status, headers=problem.headers)
