"""SGLang's native routes, as in version 0.5.23: generation from token ids or text, and control of
weights and requests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from relax_events.engines.sglang.checkpoint import ModelFolder, split_experts
from relax_events.engines.sglang.client import SUPPORTED_VERSIONS
from relax_events.engines.sglang.weight_checksums import Part, TensorRecipe
from relax_events.errors import EngineFailed, RelaxError
from relax_events.serving.completions import CompletionRequest, CompletionService
from relax_events.serving.engine_runner import EngineRunner
from relax_events.serving.generate_call import GenerateCall
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
        call = GenerateCall(service, body, recorded=recorded, is_incremental=is_incremental)
        await call.score_prompts()
        if body.stream:
            return StreamingResponse(event_stream(call.events()), media_type="text/event-stream")
        return JSONResponse(await cancel_on_disconnect(request, call.whole()))

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
        name: TensorRecipe((Part(name),)).digest(single, dtype=tensor.dtype)
        for name, tensor in single.items()
    }
