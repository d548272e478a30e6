"""A session whose caller sends the whole history with each call, as programs do.

    program  chat(messages) --> the longest path that the history continues + rendered rest --> turn

Calls of one session run at the same time, as sub-agents make them, as far as all that they may
sample fits the bounds of the sample; others wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from relax_events.api.drivers import (
    Continuation,
    Limit,
    Node,
    PreparedTurn,
    Session,
    SessionLimit,
    path_media,
    path_tokens,
)
from relax_events.api.engines import GeneratedSample, ProcessedMedia
from relax_events.api.events import ChatMessage, ContentPart, Modality, ToolCall
from relax_events.api.http import BodyBound
from relax_events.data.conversations import ASSISTANT
from relax_events.data.messages import PartReader, count_text_bytes, refuse_part
from relax_events.objects.store import list_message_media
from relax_events.packages.gateway.session_media import SessionMedia
from relax_events.packages.gateway.tool_calls import parse_reply


class OwnClock:
    """The time of a program without the time in which a call of it waits for the policy.

    Attributes:
        runs: Set while no call waits.
        stops: Set while a call waits.
        is_cut_off: Whether its caller cancelled the call that ended last.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start at 0; `now` in seconds."""
        self._now, self._started = now, now()
        self._num_calls, self._stopped, self._waited = 0, 0.0, 0.0
        self._resumed, self.is_cut_off = self._started, False
        self.runs, self.stops = asyncio.Event(), asyncio.Event()
        self.runs.set()

    @property
    def seconds(self) -> float:
        """The program's own time."""
        now = self._now() if self.runs.is_set() else self._stopped
        return now - self._started - self._waited

    @property
    def idle_seconds(self) -> float:
        """Time since the last call ended; 0 while a call waits."""
        return self._now() - self._resumed if self.runs.is_set() else 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop it during a call; several may run at the same time."""
        if not self._num_calls:
            self._stopped = self._now()
            self.runs.clear()
            self.stops.set()
        self._num_calls += 1
        is_cut_off = False
        try:
            yield
        except asyncio.CancelledError:
            is_cut_off = True
            raise
        finally:
            self._num_calls -= 1
            self.is_cut_off = is_cut_off
            if not self._num_calls:
                self._resumed = self._now()
                self._waited += self._resumed - self._stopped
                self.stops.clear()
                self.runs.set()


@dataclass(slots=True, eq=False)
class ChatSession(Session):
    """See the module's docstring. It is used in one event loop.

    Attributes:
        first_call: Set when the program calls the model.
        clock: The program's own time.
        answers: Conversations that a later call may refer to by the name of their last answer.
        num_refused: Calls that were refused for their content.
        media: The media files of its messages; None if the policy reads text only.
    """

    has_new_prompt: bool = True
    answers: dict[str, list[ChatMessage]] = field(default_factory=dict)
    num_refused: int = 0
    media: SessionMedia | None = None
    first_call: asyncio.Event = field(default_factory=asyncio.Event)
    clock: OwnClock = field(default_factory=OwnClock)

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

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: str = "",
        max_tokens: int | None = None,
        max_calls: int | None = None,
    ) -> Node:
        """Sample the next turn of a conversation, and record it.

        Args:
            messages: The whole history, as the program has it.
            tools: JSON list of the tools that the program offers; empty if there are none.
            max_tokens: The program's own bound on the turn.
            max_calls: How many tool calls the turn may have.
        Raises:
            SessionClosed: The session has ended.
            SessionLimit: A bound of the sample is met.
            PoisonSample: The messages can't be rendered, or the engine refuses them.
            EngineFailed: The engine has failed; the same call may succeed later.
            ObjectError, StoreUnavailable: The media of the messages can't be stored or loaded.
        """
        self.first_call.set()
        with self.clock.stopped():
            self._require_open()
            messages = await self._resolve(messages)
            if text := self._describe_excess(messages, tools):
                parent = self.graph.find(messages, tools=tools).parent
                raise self._refuse(Limit.CONTEXT, text, parent=parent)
            turn = replace(await self._prepare(messages, tools), max_calls=max_calls)
            async with self.begin_turn(turn, max_tokens=max_tokens) as request:
                media = await self._load_media(turn.continuation)
                return await self.sample_prepared(turn, replace(request, media=media))

    async def count_tokens(self, messages: Sequence[ChatMessage], *, tools: str = "") -> int:
        """Return how many tokens the policy would read.

        Raises:
            SessionLimit: They can't fit the context.
            PoisonSample: The messages can't be rendered.
            EngineFailed, ObjectError, StoreUnavailable: As for `chat`.
        """
        with self.clock.stopped():
            messages = await self._resolve(messages)
            if text := self._describe_excess(messages, tools):
                raise SessionLimit(Limit.CONTEXT, text)
            turn = await self._prepare(messages, tools)
            return len(path_tokens(turn.continuation.parent)) + len(turn.input_tokens)

    def _describe_excess(self, messages: Sequence[ChatMessage], tools: str) -> str:
        """Return why texts can't fit the context with any number of tokens; empty if they may
        fit.
        """
        num_bytes = count_text_bytes(messages, tools=tools)
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

    async def _prepare(self, messages: Sequence[ChatMessage], tools: str) -> PreparedTurn:
        """Find the path that a history continues, and render the rest."""
        self.renderer.require_template()
        continuation = self.graph.find(messages, tools=tools)
        parent, rest = continuation.parent, continuation.rest
        if parent is None:
            tokens = await self.render_prompt(messages, tools=tools)
        else:
            before = messages[: len(messages) - len(rest) - 1]
            tokens = await self.render_bridge(before, rest, parent)
        return PreparedTurn(continuation, tokens, tools)

    async def _load_media(self, continuation: Continuation) -> tuple[ProcessedMedia, ...]:
        if self.media is None:
            return ()
        files = path_media(continuation.parent) + list_message_media(continuation.rest)
        return await self.media.load(files) if files else ()

    def _read_turn(self, turn: PreparedTurn, sample: GeneratedSample, *, name: str) -> ChatMessage:
        """Return a turn as the program receives it."""
        style = self.renderer.tool_format
        parsed = parse_reply(
            self.renderer.turn_text(sample.tokens),
            style=style,
            tools=turn.tools,
            max_calls=turn.max_calls,
        )
        self.malformed_calls += parsed.malformed
        calls = [
            ToolCall(function, arguments, style.call_id(name, number))
            for number, (function, arguments) in enumerate(parsed.calls)
        ]
        parts = [ContentPart(Modality.TEXT, parsed.content)] if parsed.content else []
        return ChatMessage(ASSISTANT, parts, parsed.reasoning, calls)
