"""SGLang's native routes, as in version 0.5.23: generation from token ids or text, and control of
weights and requests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from numpy.typing import NDArray

from relax_events.engines.sglang.checkpoint import ModelFolder, split_experts
from relax_events.engines.sglang.client import SUPPORTED_VERSIONS
from relax_events.engines.sglang.weight_checksums import TensorRecipe
from relax_events.errors import EngineFailed, PoisonSample, RelaxError
from relax_events.serving.completions import (
    Completion,
    CompletionRequest,
    CompletionService,
    merge_streams,
)
from relax_events.serving.engine_runner import EngineRunner
from relax_events.serving.schemas import (
    AbortBody,
    CheckBody,
    GenerateBody,
    LoadBody,
    PauseBody,
    SamplingParams,
)
from relax_events.serving.streams import cancel_on_disconnect, event_stream

PROBE_SECONDS = 20.0
Logprob = tuple[float | None, int, str | None]
"""A token's log-probability in nats, None if not finite or unknown; its id; its text if requested.
"""
LOAD_FORBIDDEN = (
    "weights are not loaded from there; start the server with --weights-root, or with --token-file"
)


def sglang_routes(
    service: CompletionService,
    *,
    model_path: Path,
    recorded: ModelFolder | None,
    is_incremental: bool,
    may_load: Callable[[Path], bool],
) -> APIRouter:
    """Build the routes.

    Args:
        service: Generates the completions.
        model_path: Of the served model.
        recorded: The model with its experts, if they are recorded.
        is_incremental: Whether a streamed event has only new tokens, or all so far.
        may_load: Returns whether weights may be loaded from a folder.
    """
    routes, info = (
        APIRouter(),
        {
            "incremental_streaming_output": is_incremental,
            "enable_return_routed_experts": recorded is not None,
        },
    )
    routes.include_router(_generation_routes(service, recorded, is_incremental=is_incremental))
    routes.include_router(_info_routes(service, {"model_path": str(model_path), **info}))
    routes.include_router(_control_routes(service.runner, may_load))
    return routes


def _generation_routes(
    service: CompletionService, recorded: ModelFolder | None, *, is_incremental: bool
) -> APIRouter:
    """Routes that generate and abort."""
    routes, runner = APIRouter(), service.runner

    @routes.post("/generate")
    async def generate(request: Request, body: GenerateBody) -> Response:
        """Generate for one prompt or several."""
        call = _GenerateCall(service, body, recorded=recorded, is_incremental=is_incremental)
        call.input_logprobs = await runner.call(call.input_scores)
        if body.stream:
            return StreamingResponse(event_stream(_events(call)), media_type="text/event-stream")
        return JSONResponse(await cancel_on_disconnect(request, _whole(call)))

    @routes.post("/abort_request")
    async def abort_request(body: AbortBody) -> Response:
        """Abort a request, or all; the response has the tokens so far."""
        await runner.abort(None if body.abort_all else body.rid)
        return Response()

    return routes


def _info_routes(service: CompletionService, info: dict[str, Any]) -> APIRouter:
    """Routes that describe the server and its health."""
    routes, runner = APIRouter(), service.runner

    @routes.get("/ready")
    @routes.get("/health")
    def health() -> Response:
        """Report whether the engine is running."""
        return Response(status_code=200 if runner.failure is None else 503)

    @routes.get("/health_generate")
    async def health_generate() -> Response:
        """Generate a token, and report whether it succeeded."""
        probe = CompletionRequest(
            rid=f"probe-{secrets.token_hex(4)}",
            tokens=np.zeros(1, np.int32),
            params=SamplingParams(max_new_tokens=1),
        )
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                [_ async for _ in service.complete(probe)]
        except (TimeoutError, EngineFailed):
            return Response(status_code=503)
        return Response(status_code=200)

    @routes.get("/server_info")
    @routes.get("/get_server_info")
    def server_info() -> dict[str, Any]:
        """Report the version of SGLang whose API this is."""
        return {"version": SUPPORTED_VERSIONS[-1], "server": "relax-events", **info}

    @routes.get("/model_info")
    @routes.get("/get_model_info")
    def model_info() -> dict[str, Any]:
        """Describe the served model."""
        return {
            "model_path": info["model_path"],
            "is_generation": True,
            "weight_version": runner.version_names[-1],
        }

    return routes


def _control_routes(runner: EngineRunner, may_load: Callable[[Path], bool]) -> APIRouter:
    """Routes that pause, resume and load weights."""
    routes = APIRouter()

    @routes.post("/pause_generation")
    async def pause_generation(body: PauseBody) -> dict[str, str]:
        """Pause generation."""
        await runner.pause(body.mode)
        return {"status": "ok", "message": f"paused, {body.mode}"}

    @routes.post("/continue_generation")
    async def continue_generation() -> dict[str, str]:
        """Resume generation."""
        await runner.resume()
        return {"status": "ok", "message": "resumed"}

    @routes.api_route("/flush_cache", methods=["GET", "POST"])
    def flush_cache() -> Response:
        """Do nothing: no prompt's cache outlives its samples here."""
        return Response("there is no prefix cache to flush\n")

    @routes.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: LoadBody) -> JSONResponse:
        """Load a folder's weights between two tokens; running samples continue with them."""
        if not may_load(Path(body.model_path)):
            return JSONResponse({"success": False, "message": LOAD_FORBIDDEN}, status_code=403)
        if body.abort_all_requests:
            await runner.abort(None)
        try:
            await runner.load_weights(
                lambda: runner.engine.read_weights(Path(body.model_path)), name=body.weight_version
            )
        except RelaxError as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return JSONResponse({"success": True, "message": "loaded"})

    @routes.post("/weights_checker")
    async def weights_checker(_: CheckBody) -> dict[str, Any]:
        """Return the digest of every loaded tensor, by its name in a checkpoint."""
        return {
            "success": True,
            "ranks": [
                {"checksums": await runner.call(lambda: _checksums(runner.engine.tensors()))}
            ],
        }

    return routes


def _checksums(tensors: dict[str, Any]) -> dict[str, str]:
    single = {
        name: part.cpu()
        for whole, tensor in tensors.items()
        for name, part in split_experts(whole, tensor)
    }
    return {
        name: TensorRecipe((name,)).digest(single, dtype=tensor.dtype)
        for name, tensor in single.items()
    }


class _GenerateCall:
    """An in-flight call of `/generate`.

    Attributes:
        service: Generates the completions.
        requests: One for each sample of each prompt, in the order of the response.
    """

    def __init__(
        self,
        service: CompletionService,
        body: GenerateBody,
        *,
        recorded: ModelFolder | None,
        is_incremental: bool,
    ) -> None:
        self.body, self.input_logprobs = body, dict[int, list[Logprob]]()
        self.service, self._recorded, self._is_incremental = (
            service,
            recorded,
            is_incremental and body.stream,
        )
        self._prompts = [self._prompt(prompt_index) for prompt_index in range(body.num_prompts)]
        call = [
            (prompt_index, request)
            for prompt_index in range(body.num_prompts)
            for request in self._build_requests(prompt_index)
        ]
        self._prompt_indices, self.requests = (
            [prompt_index for prompt_index, _ in call],
            [request for _, request in call],
        )
        self._sent: dict[str, tuple[int, str]] = {}
        self._require_own_rids()
        if body.return_routed_experts:
            self._require_record()

    def _build_requests(self, prompt_index: int) -> list[CompletionRequest]:
        """Build the requests of a prompt, one for each of its samples."""
        params: SamplingParams = self.body.value_for("sampling_params", prompt_index)
        rid: str = self.body.value_for("rid", prompt_index) or secrets.token_hex(16)
        names = [rid] if params.n == 1 else [f"{rid}/{number}" for number in range(params.n)]
        num_top = (
            self.body.value_for("top_logprobs_num", prompt_index)
            if self.body.value_for("return_logprob", prompt_index)
            else 0
        )
        tokens = self._prompts[prompt_index]
        return [
            CompletionRequest(
                rid=name,
                tokens=tokens,
                params=params,
                num_top=num_top,
                is_streamed=self.body.stream,
            )
            for name in names
        ]

    def _require_own_rids(self) -> None:
        repeated = [
            rid
            for rid, count in Counter(request.rid for request in self.requests).items()
            if count > 1
        ]
        if repeated:
            raise PoisonSample(
                f"rid {repeated[0]!r} is given more than once; give every sample of a call a "
                "rid of its own"
            )

    def input_scores(self) -> dict[int, list[Logprob]]:
        """Compute the prompts' own log-probabilities, by prompt index, if requested; called in the
        engine's thread.
        """
        scores = {}
        for prompt_index, tokens in enumerate(self._prompts):
            start = self.body.value_for("logprob_start_len", prompt_index)
            if self.body.value_for("return_logprob", prompt_index) and start >= 0:
                found: list[float | None] = [
                    None,
                    *self.service.runner.engine.score(tokens).tolist(),
                ]
                scores[prompt_index] = self._entries(tokens[start:], found[start:])
        return scores

    def event(self, number: int, completion: Completion) -> dict[str, Any]:
        """Build an event as SGLang does: all tokens, or those since the last event."""
        request, prompt_index, version = (
            self.requests[number],
            self._prompt_indices[number],
            self.service.runner.version_names[-1],
        )
        tokens, text = self._sent.get(request.rid, (0, "")) if self._is_incremental else (0, "")
        self._sent[request.rid] = (len(completion.tokens), completion.text)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": completion.finish,
            "prompt_tokens": len(request.tokens),
            "completion_tokens": len(completion.tokens),
            "cached_tokens": 0,
            "weight_version": completion.version_spans[-1]["version"]
            if completion.version_spans
            else version,
            "weight_versions": completion.version_spans,
            "e2e_latency": completion.seconds,
        }
        if self.body.value_for("return_logprob", prompt_index):
            fresh = completion.tokens[tokens:]
            meta["output_token_logprobs"] = self._entries(
                fresh, completion.logprobs[tokens:].tolist()
            )
            meta["input_token_logprobs"] = self.input_logprobs.get(prompt_index, [])
            if completion.top_tokens is not None:
                meta["output_top_logprobs"] = [
                    self._entries(row, [None] * len(row)) for row in completion.top_tokens[tokens:]
                ]
        if (
            self.body.return_routed_experts
            and completion.finish
            and completion.experts is not None
            and len(completion.experts)
        ):
            assert self._recorded is not None, "rejected earlier"
            meta["routed_experts"] = self._recorded.encode_experts(
                completion.experts[self.body.routed_experts_start_len :]
            )
        return {
            "text": completion.text[len(text) :],
            "output_ids": completion.tokens[tokens:].tolist(),
            "meta_info": meta,
            "index": number,
        }

    def _prompt(self, prompt_index: int) -> NDArray[np.int32]:
        given = self.body.value_for(
            "text" if self.body.input_ids is None else "input_ids", prompt_index
        )
        tokens = (
            self.service.renderer.encode(given)
            if isinstance(given, str)
            else np.array(given, np.int64)
        )
        if (
            len(tokens) == 0
            or tokens.min() < 0
            or tokens.max() >= self.service.runner.engine.vocab_size
        ):
            vocabulary = f"ids from 0 to {self.service.runner.engine.vocab_size - 1}"
            raise PoisonSample(
                f"prompt {prompt_index} must have at least one token, of {vocabulary}; got "
                f"{tokens.tolist()[:8]}"
            )
        return tokens.astype(np.int32)

    def _require_record(self) -> None:
        start, shortest = self.body.routed_experts_start_len, min(map(len, self._prompts))
        if self._recorded is None:
            raise PoisonSample(
                "return_routed_experts: nothing is recorded here; start the server with "
                "--enable-return-routed-experts"
            )
        if start > shortest:
            raise PoisonSample(
                f"routed_experts_start_len must lie in each prompt, got {start} for one of "
                f"{shortest} tokens"
            )
        if any(request.params.max_new_tokens == 0 for request in self.requests):
            raise PoisonSample(
                "return_routed_experts with max_new_tokens = 0: a prompt without new tokens "
                "is not computed; generate a token"
            )

    def _entries(
        self, tokens: NDArray[np.int32], logprobs: Sequence[float | None]
    ) -> list[Logprob]:
        texts: list[str | None] = [None] * len(tokens)
        if self.body.return_text_in_logprobs:
            texts = [
                self.service.decode(tokens[index : index + 1], skip_special_tokens=False)
                for index in range(len(tokens))
            ]
        values = (value if value is not None and np.isfinite(value) else None for value in logprobs)
        return list(zip(values, tokens.tolist(), texts, strict=True))


async def _events(call: _GenerateCall) -> AsyncGenerator[bytes]:
    async with aclosing(merge_streams(call.service, call.requests)) as completions:
        async for number, completion in completions:
            yield orjson.dumps(call.event(number, completion))


async def _whole(call: _GenerateCall) -> Any:
    async with aclosing(merge_streams(call.service, call.requests)) as completions:
        found = {number: call.event(number, completion) async for number, completion in completions}
    replies = [found[number] for number in range(len(call.requests))]
    return replies if call.body.is_batch or len(replies) > 1 else replies[0]
