"""Complete requests in tokens and text, for both SGLang's routes and OpenAI's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest, SampleRequest
from relax_events.events.parts import FinishReason
from relax_events.serving.engine_runner import EngineRunner, new_seed
from relax_events.serving.schemas import SamplingParams

INTERNAL_ERROR = 500
Finish = dict[str, Any]
"""Finish reason in SGLang's format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One completion to generate.

    Attributes:
        rid: Its id, unique among in-flight requests.
        tokens: Of the prompt.
        params: Sampling parameters; this is one of their `n` completions.
        num_top: How many most probable tokens to return with each.
        is_streamed: Whether to yield partial completions.
    """

    rid: str
    tokens: NDArray[np.int32]
    params: SamplingParams
    num_top: int = 0
    is_streamed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A completion, partial or finished.

    Attributes:
        tokens: All so far; the last one completes the stop text, if there is one.
        logprobs: Of each, in nats.
        top_tokens: Most probable ids at each, [tokens, num_top]; None if not requested.
        text: Without special tokens unless requested, and without the stop text.
        finish: Why it finished; None while it is partial.
        experts: Of the tokens of prompt and completion, all but the last, [tokens, layers, top_k];
            None if not recorded.
        version_spans: Runs of tokens by the name of their weights.
        seconds: Since the request.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_tokens: NDArray[np.int32] | None
    text: str
    finish: Finish | None
    version_spans: list[dict[str, Any]]
    seconds: float
    experts: NDArray[np.generic] | None = None


class CompletionService:
    """Generates completions with an engine, and encodes and decodes text with its tokenizer."""

    def __init__(self, runner: EngineRunner, renderer: PromptRenderer) -> None:
        """Create the service.

        Args:
            runner: Of the engine.
            renderer: Of its model.
        """
        self.runner, self.renderer = runner, renderer

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[Completion]:
        """Generate a completion: yield partial ones if it is streamed, and the finished one.

        Raises:
            PoisonSample: It can't be generated.
            EngineFailed: The engine has failed.
        """
        params, started_at = request.params, time.monotonic()
        if params.max_new_tokens == 0:
            nothing = np.empty(0, np.int32)
            ended: Finish = {"type": "length", "length": 0}
            yield Completion(
                tokens=nothing,
                logprobs=nothing.astype(np.float32),
                top_tokens=None,
                text="",
                finish=ended,
                version_spans=[],
                seconds=0.0,
            )
            return
        is_streamed = request.is_streamed or bool(params.stops)
        async with aclosing(
            self.runner.generate(self._build_request(request), is_streamed=is_streamed)
        ) as samples:
            async for sample, has_ended in samples:
                completion = self._build_completion(
                    request, sample, has_ended=has_ended, seconds=time.monotonic() - started_at
                )
                if request.is_streamed or completion.finish is not None:
                    yield completion
                if completion.finish is not None:
                    return

    def decode(self, tokens: NDArray[np.int32], *, skip_special_tokens: bool = True) -> str:
        """Decode tokens."""
        return self.renderer.completion_text(tokens, skip_special_tokens=skip_special_tokens)

    def _build_request(self, request: CompletionRequest) -> GenerationRequest:
        params, empty = request.params, np.empty(0, np.int32)
        seed = new_seed() if params.sampling_seed is None else params.sampling_seed
        sample = SampleRequest(
            sample_id=request.rid,
            seed=seed,
            tokens=empty,
            logprobs=empty.astype(np.float32),
            segments=(),
        )
        own = () if params.ignore_eos else self.renderer.stop_token_ids
        return GenerationRequest(
            prompt_group_id=request.rid,
            prompt_tokens=request.tokens,
            samples=(sample,),
            sampling=params.sampling,
            stop_token_ids=(*own, *(params.stop_token_ids or ())),
            num_top_tokens=request.num_top,
        )

    def _build_completion(
        self,
        request: CompletionRequest,
        sample: GeneratedSample,
        *,
        has_ended: bool,
        seconds: float,
    ) -> Completion:
        params, tokens, matched = request.params, sample.tokens, ""
        text = self.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        if any(stop in text for stop in params.stops):
            count, matched = self._find_stop(tokens, params)
            tokens = tokens[:count]
            whole = self.decode(tokens, skip_special_tokens=params.skip_special_tokens)
            text = whole if params.no_stop_trim else whole[: whole.index(matched)]
        return Completion(
            tokens=tokens,
            logprobs=sample.logprobs[: len(tokens)],
            top_tokens=None if sample.top_tokens is None else sample.top_tokens[: len(tokens)],
            text=text,
            finish={"type": "stop", "matched": matched}
            if matched
            else _finish_fields(sample)
            if has_ended
            else None,
            version_spans=self._version_spans(sample, len(tokens)),
            seconds=seconds,
            experts=None
            if sample.routed_experts is None
            else sample.routed_experts[: len(request.tokens) + len(tokens) - 1],
        )

    def _find_stop(self, tokens: NDArray[np.int32], params: SamplingParams) -> tuple[int, str]:
        """Return the number of tokens up to the first stop text, and that text."""

        def found(count: int) -> str:
            text = self.decode(tokens[:count], skip_special_tokens=params.skip_special_tokens)
            return min((stop for stop in params.stops if stop in text), key=text.index, default="")

        low, high = 1, len(tokens)
        while low < high:  # a stop text that is found in a prefix is found in every longer one
            middle = (low + high) // 2
            low, high = (low, middle) if found(middle) else (middle + 1, high)
        return low, found(low)

    def _version_spans(self, sample: GeneratedSample, count: int) -> list[dict[str, Any]]:
        ends = np.minimum(
            np.cumsum([segment.num_tokens for segment in sample.segments]), count
        ).tolist()
        version_spans, start = [], 0
        for segment, end in zip(sample.segments, ends, strict=True):
            if end > start:
                version_spans.append(
                    {
                        "version": self.runner.version_names[segment.policy_version],
                        "start": start,
                        "end": end,
                    }
                )
            start = end
        return version_spans


async def merge_streams(
    service: CompletionService, requests: Sequence[CompletionRequest]
) -> AsyncGenerator[tuple[int, Completion]]:
    """Yield the completions of several requests as they arrive, each with its request's index;
    closing the generator aborts all.

    Raises:
        PoisonSample, EngineFailed: As `CompletionService.complete`, of the first that fails.
    """
    found = asyncio.Queue[tuple[int, Completion | Exception]]()

    async def carry(index: int, request: CompletionRequest) -> None:
        try:
            async with aclosing(service.complete(request)) as completions:
                async for completion in completions:
                    found.put_nowait((index, completion))
        except Exception as error:
            found.put_nowait((index, error))

    tasks = [asyncio.create_task(carry(index, request)) for index, request in enumerate(requests)]
    num_open = len(tasks)
    try:
        while num_open:
            index, completion = await found.get()
            if isinstance(completion, Exception):
                raise completion
            num_open -= completion.finish is not None
            yield index, completion
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _finish_fields(sample: GeneratedSample) -> Finish:
    match sample.finish_reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": int(sample.tokens[-1])}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(sample.tokens)}
        case FinishReason.ABORT:
            return {
                "type": "abort",
                "message": "the request was aborted",
                "status_code": None,
                "err_type": None,
            }
        case FinishReason.ERROR:
            return {
                "type": "abort",
                "message": sample.error,
                "status_code": INTERNAL_ERROR,
                "err_type": "InternalServerError",
            }
