"""From a question to its answer, in tokens and text: what SGLang's routes and OpenAI's have in
common.
"""

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
from relax_events.serving.engine_runner import Station, new_seed
from relax_events.serving.schemas import SamplingParams

INTERNAL_ERROR = 500
Finish = dict[str, Any]
"""Why an answer ended, in SGLang's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One completion to draw.

    Attributes:
        rid: Its id, among all that are under way.
        tokens: Of the prompt.
        params: How it is drawn; of its `n` this is one.
        num_top: How many most probable tokens are wanted with each.
        is_streamed: Whether the answer is wanted while it grows.
    """

    rid: str
    tokens: NDArray[np.int32]
    params: SamplingParams
    num_top: int = 0
    is_streamed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A completion as it stands.

    Attributes:
        tokens: All so far; of a text that stops it, the token that completes it is the last.
        logprobs: Of each, in nats.
        top_tokens: Most probable ids at each, [tokens, num_top]; None where none are wanted.
        text: Without special tokens unless they are wanted, and without the text that stopped it.
        finish: Why it ended; None while it goes on.
        experts: Which the tokens of prompt and completion went through, all but the last, [tokens,
            layers, top_k]; None where that is not recorded.
        spans: Runs of tokens by the name of their weights.
        seconds: Since it was asked for.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_tokens: NDArray[np.int32] | None
    text: str
    finish: Finish | None
    spans: list[dict[str, Any]]
    seconds: float
    experts: NDArray[np.generic] | None = None


class Respondent:
    """Answers questions by an engine, and turns text into tokens and back by its tokenizer."""

    def __init__(self, station: Station, renderer: PromptRenderer) -> None:
        """Answer by an engine.

        Args:
            station: Where it runs.
            renderer: Of its model.
        """
        self.station, self.renderer = station, renderer

    async def answer(self, question: Question) -> AsyncGenerator[Answer]:
        """Draw a completion: give it as it grows, if it is to be streamed, and at its end.

        Raises:
            PoisonSample: It can't be generated.
            EngineFailed: The engine is broken.
        """
        params, asked_at = question.params, time.monotonic()
        if params.max_new_tokens == 0:
            nothing = np.empty(0, np.int32)
            ended: Finish = {"type": "length", "length": 0}
            yield Answer(
                tokens=nothing,
                logprobs=nothing.astype(np.float32),
                top_tokens=None,
                text="",
                finish=ended,
                spans=[],
                seconds=0.0,
            )
            return
        is_looked_at = question.is_streamed or bool(params.stops)
        async with aclosing(
            self.station.generate(self._request(question), is_streamed=is_looked_at)
        ) as samples:
            async for sample, has_ended in samples:
                answer = self._answer(
                    question, sample, has_ended=has_ended, seconds=time.monotonic() - asked_at
                )
                if question.is_streamed or answer.finish is not None:
                    yield answer
                if answer.finish is not None:
                    return

    def text(self, tokens: NDArray[np.int32], *, skip_special_tokens: bool = True) -> str:
        """Decode tokens."""
        return self.renderer.completion_text(tokens, skip_special_tokens=skip_special_tokens)

    def _request(self, question: Question) -> GenerationRequest:
        params, empty = question.params, np.empty(0, np.int32)
        seed = new_seed() if params.sampling_seed is None else params.sampling_seed
        sample = SampleRequest(
            sample_id=question.rid,
            seed=seed,
            tokens=empty,
            logprobs=empty.astype(np.float32),
            segments=(),
        )
        own = () if params.ignore_eos else self.renderer.stop_token_ids
        return GenerationRequest(
            prompt_group_id=question.rid,
            prompt_tokens=question.tokens,
            samples=(sample,),
            sampling=params.sampling,
            stop_token_ids=(*own, *(params.stop_token_ids or ())),
            num_top_tokens=question.num_top,
        )

    def _answer(
        self, question: Question, sample: GeneratedSample, *, has_ended: bool, seconds: float
    ) -> Answer:
        params, tokens, matched = question.params, sample.tokens, ""
        text = self.text(tokens, skip_special_tokens=params.skip_special_tokens)
        if any(stop in text for stop in params.stops):
            count, matched = self._stopped(tokens, params)
            tokens = tokens[:count]
            whole = self.text(tokens, skip_special_tokens=params.skip_special_tokens)
            text = whole if params.no_stop_trim else whole[: whole.index(matched)]
        return Answer(
            tokens=tokens,
            logprobs=sample.logprobs[: len(tokens)],
            top_tokens=None if sample.top_tokens is None else sample.top_tokens[: len(tokens)],
            text=text,
            finish={"type": "stop", "matched": matched}
            if matched
            else _finish(sample)
            if has_ended
            else None,
            spans=self._spans(sample, len(tokens)),
            seconds=seconds,
            experts=None
            if sample.routed_experts is None
            else sample.routed_experts[: len(question.tokens) + len(tokens) - 1],
        )

    def _stopped(self, tokens: NDArray[np.int32], params: SamplingParams) -> tuple[int, str]:
        """Return how many tokens hold the first text that stops the completion, and that text."""

        def found(count: int) -> str:
            text = self.text(tokens[:count], skip_special_tokens=params.skip_special_tokens)
            return min((stop for stop in params.stops if stop in text), key=text.index, default="")

        low, high = 1, len(tokens)
        while low < high:  # a text that is there stays there
            middle = (low + high) // 2
            low, high = (low, middle) if found(middle) else (middle + 1, high)
        return low, found(low)

    def _spans(self, sample: GeneratedSample, count: int) -> list[dict[str, Any]]:
        ends = np.minimum(
            np.cumsum([segment.num_tokens for segment in sample.segments]), count
        ).tolist()
        spans, start = [], 0
        for segment, end in zip(sample.segments, ends, strict=True):
            if end > start:
                spans.append(
                    {
                        "version": self.station.names[segment.policy_version],
                        "start": start,
                        "end": end,
                    }
                )
            start = end
        return spans


async def merged(
    respondent: Respondent, questions: Sequence[Question]
) -> AsyncGenerator[tuple[int, Answer]]:
    """Give the answers to several questions as they come, each with its question's place; who stops
    listening ends them all.

    Raises:
        PoisonSample, EngineFailed: As `Respondent.answer`, of the first that fails.
    """
    found = asyncio.Queue[tuple[int, Answer | Exception]]()

    async def carry(place: int, question: Question) -> None:
        try:
            async with aclosing(respondent.answer(question)) as answers:
                async for answer in answers:
                    found.put_nowait((place, answer))
        except Exception as error:
            found.put_nowait((place, error))

    tasks = [
        asyncio.create_task(carry(place, question)) for place, question in enumerate(questions)
    ]
    num_open = len(tasks)
    try:
        while num_open:
            place, answer = await found.get()
            if isinstance(answer, Exception):
                raise answer
            num_open -= answer.finish is not None
            yield place, answer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _finish(sample: GeneratedSample) -> Finish:
    match sample.finish_reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": int(sample.tokens[-1])}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(sample.tokens)}
        case FinishReason.ABORT:
            return {
                "type": "abort",
                "message": "it was aborted",
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
