"""SGLang's own routes, as version 0.5.23 has them: generation by token ids or text, and the control
of weights and requests.
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

from relax_events.engines.sglang.checkpoint import ModelFolder, single_tensors
from relax_events.engines.sglang.client import SUPPORTED
from relax_events.engines.sglang.weight_checksums import Recipe
from relax_events.errors import EngineFailed, PoisonSample, RelaxError
from relax_events.serving.completions import Answer, Question, Respondent, merged
from relax_events.serving.engine_runner import Station
from relax_events.serving.schemas import (
    AbortBody,
    CheckBody,
    GenerateBody,
    LoadBody,
    PauseBody,
    SamplingParams,
)
from relax_events.serving.streams import event_stream, unless_gone

PROBE_SECONDS = 20.0
Logprob = tuple[float | None, int, str | None]
"""Of a token, in nats; null where it is no finite number or not known. Its id, and its text where
that is wanted."""
ELSEWHERE = (
    "weights are not loaded from there; start the server with --weights-root, or with --token-file"
)


def native_routes(
    respondent: Respondent,
    *,
    model_path: Path,
    recorded: ModelFolder | None,
    is_incremental: bool,
    may_load: Callable[[Path], bool],
) -> APIRouter:
    """Make the routes.

    Args:
        respondent: Answers.
        model_path: Of the model that is served.
        recorded: The same with its experts, where it is told which of them tokens go through.
        is_incremental: Whether a streamed event has what is new, or all so far.
        may_load: Tells whether weights may be loaded from a folder.
    """
    routes, said = (
        APIRouter(),
        {
            "incremental_streaming_output": is_incremental,
            "enable_return_routed_experts": recorded is not None,
        },
    )
    routes.include_router(_asking(respondent, recorded, is_incremental=is_incremental))
    routes.include_router(_telling(respondent, {"model_path": str(model_path), **said}))
    routes.include_router(_steering(respondent.station, may_load))
    return routes


def _asking(
    respondent: Respondent, recorded: ModelFolder | None, *, is_incremental: bool
) -> APIRouter:
    """Generation, and its end before its time."""
    routes, station = APIRouter(), respondent.station

    @routes.post("/generate")
    async def generate(request: Request, body: GenerateBody) -> Response:
        """Generate for one prompt or several."""
        asked = _Asked(respondent, body, recorded=recorded, is_incremental=is_incremental)
        asked.input_logprobs = await station.call(asked.input_scores)
        if body.stream:
            return StreamingResponse(event_stream(_events(asked)), media_type="text/event-stream")
        return JSONResponse(await unless_gone(request, _whole(asked)))

    @routes.post("/abort_request")
    async def abort_request(body: AbortBody) -> Response:
        """End a request, or all, before its time; it is answered with what it has."""
        await station.abort(None if body.abort_all else body.rid)
        return Response()

    return routes


def _telling(respondent: Respondent, said: dict[str, Any]) -> APIRouter:
    """What the server says of itself, and how it is."""
    routes, station = APIRouter(), respondent.station

    @routes.get("/ready")
    @routes.get("/health")
    def health() -> Response:
        """Tell whether the engine lives."""
        return Response(status_code=200 if station.failure is None else 503)

    @routes.get("/health_generate")
    async def health_generate() -> Response:
        """Draw a token, and tell whether that went well."""
        probe = Question(
            rid=f"probe-{secrets.token_hex(4)}",
            tokens=np.zeros(1, np.int32),
            params=SamplingParams(max_new_tokens=1),
        )
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                [_ async for _ in respondent.answer(probe)]
        except (TimeoutError, EngineFailed):
            return Response(status_code=503)
        return Response(status_code=200)

    @routes.get("/server_info")
    @routes.get("/get_server_info")
    def server_info() -> dict[str, Any]:
        """Say which SGLang this is like."""
        return {"version": SUPPORTED[-1], "server": "relax-events", **said}

    @routes.get("/model_info")
    @routes.get("/get_model_info")
    def model_info() -> dict[str, Any]:
        """Say what is served."""
        return {
            "model_path": said["model_path"],
            "is_generation": True,
            "weight_version": station.names[-1],
        }

    return routes


def _steering(station: Station, may_load: Callable[[Path], bool]) -> APIRouter:
    """Pauses, and other weights."""
    routes = APIRouter()

    @routes.post("/pause_generation")
    async def pause_generation(body: PauseBody) -> dict[str, str]:
        """Draw no further token."""
        await station.pause(body.mode)
        return {"status": "ok", "message": f"paused, {body.mode}"}

    @routes.post("/continue_generation")
    async def continue_generation() -> dict[str, str]:
        """Go on drawing."""
        await station.go_on()
        return {"status": "ok", "message": "goes on"}

    @routes.api_route("/flush_cache", methods=["GET", "POST"])
    def flush_cache() -> Response:
        """Do nothing: no prompt's cache outlives its samples here."""
        return Response("there is no prefix cache to flush\n")

    @routes.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: LoadBody) -> JSONResponse:
        """Load a folder's weights between two tokens; what runs goes on under them."""
        if not may_load(Path(body.model_path)):
            return JSONResponse({"success": False, "message": ELSEWHERE}, status_code=403)
        if body.abort_all_requests:
            await station.abort(None)
        try:
            await station.load(
                lambda: station.engine.read_weights(Path(body.model_path)), name=body.weight_version
            )
        except RelaxError as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return JSONResponse({"success": True, "message": "loaded"})

    @routes.post("/weights_checker")
    async def weights_checker(_: CheckBody) -> dict[str, Any]:
        """Give the digest of every tensor that serves, by its name in a checkpoint."""
        return {
            "success": True,
            "ranks": [
                {"checksums": await station.call(lambda: _checksums(station.engine.tensors()))}
            ],
        }

    return routes


def _checksums(tensors: dict[str, Any]) -> dict[str, str]:
    single = {
        name: part.cpu()
        for whole, tensor in tensors.items()
        for name, part in single_tensors(whole, tensor)
    }
    return {
        name: Recipe((name,)).digest(single, dtype=tensor.dtype) for name, tensor in single.items()
    }


class _Asked:
    """A call of `/generate` on its way.

    Attributes:
        respondent: Answers.
        questions: One for each sample of each prompt, in the order of the answers.
    """

    def __init__(
        self,
        respondent: Respondent,
        body: GenerateBody,
        *,
        recorded: ModelFolder | None,
        is_incremental: bool,
    ) -> None:
        self.body, self.input_logprobs = body, dict[int, list[Logprob]]()
        self.respondent, self._recorded, self._is_incremental = (
            respondent,
            recorded,
            is_incremental and body.stream,
        )
        self._prompts = [self._prompt(place) for place in range(body.num_prompts)]
        asked = [
            (place, question)
            for place in range(body.num_prompts)
            for question in self._questions(place)
        ]
        self._places, self.questions = (
            [place for place, _ in asked],
            [question for _, question in asked],
        )
        self._shown: dict[str, tuple[int, str]] = {}
        self._require_own_rids()
        if body.return_routed_experts:
            self._require_record()

    def _questions(self, place: int) -> list[Question]:
        """Return what is asked of a prompt, once for each of its samples."""
        params: SamplingParams = self.body.of("sampling_params", place)
        rid: str = self.body.of("rid", place) or secrets.token_hex(16)
        names = [rid] if params.n == 1 else [f"{rid}/{number}" for number in range(params.n)]
        num_top = (
            self.body.of("top_logprobs_num", place) if self.body.of("return_logprob", place) else 0
        )
        tokens = self._prompts[place]
        return [
            Question(
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
            for rid, count in Counter(question.rid for question in self.questions).items()
            if count > 1
        ]
        if repeated:
            raise PoisonSample(
                f"rid {repeated[0]!r} is given more than once; give every sample of a call a "
                "rid of its own"
            )

    def input_scores(self) -> dict[int, list[Logprob]]:
        """Compute the prompts' own log-probabilities, by place, where they are wanted; called by
        the engine's thread.
        """
        scores = {}
        for place, tokens in enumerate(self._prompts):
            start = self.body.of("logprob_start_len", place)
            if self.body.of("return_logprob", place) and start >= 0:
                found: list[float | None] = [
                    None,
                    *self.respondent.station.engine.score(tokens).tolist(),
                ]
                scores[place] = self._entries(tokens[start:], found[start:])
        return scores

    def event(self, number: int, answer: Answer) -> dict[str, Any]:
        """Write an answer as SGLang does: all of it, or what is new since the last event."""
        question, place, version = (
            self.questions[number],
            self._places[number],
            self.respondent.station.names[-1],
        )
        tokens, text = self._shown.get(question.rid, (0, "")) if self._is_incremental else (0, "")
        self._shown[question.rid] = (len(answer.tokens), answer.text)
        meta: dict[str, Any] = {
            "id": question.rid,
            "finish_reason": answer.finish,
            "prompt_tokens": len(question.tokens),
            "completion_tokens": len(answer.tokens),
            "cached_tokens": 0,
            "weight_version": answer.spans[-1]["version"] if answer.spans else version,
            "weight_versions": answer.spans,
            "e2e_latency": answer.seconds,
        }
        if self.body.of("return_logprob", place):
            fresh = answer.tokens[tokens:]
            meta["output_token_logprobs"] = self._entries(fresh, answer.logprobs[tokens:].tolist())
            meta["input_token_logprobs"] = self.input_logprobs.get(place, [])
            if answer.top_tokens is not None:
                meta["output_top_logprobs"] = [
                    self._entries(row, [None] * len(row)) for row in answer.top_tokens[tokens:]
                ]
        if (
            self.body.return_routed_experts
            and answer.finish
            and answer.experts is not None
            and len(answer.experts)
        ):
            assert self._recorded is not None, "refused before"
            meta["routed_experts"] = self._recorded.told_experts(
                answer.experts[self.body.routed_experts_start_len :]
            )
        return {
            "text": answer.text[len(text) :],
            "output_ids": answer.tokens[tokens:].tolist(),
            "meta_info": meta,
            "index": number,
        }

    def _prompt(self, place: int) -> NDArray[np.int32]:
        given = self.body.of("text" if self.body.input_ids is None else "input_ids", place)
        tokens = (
            self.respondent.renderer.encode(given)
            if isinstance(given, str)
            else np.array(given, np.int64)
        )
        if (
            len(tokens) == 0
            or tokens.min() < 0
            or tokens.max() >= self.respondent.station.engine.vocab_size
        ):
            vocabulary = f"ids from 0 to {self.respondent.station.engine.vocab_size - 1}"
            raise PoisonSample(
                f"prompt {place} must have at least one token, of {vocabulary}; got "
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
        if any(question.params.max_new_tokens == 0 for question in self.questions):
            raise PoisonSample(
                "return_routed_experts with max_new_tokens = 0: a prompt that nothing is "
                "drawn after is not read; draw a token"
            )

    def _entries(
        self, tokens: NDArray[np.int32], logprobs: Sequence[float | None]
    ) -> list[Logprob]:
        texts: list[str | None] = [None] * len(tokens)
        if self.body.return_text_in_logprobs:
            texts = [
                self.respondent.text(tokens[place : place + 1], skip_special_tokens=False)
                for place in range(len(tokens))
            ]
        values = (value if value is not None and np.isfinite(value) else None for value in logprobs)
        return list(zip(values, tokens.tolist(), texts, strict=True))


async def _events(asked: _Asked) -> AsyncGenerator[bytes]:
    async with aclosing(merged(asked.respondent, asked.questions)) as answers:
        async for number, answer in answers:
            yield orjson.dumps(asked.event(number, answer))


async def _whole(asked: _Asked) -> Any:
    async with aclosing(merged(asked.respondent, asked.questions)) as answers:
        found = {number: asked.event(number, answer) async for number, answer in answers}
    replies = [found[number] for number in range(len(asked.questions))]
    return replies if asked.body.is_batch or len(replies) > 1 else replies[0]
