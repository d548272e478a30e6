"""A session: one sample's conversation with the policy, within the bounds of a sample.

    driver   messages --> tokens: the path so far + the rendered messages --> engine --> a node of
    the graph

Tokens are only appended: a turn is never rendered or tokenized again, and the trainer reads exactly
what the engine read and sampled. Turns of a session may run at the same time; the same messages
sample the same tokens in any order: a turn's seed follows from the sample's seed and the path.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from relax_events.data.conversations import ASSISTANT
from relax_events.data.messages import count_text_bytes
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.environments.reply_media import ProcessedReply
from relax_events.episodes.graph import (
    Continuation,
    MessageGraph,
    Node,
    path_messages,
    path_tokens,
    sampled_mask,
    split_attempt,
)
from relax_events.episodes.render_queue import RenderQueue
from relax_events.errors import EngineFailed, PoisonSample
from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.media.model_inputs import ProcessedMedia

Generate = Callable[[GenerationRequest], Awaitable[GeneratedSample]]


class Limit(StrEnum):
    """A bound of a sample that ends a session."""

    CONTEXT = "context_length_exceeded"
    TOKENS = "token_limit_reached"
    TURNS = "turn_limit_reached"


class SessionLimit(Exception):
    """The session has reached a bound of its sample: no turn can follow on this path."""

    def __init__(self, limit: Limit, text: str) -> None:
        super().__init__(text)
        self.limit = limit


class SessionClosed(Exception):
    """The session takes no more calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBounds:
    """The bounds of a sample: turns, and tokens of one path. `max_new_tokens` of the request's
    sampling bounds the sampled tokens of all turns.
    """

    max_turns: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """What the policy reads before its next turn.

    Attributes:
        continuation: The messages, and where they attach to the graph.
        input_tokens: Their tokens.
        tools: The tools of the conversation: a JSON list, or empty.
        begun: The first tokens of the turn, from an earlier attempt; None without any.
        max_calls: How many tool calls the turn may have; None for any number.
    """

    continuation: Continuation
    input_tokens: NDArray[np.int32]
    tools: str = ""
    begun: SampleRequest | None = None
    max_calls: int | None = None


@dataclass(slots=True, eq=False)
class Session:
    """See the module's docstring. `sample_turn` is for drivers that append messages to one
    conversation.

    Attributes:
        request: Of the prompt group; its prompt is that of the conversation.
        sample: The sample, with the tokens of an earlier attempt.
        bounds: Of the sample.
        renderer: Of the policy.
        queue: The threads that render.
        generate: Samples a turn.
        has_new_prompt: Whether the prompt is not that of the prompt group.
        runs_alone: Whether its environment shares no process with others.
        graph: The turns.
        refused: The bounds that were met, in that order, each with the turns after which a call was
            refused; None where it was to begin a conversation.
        error: Why the last turn failed; empty if it did not.
        num_calls: Turns that the engine was asked for.
        rewards: Of the environment for each turn, or of a harness.
        malformed_calls: Why tool calls could not be read, in a word for each.
    """

    request: GenerationRequest
    sample: SampleRequest
    bounds: SessionBounds
    renderer: PromptRenderer
    queue: RenderQueue
    generate: Generate
    has_new_prompt: bool = False
    runs_alone: bool = False
    graph: MessageGraph = field(default_factory=MessageGraph)
    refused: dict[Limit, set[Node | None]] = field(default_factory=dict)
    error: str = ""
    num_calls: int = 0
    rewards: tuple[float, ...] = ()
    malformed_calls: list[str] = field(default_factory=list)
    _is_begun: bool = False
    _is_closed: bool = False
    _next: PreparedTurn | None = None
    _in_flight: tuple[PreparedTurn, GenerationRequest] | None = None
    _begun_paths: Counter[bytes] = field(default_factory=Counter)
    _num_running: int = 0
    _num_reserved: int = 0
    _entry: asyncio.Lock = field(default_factory=asyncio.Lock)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def context(self) -> EnvironmentContext:
        """The row of the prompt."""
        assert self.request.environment_context is not None, "checked on submission"
        return self.request.environment_context

    @property
    def limit(self) -> Limit | None:
        """The first bound that was met."""
        return next(iter(self.refused), None)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled in all turns."""
        return sum(len(node.sample.tokens) for node in self.graph.nodes)

    @property
    def is_spent(self) -> bool:
        """Whether no turn, or no token, is left of the sample's bounds."""
        return (
            len(self.graph.nodes) >= self.bounds.max_turns
            or self.num_sampled_tokens >= self.request.sampling.max_new_tokens
        )

    def close(self) -> None:
        """Refuse further turns; a turn in the engine is not recorded."""
        self._is_closed = True

    def replace_prompt(
        self,
        context: EnvironmentContext,
        tokens: NDArray[np.int32],
        media: tuple[ProcessedMedia, ...],
    ) -> None:
        """Begin with another prompt than the prompt group's."""
        self.has_new_prompt = True
        self.request = replace(
            self.request, environment_context=context, prompt_tokens=tokens, media=media
        )

    def restore(self, media: tuple[ProcessedMedia, ...]) -> None:
        """Restore the turns of an earlier attempt; nothing of them is generated again.

        Args:
            media: Of its replies.
        Raises:
            PoisonSample: The attempt's arrays contradict each other.
        """
        past, begun = split_attempt(self.sample)
        turn = self._begin()
        for part in past:
            self.num_calls += 1
            self._add(turn, build_turn(part.tokens, self.request, FinishReason.STOP), part.message)
            turn = self._continue(part.replies, part.reply_tokens)
        self._next = replace(turn, begun=begun)
        self.request = replace(self.request, media=self.request.media + media)

    async def sample_turn(self, replies: Sequence[ProcessedReply] = ()) -> Node:
        """Sample the next turn: after the prompt, or after replies to the last turn.

        Raises:
            SessionLimit: A bound of the sample is met.
            PoisonSample: The prompt leaves no room, the replies can't be rendered, or the engine
                refuses the turn.
            EngineFailed: The engine has failed or was stopped.
        """
        if replies:
            turn = await self._render_replies(replies)
        else:
            turn, self._next = self._next or self._begin(), None
        try:
            async with self.begin_turn(turn) as request:
                self._in_flight = turn, request
                return await self.sample_prepared(turn, request)
        except SessionLimit as error:
            if self.graph.nodes:
                raise
            raise PoisonSample(f"sample {self.sample.sample_id}: {error}") from None
        finally:
            self._in_flight = None

    @asynccontextmanager
    async def begin_turn(
        self, turn: PreparedTurn, *, max_tokens: int | None = None
    ) -> AsyncIterator[GenerationRequest]:
        """Build the engine's request for a turn, once the tokens that it may sample fit the bounds
        together with those of the turns that run. Turns begin in the order of their calls.

        Args:
            turn: What the policy reads.
            max_tokens: The caller's own bound on the turn.
        Raises:
            SessionLimit: A bound of the sample is met.
            SessionClosed: The session has ended.
        """
        prompt = np.concatenate([path_tokens(turn.continuation.parent), turn.input_tokens])
        async with self._entry:
            while (count := self._count_room(turn, len(prompt), max_tokens)) is None:
                self._ended.clear()
                await self._ended.wait()
            self._num_running += 1
            self._num_reserved += count
        try:
            yield self._build_request(turn, prompt, max_new_tokens=count)
        finally:
            self._num_running -= 1
            self._num_reserved -= count
            self._ended.set()

    async def sample_prepared(self, turn: PreparedTurn, request: GenerationRequest) -> Node:
        """Sample a turn that has begun, and record it; errors as of `sample_turn`."""
        self._require_open()
        self._is_begun = True
        sample = await self.generate(request)
        self.error = ""
        if sample.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.error = sample.error or "the engine was stopped during the call"
            raise EngineFailed(self.error)
        if self._is_closed:
            raise SessionClosed("the session ended during the call")
        return self._add(
            turn, sample, self._read_turn(turn, sample, name=request.samples[0].sample_id)
        )

    def interrupt(self, turn: GeneratedSample | None) -> bool:
        """Record the turn in flight, whose tokens may be incomplete; return whether the session has
        more than the attempt that it began with.

        Args:
            turn: What the engine has of the turn in flight; None if it has not begun.
        """
        if self._in_flight is not None:
            prepared, request = self._in_flight
            turn = turn or build_turn(request.samples[0], request, FinishReason.ABORT)
            self._in_flight = None
            self._add(prepared, turn, ChatMessage(ASSISTANT))
        return self._is_begun and bool(self.graph.nodes)

    def _require_open(self) -> None:
        if self._is_closed:
            raise SessionClosed("the session has ended; no further call is answered")

    def _count_room(
        self, turn: PreparedTurn, num_prompt: int, max_tokens: int | None
    ) -> int | None:
        """Return how many tokens a turn may sample; None if turns that run may need some of them.

        Args:
            turn: What the policy reads before it.
            num_prompt: Tokens of its prompt.
            max_tokens: The caller's own bound on the turn.
        Raises:
            SessionLimit: A bound of the sample is met.
            SessionClosed: The session has ended.
        """
        self._require_open()
        left = self.request.sampling.max_new_tokens - self.num_sampled_tokens
        room = self.bounds.max_context_tokens - num_prompt
        self._check_bounds(left, room, num_tokens=num_prompt, parent=turn.continuation.parent)
        count = min(left, room) if max_tokens is None else min(left, room, max_tokens)
        has_turn = len(self.graph.nodes) + self._num_running < self.bounds.max_turns
        return count if has_turn and self._num_reserved + count <= left else None

    def _build_request(
        self, turn: PreparedTurn, prompt: NDArray[np.int32], *, max_new_tokens: int
    ) -> GenerationRequest:
        parent, path = turn.continuation.parent, turn.continuation.digest
        begun = turn.begun or self._build_empty_turn()
        sample = replace(
            begun,
            sample_id=f"{self.sample.sample_id}#{self.num_calls}",
            seed=turn_seed(self.sample.seed, path, self._begun_paths[path]),
            loss_mask=None,
            turns=(),
            routed_experts=begun.routed_experts if parent is None else parent.sample.routed_experts,
        )
        self.num_calls += 1
        self._begun_paths[path] += 1
        before = () if parent is None else path_messages(parent)
        is_input = np.zeros(len(turn.input_tokens), bool)
        return replace(
            self.request,
            prompt_tokens=prompt,
            is_sampled=np.concatenate([sampled_mask(parent), is_input]),
            samples=(sample,),
            sampling=self.request.sampling.model_copy(update={"max_new_tokens": max_new_tokens}),
            environment_context=EnvironmentContext(
                messages=(*before, *turn.continuation.rest), tools=turn.tools
            ),
        )

    def _check_bounds(self, left: int, room: int, *, num_tokens: int, parent: Node | None) -> None:
        bounds, max_new_tokens = self.bounds, self.request.sampling.max_new_tokens
        if len(self.graph.nodes) >= bounds.max_turns:
            text = f"the session has had its {bounds.max_turns} turns"
            raise self._refuse(Limit.TURNS, text, parent=parent)
        if left < 1:
            text = f"the session has sampled its {max_new_tokens} tokens"
            raise self._refuse(Limit.TOKENS, text, parent=parent)
        if room < 1:
            text = (
                f"the conversation has {num_tokens} tokens, and the context ends at "
                f"{bounds.max_context_tokens}"
            )
            raise self._refuse(Limit.CONTEXT, text, parent=parent)

    def _refuse(self, limit: Limit, text: str, *, parent: Node | None) -> SessionLimit:
        self.refused.setdefault(limit, set()).add(parent)
        return SessionLimit(limit, text)

    def _build_empty_turn(self) -> SampleRequest:
        num_top = self.request.num_top_tokens
        return SampleRequest(
            sample_id="",
            seed=0,
            tokens=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            segments=(),
            top_tokens=np.empty((0, num_top), np.int32) if num_top else None,
        )

    def _begin(self) -> PreparedTurn:
        """Return the turn after the prompt."""
        messages = tuple(self.context.messages)
        return PreparedTurn(
            Continuation(None, messages, b""),
            self.request.prompt_tokens,
            self.context.tools,
            self.sample,
        )

    def _continue(self, messages: Sequence[ChatMessage], tokens: NDArray[np.int32]) -> PreparedTurn:
        """Return the turn after messages that follow the last turn."""
        parent = self.graph.nodes[-1]
        continuation = Continuation(parent, tuple(messages), parent.digest)
        return PreparedTurn(continuation, tokens, self.context.tools)

    async def _render_replies(self, replies: Sequence[ProcessedReply]) -> PreparedTurn:
        last = self.graph.nodes[-1]
        before, messages = path_messages(last)[:-1], [reply.message for reply in replies]
        media = tuple(piece for reply in replies for piece in reply.media)
        self.request = replace(self.request, media=self.request.media + media)
        return self._continue(messages, await self.render_bridge(before, messages, last))

    async def render_prompt(
        self, messages: Sequence[ChatMessage], *, tools: str
    ) -> NDArray[np.int32]:
        """Render a conversation up to its first turn; errors as of `render_bridge`."""
        work = partial(self.renderer.prompt_tokens, messages, tools=tools)
        num_bytes = count_text_bytes(messages, tools=tools)
        return await self.queue.run(self, work, num_bytes=num_bytes)

    async def render_bridge(
        self, before: Sequence[ChatMessage], messages: Sequence[ChatMessage], last: Node
    ) -> NDArray[np.int32]:
        """Render the tokens between a turn and the next one.

        Args:
            before: The conversation up to the turn.
            messages: The messages after it.
            last: The turn.
        Raises:
            PoisonSample: They can't be rendered.
            EngineFailed: The rendering is late.
        """
        tokens, tools = last.sample.tokens, last.tools
        has_stop = bool(len(tokens)) and int(tokens[-1]) in self.request.stop_token_ids
        bridge = self.renderer.bridge_tokens
        work = partial(bridge, before, messages, tools=tools, has_stop=has_stop)
        num_bytes = count_text_bytes([*before, *messages], tools=tools)
        return await self.queue.run(self, work, num_bytes=num_bytes)

    def _add(self, turn: PreparedTurn, sample: GeneratedSample, reply: ChatMessage) -> Node:
        return self.graph.add(
            turn.continuation,
            tools=turn.tools,
            input_tokens=turn.input_tokens,
            sample=sample,
            reply=reply,
        )

    def _read_turn(self, turn: PreparedTurn, sample: GeneratedSample, *, name: str) -> ChatMessage:
        """Return a turn as its driver receives it: as the policy wrote it.

        Args:
            turn: As it was prepared.
            sample: The turn.
            name: Of the turn, unique in the run.
        """
        return ChatMessage.of_text(ASSISTANT, self.renderer.turn_text(sample.tokens))


def turn_seed(seed: int, path: bytes, num_before: int) -> int:
    """Derive the seed of a turn.

    Args:
        seed: Of the sample. The turn after the prompt group's prompt has it, so that an environment
            changes nothing before its first reply.
        path: Digest of the messages before the turn; empty after the prompt group's prompt.
        num_before: Earlier turns of the session after the same messages.
    """
    if not path and not num_before:
        return seed
    text = f"{seed}/{path.hex()}/{num_before}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def build_turn(
    sample: SampleRequest, request: GenerationRequest, reason: FinishReason
) -> GeneratedSample:
    """Return the tokens of an earlier attempt as the engine returned them."""
    return GeneratedSample(
        sample_id=sample.sample_id,
        prompt_group_id=request.prompt_group_id,
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        segments=sample.segments,
        finish_reason=reason,
        top_tokens=sample.top_tokens,
        loss_mask=sample.loss_mask,
        turns=sample.turns,
        routed_experts=sample.routed_experts,
    )
