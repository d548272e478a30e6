"""The token route: token ids in; token ids, log-probabilities and weight versions out.

    POST /inference/v1/generate --> request queue (priority, 429) --> token source: an engine

The format is vLLM's, which the clients `verifiers` and `renderers` speak; `weight_versions` is
ours. Errors are typed: `error.type` is the kind, `error.code` the cause.
"""

from __future__ import annotations

import secrets
from base64 import b64encode
from typing import Any, Protocol

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from numpy.typing import NDArray

from relax_events.config import SamplingConfig
from relax_events.engines.protocol import GeneratedSample, GenerationRequest, SampleRequest
from relax_events.errors import EngineFailed, PoisonSample
from relax_events.events.parts import FinishReason
from relax_events.serving.engine_runner import EngineRunner, new_seed
from relax_events.serving.request_queue import QueueFull, RequestQueue
from relax_events.serving.streams import cancel_on_disconnect
from relax_events.serving.token_schemas import TokenBody

MAX_WAITING_RATIO = 16
"""Requests that may wait, as a multiple of those that an engine runs at the same time."""
MAX_TOKEN_ID = 2**31
"""Exclusive; the engine knows its vocabulary and refuses smaller ids that are none of it."""
LOADING_SECONDS = 1
"""Seconds after which a caller may try again that asks for a version which is not loaded yet."""


class TokenSource(Protocol):
    """An engine or a pool of engines, for callers in one event loop."""

    @property
    def policy_version(self) -> int:
        """The version that serves."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Prompt and completion together."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion of the model."""
        ...

    def version_name(self, policy_version: int) -> str:
        """Return the name of a version, as the route reports it."""
        ...

    async def generate(self, request: GenerationRequest) -> GeneratedSample:
        """Generate the one sample of a request; cancelling the call aborts the sample.

        Raises:
            PoisonSample: It can't be generated.
            EngineFailed: The engine has failed.
        """
        ...


class RunnerSource:
    """The token source of `relax serve`: one engine in its own thread."""

    def __init__(
        self, runner: EngineRunner, *, max_context_tokens: int, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._runner = runner
        self.max_context_tokens, self.stop_token_ids = max_context_tokens, stop_token_ids

    @property
    def policy_version(self) -> int:
        """Loads since the start."""
        return len(self._runner.version_names) - 1

    def version_name(self, policy_version: int) -> str:
        """Return the name that the weights were loaded under."""
        return self._runner.version_names[policy_version]

    async def generate(self, request: GenerationRequest) -> GeneratedSample:
        """Generate the one sample of a request; see `TokenSource`."""
        samples = self._runner.generate(request, is_streamed=False)
        try:
            async for sample, has_ended in samples:
                if has_ended:
                    return sample
        finally:
            await samples.aclose()
        raise EngineFailed("the engine ended a sample without a result; restart the server")


def token_routes(source: TokenSource, *, max_running: int, model_name: str) -> APIRouter:
    """Build the route.

    Args:
        source: Generates the samples.
        max_running: Requests that are in the engine at the same time.
        model_name: Of the served model; a request may name it, or none.
    """
    routes = APIRouter()
    waiting = RequestQueue(max_running=max_running, max_waiting=max_running * MAX_WAITING_RATIO)

    @routes.post("/inference/v1/generate")
    async def generate(request: Request, body: TokenBody) -> Response:
        """Continue token ids."""
        if body.model not in ("", model_name):
            return refusal(
                404,
                f"model {body.model!r} is not served here; this server has {model_name!r}",
                kind="invalid_request_error",
                code="model_not_found",
            )
        if body.min_policy_version > source.policy_version:
            return refusal(
                503,
                f"policy version {body.min_policy_version} is not loaded yet, version "
                f"{source.policy_version} serves; try again in {LOADING_SECONDS} s",
                kind="server_error",
                code="policy_version_not_loaded",
                retry_after_seconds=LOADING_SECONDS,
            )
        work = _generate(source, waiting, body)
        return await cancel_on_disconnect(request, work)

    return routes


async def _generate(source: TokenSource, waiting: RequestQueue, body: TokenBody) -> Response:
    name = body.request_id or secrets.token_hex(16)
    try:
        request = build_token_request(source, body, name=name)
        async with waiting.enter(body.priority):
            sample = await source.generate(request)
    except QueueFull as error:
        return refusal(
            429,
            str(error),
            kind="rate_limit_error",
            code="queue_full",
            retry_after_seconds=error.retry_after_seconds,
        )
    except PoisonSample as error:
        return refusal(400, str(error), kind="invalid_request_error", code="invalid_tokens")
    except EngineFailed as error:
        return refusal(503, str(error), kind="server_error", code="engine_failed")
    if sample.finish_reason is FinishReason.ERROR:
        return refusal(503, sample.error, kind="server_error", code="engine_failed")
    return JSONResponse(token_response(sample, request.prompt_tokens, source=source, name=name))


def build_token_request(source: TokenSource, body: TokenBody, *, name: str) -> GenerationRequest:
    """Build the engine's request.

    Raises:
        PoisonSample: A token id is no 32-bit number, or the prompt fills the context.
    """
    given = np.array(body.token_ids, np.int64)
    if given.min() < 0 or given.max() >= MAX_TOKEN_ID:
        raise PoisonSample(f"token_ids must be from 0 to {MAX_TOKEN_ID - 1}")
    if (room := source.max_context_tokens - len(given)) < 1:
        raise PoisonSample(
            f"token_ids has {len(given)} tokens, and the context ends at "
            f"{source.max_context_tokens}; send a shorter prompt"
        )
    wanted, empty = body.sampling_params, np.empty(0, np.int32)
    is_greedy = wanted.temperature == 0
    own = () if wanted.ignore_eos else source.stop_token_ids
    return GenerationRequest(
        prompt_group_id=name,
        prompt_tokens=given.astype(np.int32),
        samples=(
            SampleRequest(
                sample_id=name,
                seed=new_seed() if wanted.seed is None else wanted.seed,
                tokens=empty,
                logprobs=empty.astype(np.float32),
                segments=(),
            ),
        ),
        sampling=SamplingConfig(
            temperature=wanted.temperature or 1.0,
            top_p=1.0 if is_greedy else wanted.top_p,
            top_k=1 if is_greedy else max(0, wanted.top_k),
            max_new_tokens=min(room, wanted.max_tokens or room),
        ),
        stop_token_ids=tuple(dict.fromkeys((*own, *wanted.stop_token_ids))),
    )


def token_response(
    sample: GeneratedSample, prompt_tokens: NDArray[np.int32], *, source: TokenSource, name: str
) -> dict[str, Any]:
    """Build the answer to a request."""
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True)
    ]
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": sample.tokens.tolist(),
        "logprobs": {"content": content},
        "finish_reason": sample.finish_reason.value,
        "weight_versions": version_spans(sample, source),
    }
    if sample.routed_experts is not None:
        choice["routed_experts"] = encode_experts(sample.routed_experts)
    usage = {
        "prompt_tokens": len(prompt_tokens),
        "completion_tokens": len(sample.tokens),
        "total_tokens": len(prompt_tokens) + len(sample.tokens),
    }
    return {
        "request_id": name,
        "prompt_token_ids": prompt_tokens.tolist(),
        "choices": [choice],
        "usage": usage,
    }


def version_spans(sample: GeneratedSample, source: TokenSource) -> list[dict[str, Any]]:
    """Return the runs of sampled tokens by the name of their weights; `end` is exclusive."""
    spans, start = [], 0
    for segment in sample.segments:
        end = start + segment.num_tokens
        spans.append(
            {"version": source.version_name(segment.policy_version), "start": start, "end": end}
        )
        start = end
    return spans


def encode_experts(experts: NDArray[np.generic]) -> dict[str, Any]:
    """Encode the experts of prompt and completion, all tokens but the last: base64 of
    [tokens, layers, top_k].
    """
    return {
        "data": b64encode(np.ascontiguousarray(experts).data).decode(),
        "shape": list(experts.shape),
        "dtype": str(experts.dtype),
        "start": 0,
    }


def refusal(
    status: int, text: str, *, kind: str, code: str, retry_after_seconds: int = 0
) -> JSONResponse:
    """Build a typed error.

    Args:
        status: HTTP status.
        text: What is wrong, and the remedy.
        kind: The kind of error, in OpenAI's words.
        code: The cause.
        retry_after_seconds: When to try again; 0 leaves the header out.
    """
    headers = {"Retry-After": str(retry_after_seconds)} if retry_after_seconds else None
    body = {"error": {"message": text, "type": kind, "code": code, "param": None}}
    return JSONResponse(body, status_code=status, headers=headers)
