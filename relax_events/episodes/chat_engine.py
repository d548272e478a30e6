"""An engine whose turns come from a server of chat completions (POST .../v1/chat/completions): a
baseline for a policy, not a policy to train.

It sends messages, so a request needs its conversation in `environment_context`. The replies become
tokens by the policy's tokenizer and chat template; the policy sampled none of them, so their
log-probabilities are 0.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from relax_events.data.messages import parse_message, print_message
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    EngineUsage,
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.errors import ConfigError, PoisonSample, RewardError, WeightsError
from relax_events.events.json_text import parse_json
from relax_events.events.parts import ChatMessage, FinishReason, VersionSegment
from relax_events.objects.store import list_message_media
from relax_events.rewards.http_client import (
    build_chat_url,
    close_client,
    import_client,
    post_json,
    read_token,
)
from relax_events.runtime.loop_thread import LoopThread
from relax_events.weights import Weights

MAX_CALLS = 16
"""Calls of the server at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatServer:
    """A server and its model.

    Attributes:
        url: Its address, with or without `/v1`.
        model: The model's name; empty sends none.
        token_variable: Name of the environment variable that holds the bearer token; empty sends
            none.
        seconds: Deadline of one attempt of a call.
    """

    url: str
    model: str = ""
    token_variable: str = ""
    seconds: float = 300.0

    def check_token(self) -> None:
        """Refuse a token that can't be sent.

        Raises:
            ConfigError: The text names --key-variable and the variable, without its value.
        """
        if not self.token_variable:
            return
        try:
            read_token(self.token_variable, url=self.url)
        except RewardError as error:
            raise ConfigError(f"--key-variable: {error}") from None


class ChatEngine:
    """Implements `Engine`; see the module's docstring."""

    policy_version = 0

    def __init__(self, server: ChatServer, renderer: PromptRenderer) -> None:
        """Send nothing yet.

        Args:
            server: The server.
            renderer: Of the policy, for the tokens of replies, which a thread of the engine
                renders; not shared.
        Raises:
            EnvironmentProblem: The HTTP client is not installed.
        """
        import_client()
        self._server, self._renderer = server, renderer
        self._url = build_chat_url(server.url)
        self._loop = LoopThread("chat-engine")
        self._free = asyncio.Semaphore(MAX_CALLS)
        self._running: dict[str, Future[GeneratedSample]] = {}
        self._inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.num_tokens = 0
        self.billed = 0, 0
        """Prompt and completion tokens that the server counted."""

    @property
    def num_running(self) -> int:
        """Samples submitted and not returned."""
        return len(self._running)

    @property
    def usage(self) -> EngineUsage:
        """Calls in flight, and tokens of the replies."""
        return EngineUsage(num_decoding=len(self._running), num_generated=self.num_tokens)

    def submit(self, request: GenerationRequest) -> None:
        """Send the conversation once for each sample.

        Raises:
            PoisonSample: It is missing, or has media.
        """
        context = request.environment_context
        if context is None:
            raise PoisonSample(f"prompt group {request.prompt_group_id} has no messages to send")
        if list_message_media(context.messages):
            raise PoisonSample("media are not sent to a server; try such rows on a model's folder")
        for sample in request.samples:
            name = sample.sample_id
            self._running[name] = self._loop.run(self._complete(request, sample, context))
            self._running[name].add_done_callback(partial(self._note_end, name))

    def _note_end(self, name: str, _: Future[GeneratedSample]) -> None:
        self._inbox.put(name)

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Return the samples that have arrived; see `Engine`."""
        names: list[str] = []
        try:
            if self._running and timeout_seconds:
                names.append(self._inbox.get(timeout=timeout_seconds))
            while True:
                names.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        arrived = [self._running.pop(name) for name in names if name in self._running]
        return [future.result() for future in arrived if not future.cancelled()]

    def interrupt(self) -> None:
        """Make a waiting poll return, from any thread."""
        self._inbox.put("")

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Cancel calls; nothing of them is kept, since a reply comes whole."""
        names = [name for name in self._running if sample_ids is None or name in sample_ids]
        for name in names:
            self._running.pop(name).cancel()
        return [_build_sample("", name, FinishReason.ABORT) for name in names]

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        """Refuse: the model is the server's."""
        raise WeightsError(f"the model of {self._url} can't be changed")

    def sleep(self) -> None:
        """Do nothing: no memory is held."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Cancel all calls."""
        self._loop.close(close_client())

    async def _complete(
        self, request: GenerationRequest, sample: SampleRequest, context: EnvironmentContext
    ) -> GeneratedSample:
        """Return the reply as a sample; a server that fails, a reply that can't be read, or an
        unforeseen error ends the sample with the error.
        """
        group, name, server = request.prompt_group_id, sample.sample_id, self._server
        try:
            async with self._free:
                reply = await post_json(
                    self._url,
                    self._build_body(request, context),
                    seconds=server.seconds,
                    token_variable=server.token_variable,
                )
            message, reason = self._read(reply)
            tokens = self._renderer.reply_tokens(context.messages, message, tools=context.tools)
            if reason is FinishReason.LENGTH and int(tokens[-1]) in request.stop_token_ids:
                tokens = tokens[:-1]
        except (RewardError, PoisonSample) as error:
            return _build_sample(group, name, FinishReason.ERROR, error=str(error))
        except Exception as error:
            problem = f"the reply of {self._url}: unforeseen {error!r}"
            return _build_sample(group, name, FinishReason.ERROR, error=problem)
        self.num_tokens += len(tokens)
        return _build_sample(group, name, reason, tokens=tokens.tolist())

    def _build_body(
        self, request: GenerationRequest, context: EnvironmentContext
    ) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "messages": [print_message(_to_sent(one)) for one in context.messages],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if self._server.model:
            body["model"] = self._server.model
        if context.tools:
            body["tools"] = parse_json(context.tools)
        return body

    def _read(self, reply: Any) -> tuple[ChatMessage, FinishReason]:
        """Return the message of a reply, and count the tokens that the server reports.

        Raises:
            PoisonSample: It is no chat completion.
        """
        try:
            choice = reply["choices"][0]
            message = parse_message(choice["message"], what="the server's reply")
            usage: Mapping[str, Any] = reply.get("usage") or {}
            counts = [int(usage.get(f"{part}_tokens") or 0) for part in ("prompt", "completion")]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise PoisonSample(
                f"{self._url} must answer with choices[0].message, got {reply!r:.200}"
            ) from None
        self.billed = self.billed[0] + counts[0], self.billed[1] + counts[1]
        is_cut = choice.get("finish_reason") == "length"
        return message, FinishReason.LENGTH if is_cut else FinishReason.STOP


def _to_sent(message: ChatMessage) -> ChatMessage:
    """Return a message as servers accept it: an environment's result of a tool that names no call
    is a user's message.
    """
    if message.role == "tool" and not message.tool_call_id:
        return ChatMessage("user", message.parts)
    return message


def _build_sample(
    group: str, name: str, reason: FinishReason, *, tokens: Sequence[int] = (), error: str = ""
) -> GeneratedSample:
    segments = (VersionSegment(0, len(tokens)),) if tokens else ()
    return GeneratedSample(
        sample_id=name,
        prompt_group_id=group,
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        segments=segments,
        finish_reason=reason,
        error=error,
    )
