"""A session: one episode's talk with the policy, within the bounds of a sample.

    program  chat(messages) --> tokens: known path + rendered rest --> engine --> node of the graph

Calls of one session run one after another, so that the same calls sample the same tokens: a call's
seed follows from the sample's seed and the number of calls before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from relax_events.data.conversations import ASSISTANT
from relax_events.data.messages import PartReader, count_text_bytes, refuse_part
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GeneratedSample, GenerationRequest, SampleRequest
from relax_events.environments.episode import turn_seed
from relax_events.errors import EngineFailed
from relax_events.events.parts import ChatMessage, ContentPart, FinishReason, Modality, ToolCall
from relax_events.gateway.graph import (
    Continuation,
    MessageGraph,
    Node,
    path_media,
    path_tokens,
    sampled_mask,
)
from relax_events.gateway.render_queue import RenderQueue
from relax_events.gateway.session_media import SessionMedia
from relax_events.gateway.tool_calls import parse_reply
from relax_events.http.identity import BodyBound
from relax_events.objects.store import list_message_media

Generate = Callable[[GenerationRequest], Awaitable[GeneratedSample]]


class Limit(StrEnum):
    """A bound of a sample that ends a session."""

    CONTEXT = "context_length_exceeded"
    TOKENS = "token_limit_reached"
    TURNS = "turn_limit_reached"


class SessionLimit(Exception):
    """The session has reached a bound of its sample: no call can follow on this path."""

    def __init__(self, limit: Limit, text: str) -> None:
        super().__init__(text)
        self.limit = limit


class SessionClosed(Exception):
    """The session takes no more calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBounds:
    """The bounds of a sample: calls, sampled tokens of all calls, tokens of one path."""

    max_turns: int
    max_new_tokens: int
    max_context_tokens: int


@dataclass(slots=True, eq=False)
class Session:
    """See the module's docstring. It is used in one event loop.

    Attributes:
        request: The request of the sample's prompt group: sampling, stop tokens, ids.
        sample: The sample's own request, with its seed.
        bounds: Of the sample.
        renderer: Of the policy.
        queue: The threads that render for all sessions.
        graph: The messages and turns.
        limit: The first bound that a call met; None if no call met a bound.
        error: The engine's error, if it failed the last call.
        first_call: Set when the program calls the model.
        answers: Conversations that a later call may refer to by the name of their last answer.
        num_refused: Calls that were refused for their content.
        media: The media files of its messages; None if the policy reads text only.
        malformed_calls: Why tool calls of the policy could not be read, one word for each.
    """

    request: GenerationRequest
    sample: SampleRequest
    bounds: SessionBounds
    renderer: PromptRenderer
    queue: RenderQueue
    generate: Generate
    graph: MessageGraph = field(default_factory=MessageGraph)
    limit: Limit | None = None
    error: str = ""
    answers: dict[str, list[ChatMessage]] = field(default_factory=dict)
    num_refused: int = 0
    num_calls: int = 0
    media: SessionMedia | None = None
    malformed_calls: list[str] = field(default_factory=list)
    first_call: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closed: bool = False
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled in all calls."""
        return sum(len(node.sample.tokens) for node in self.graph.nodes)

    @property
    def read_part(self) -> PartReader:
        """What reads the parts of a program's messages that are no text."""
        return refuse_part if self.media is None else self.media.read_part

    @property
    def body_bound(self) -> BodyBound:
        """The bounds of a call of this session: its texts fit the context, and its media the media
        of a sample.
        """
        return BodyBound.of_text(
            self.bounds.max_context_tokens,
            longest_token_bytes=self.renderer.longest_token_bytes,
            media_bytes=0 if self.media is None else self.media.max_request_bytes,
        )

    def close(self) -> None:
        """Refuse further calls; a call in the engine is not recorded."""
        self._is_closed = True

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: str = "",
        max_tokens: int | None = None,
    ) -> Node:
        """Sample the next turn of a conversation, and record it.

        Args:
            messages: The whole history, as the program has it.
            tools: JSON list of the tools that the program offers; empty if there are none.
            max_tokens: The program's own bound on the turn.
        Raises:
            SessionClosed: The session has ended.
            SessionLimit: A bound of the sample is met.
            PoisonSample: The messages can't be rendered, or the engine refuses them.
            EngineFailed: The engine has failed; the same call may succeed later.
            ObjectError, StoreUnavailable: The media of the messages can't be stored or loaded.
        """
        self.first_call.set()
        async with self._turn:
            if self._is_closed:
                raise SessionClosed("the session has ended; no further call is answered")
            messages = await self._resolve(messages)
            num_bytes = count_text_bytes(messages, tools=tools)
            if text := self._describe_excess(num_bytes):
                raise self._meet(Limit.CONTEXT, text)
            continuation = self.graph.find(messages, tools=tools)
            input_tokens = await self._render(messages, continuation, tools, num_bytes=num_bytes)
            request = self._build_request(continuation, input_tokens, max_tokens)
            if self.media is not None and (
                files := path_media(continuation.parent) + list_message_media(continuation.rest)
            ):
                request = replace(request, media=await self.media.load(files))
            self.num_calls += 1
            sample = await self.generate(request)
            self.error = ""
            if sample.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self.error = sample.error or "the engine was stopped during the call"
                raise EngineFailed(self.error)
            if self._is_closed:
                raise SessionClosed("the session ended during the call")
            return self.graph.add(
                continuation,
                tools=tools,
                input_tokens=input_tokens,
                sample=sample,
                reply=self._reply(sample, tools, name=request.samples[0].sample_id),
            )

    async def count_tokens(self, messages: Sequence[ChatMessage], *, tools: str = "") -> int:
        """Return how many tokens the policy would read.

        Raises:
            SessionLimit: They can't fit the context.
            PoisonSample: The messages can't be rendered.
            EngineFailed, ObjectError, StoreUnavailable: As for `chat`.
        """
        messages = await self._resolve(messages)
        num_bytes = count_text_bytes(messages, tools=tools)
        if text := self._describe_excess(num_bytes):
            raise SessionLimit(Limit.CONTEXT, text)
        continuation = self.graph.find(messages, tools=tools)
        rendered = await self._render(messages, continuation, tools, num_bytes=num_bytes)
        return len(path_tokens(continuation.parent)) + len(rendered)

    def _describe_excess(self, num_bytes: int) -> str:
        """Return why texts of so many bytes can't fit the context with any number of tokens; empty
        if they may fit.
        """
        longest = self.bounds.max_context_tokens * self.renderer.longest_token_bytes
        if num_bytes <= longest:
            return ""
        return (
            f"the conversation has {num_bytes} bytes of text, and the context of "
            f"{self.bounds.max_context_tokens} tokens holds {longest} at most; shorten it"
        )

    async def _resolve(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return messages with references in the place of media files."""
        return messages if self.media is None else await self.media.resolve(messages)

    async def _render(
        self,
        messages: Sequence[ChatMessage],
        continuation: Continuation,
        tools: str,
        *,
        num_bytes: int,
    ) -> NDArray[np.int32]:
        renderer, parent = self.renderer, continuation.parent
        renderer.require_template()
        if parent is None:
            whole = partial(renderer.prompt_tokens, messages, tools=tools)
            return await self.queue.run(self, whole, num_bytes=num_bytes)
        num_known, tokens = len(messages) - len(continuation.rest), parent.sample.tokens
        work = partial(
            renderer.bridge_tokens,
            messages[: num_known - 1],
            continuation.rest,
            tools=tools,
            has_stop=bool(len(tokens)) and int(tokens[-1]) in renderer.stop_token_ids,
        )
        return await self.queue.run(self, work, num_bytes=num_bytes)

    def _build_request(
        self, continuation: Continuation, input_tokens: NDArray[np.int32], max_tokens: int | None
    ) -> GenerationRequest:
        """Build the engine's request.

        Raises:
            SessionLimit: A bound of the sample is met.
        """
        bounds, parent = self.bounds, continuation.parent
        prompt = np.concatenate([path_tokens(parent), input_tokens])
        left = bounds.max_new_tokens - self.num_sampled_tokens
        room = bounds.max_context_tokens - len(prompt)
        if len(self.graph.nodes) >= bounds.max_turns:
            raise self._meet(Limit.TURNS, f"the session has had its {bounds.max_turns} turns")
        if left < 1:
            raise self._meet(
                Limit.TOKENS, f"the session has sampled its {bounds.max_new_tokens} tokens"
            )
        if room < 1:
            raise self._meet(
                Limit.CONTEXT,
                f"the conversation has {len(prompt)} tokens, and the context ends at "
                f"{bounds.max_context_tokens}",
            )
        number = self.num_calls
        max_new_tokens = min(left, room) if max_tokens is None else min(left, room, max_tokens)
        num_top = self.request.num_top_tokens
        sample = replace(
            self.sample,
            sample_id=f"{self.sample.sample_id}#{number}",
            seed=turn_seed(self.sample.seed, number),
            tokens=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            segments=(),
            top_tokens=np.empty((0, num_top), np.int32) if num_top else None,
            routed_experts=None if parent is None else parent.sample.routed_experts,
        )
        return replace(
            self.request,
            prompt_tokens=prompt,
            is_sampled=np.concatenate([sampled_mask(parent), np.zeros(len(input_tokens), bool)]),
            samples=(sample,),
            media=(),
            sampling=self.request.sampling.model_copy(update={"max_new_tokens": max_new_tokens}),
            environment_context=None,
        )

    def _meet(self, limit: Limit, text: str) -> SessionLimit:
        self.limit = self.limit or limit
        return SessionLimit(limit, text)

    def _reply(self, sample: GeneratedSample, tools: str, *, name: str) -> ChatMessage:
        """Return a turn as the program receives it."""
        style = self.renderer.tool_format
        parsed = parse_reply(self.renderer.turn_text(sample.tokens), style=style, tools=tools)
        self.malformed_calls += parsed.malformed
        calls = [
            ToolCall(function, arguments, style.call_id(name, number))
            for number, (function, arguments) in enumerate(parsed.calls)
        ]
        parts = [ContentPart(Modality.TEXT, parsed.content)] if parsed.content else []
        return ChatMessage(ASSISTANT, parts, parsed.reasoning, calls)
