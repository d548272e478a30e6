"""A call of SGLang's `/generate`: its requests, and its response as SGLang writes it."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.errors import PoisonSample
from relax_events.serving.completions import (
    Completion,
    CompletionRequest,
    CompletionService,
    merge_streams,
)
from relax_events.serving.schemas import GenerateBody, SamplingParams

Logprob = tuple[float | None, int, str | None]
"""A token's log-probability in nats, None if not finite or unknown; its id; its text if requested.
"""


class GenerateCall:
    """An in-flight call of `/generate`."""

    def __init__(
        self,
        service: CompletionService,
        body: GenerateBody,
        *,
        recorded: ModelFolder | None,
        is_incremental: bool,
    ) -> None:
        self._body, self._input_logprobs = body, dict[int, list[Logprob]]()
        self._service, self._recorded, self._is_incremental = (
            service,
            recorded,
            is_incremental and body.stream,
        )
        self._prompts = [
            self._encode_prompt(prompt_index) for prompt_index in range(body.num_prompts)
        ]
        call = [
            (prompt_index, request)
            for prompt_index in range(body.num_prompts)
            for request in self._build_requests(prompt_index)
        ]
        self._prompt_indices, self._requests = (
            [prompt_index for prompt_index, _ in call],
            [request for _, request in call],
        )
        self._sent: dict[str, tuple[int, str]] = {}
        self._require_own_rids()
        if body.return_routed_experts:
            self._require_record()

    def _build_requests(self, prompt_index: int) -> list[CompletionRequest]:
        """Build the requests of a prompt, one for each of its samples."""
        params: SamplingParams = self._body.value_for("sampling_params", prompt_index)
        rid: str = self._body.value_for("rid", prompt_index) or secrets.token_hex(16)
        names = [rid] if params.n == 1 else [f"{rid}/{number}" for number in range(params.n)]
        num_top = (
            self._body.value_for("top_logprobs_num", prompt_index)
            if self._body.value_for("return_logprob", prompt_index)
            else 0
        )
        tokens = self._prompts[prompt_index]
        return [
            CompletionRequest(
                rid=name,
                tokens=tokens,
                params=params,
                num_top=num_top,
                is_streamed=self._body.stream,
            )
            for name in names
        ]

    def _require_own_rids(self) -> None:
        repeated = [
            rid
            for rid, count in Counter(request.rid for request in self._requests).items()
            if count > 1
        ]
        if repeated:
            raise PoisonSample(
                f"rid {repeated[0]!r} is given more than once; give every sample of a call a "
                "rid of its own"
            )

    async def score_prompts(self) -> None:
        """Compute the prompts' own log-probabilities, if requested."""
        self._input_logprobs = await self._service.runner.call(self._score_prompts)

    def _score_prompts(self) -> dict[int, list[Logprob]]:
        """Return log-probabilities by prompt index; called in the engine's thread."""
        scores = {}
        for prompt_index, tokens in enumerate(self._prompts):
            start = self._body.value_for("logprob_start_len", prompt_index)
            if self._body.value_for("return_logprob", prompt_index) and start >= 0:
                found: list[float | None] = [
                    None,
                    *self._service.runner.engine.score(tokens).tolist(),
                ]
                scores[prompt_index] = self._entries(tokens[start:], found[start:])
        return scores

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of a streamed response."""
        async with aclosing(merge_streams(self._service, self._requests)) as completions:
            async for number, completion in completions:
                yield orjson.dumps(self._event(number, completion))

    async def whole(self) -> Any:
        """Return the whole response: one reply, or a list of them."""
        async with aclosing(merge_streams(self._service, self._requests)) as completions:
            found = {
                number: self._event(number, completion) async for number, completion in completions
            }
        replies = [found[number] for number in range(len(self._requests))]
        return replies if self._body.is_batch or len(replies) > 1 else replies[0]

    def _event(self, number: int, completion: Completion) -> dict[str, Any]:
        """Build an event as SGLang does: all tokens, or those since the last event."""
        request, prompt_index, version = (
            self._requests[number],
            self._prompt_indices[number],
            self._service.runner.version_names[-1],
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
        if self._body.value_for("return_logprob", prompt_index):
            fresh = completion.tokens[tokens:]
            meta["output_token_logprobs"] = self._entries(
                fresh, completion.logprobs[tokens:].tolist()
            )
            meta["input_token_logprobs"] = self._input_logprobs.get(prompt_index, [])
            if completion.top_tokens is not None:
                meta["output_top_logprobs"] = [
                    self._entries(row, [None] * len(row)) for row in completion.top_tokens[tokens:]
                ]
        if (
            self._body.return_routed_experts
            and completion.finish
            and completion.experts is not None
            and len(completion.experts)
        ):
            assert self._recorded is not None, "rejected earlier"
            meta["routed_experts"] = self._recorded.encode_experts(
                completion.experts[self._body.routed_experts_start_len :]
            )
        return {
            "text": completion.text[len(text) :],
            "output_ids": completion.tokens[tokens:].tolist(),
            "meta_info": meta,
            "index": number,
        }

    def _encode_prompt(self, prompt_index: int) -> NDArray[np.int32]:
        given = self._body.value_for(
            "text" if self._body.input_ids is None else "input_ids", prompt_index
        )
        tokens = (
            self._service.renderer.encode(given)
            if isinstance(given, str)
            else np.array(given, np.int64)
        )
        if (
            len(tokens) == 0
            or tokens.min() < 0
            or tokens.max() >= self._service.runner.engine.vocab_size
        ):
            vocabulary = f"ids from 0 to {self._service.runner.engine.vocab_size - 1}"
            raise PoisonSample(
                f"prompt {prompt_index} must have at least one token, of {vocabulary}; got "
                f"{tokens.tolist()[:8]}"
            )
        return tokens.astype(np.int32)

    def _require_record(self) -> None:
        start, shortest = self._body.routed_experts_start_len, min(map(len, self._prompts))
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
        if any(request.params.max_new_tokens == 0 for request in self._requests):
            raise PoisonSample(
                "return_routed_experts with max_new_tokens = 0: a prompt without new tokens "
                "is not computed; generate a token"
            )

    def _entries(
        self, tokens: NDArray[np.int32], logprobs: Sequence[float | None]
    ) -> list[Logprob]:
        texts: list[str | None] = [None] * len(tokens)
        if self._body.return_text_in_logprobs:
            texts = [
                self._service.decode(tokens[index : index + 1], skip_special_tokens=False)
                for index in range(len(tokens))
            ]
        values = (value if value is not None and np.isfinite(value) else None for value in logprobs)
        return list(zip(values, tokens.tolist(), texts, strict=True))
