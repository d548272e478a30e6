"""An engine for multi-turn samples: an environment replies to each turn of the policy, until the
sample is over.

    submit --> engine --> a turn --> environment, in child processes --> over: finished --> poll
                 ^                                          |
                 +---- the tokens so far, and the reply's --+

Tokens are never rendered again: sampled ones stay as they are, and a reply's are appended. So the
trainer reads exactly the engine's tokens. The same holds for media: a reply's references follow
those of the prompt.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from relax_events.config import RunConfig
from relax_events.data.conversations import ASSISTANT
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    Engine,
    EngineUsage,
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.engines.requests import merge_segments
from relax_events.environments.pool import EnvironmentPool, ProcessedReply
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage, FinishReason, VersionSegment
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.objects.store import list_message_media
from relax_events.weights import Weights


@dataclass(slots=True, eq=False)
class Episode:
    """A running sample: what follows its prompt, up to the turn that is in the engine."""

    request: GenerationRequest
    task: EnvironmentContext
    sample_id: str
    seed: int
    media: tuple[ProcessedMedia, ...]
    turns: list[ChatMessage] = field(default_factory=list)
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    segments: tuple[VersionSegment, ...] = ()
    top_tokens: NDArray[np.int32] | None = None
    routed_experts: NDArray[np.generic] | None = None
    """Of prompt and tokens, as far as the engine has computed them."""

    @property
    def num_turns(self) -> int:
        """Finished turns of the policy so far."""
        return sum(message.role == ASSISTANT for message in self.turns)

    @property
    def num_left(self) -> int:
        """Tokens that the policy may still generate."""
        return self.request.sampling.max_new_tokens - int(self.loss_mask.sum())

    def next_request(self, sample: SampleRequest) -> GenerationRequest:
        """Build the request for the next turn, or for the rest of it."""
        prompt = self.request.prompt_tokens
        return replace(
            self.request,
            prompt_tokens=np.concatenate([prompt, self.tokens]),
            is_sampled=np.concatenate([np.zeros(len(prompt), bool), self.loss_mask.astype(bool)]),
            samples=(
                replace(
                    sample,
                    seed=turn_seed(self.seed, self.num_turns),
                    loss_mask=None,
                    turns=(),
                    routed_experts=self.routed_experts,
                ),
            ),
            sampling=self.request.sampling.model_copy(update={"max_new_tokens": self.num_left}),
            media=self.media,
        )

    def add_turn(self, turn: GeneratedSample) -> None:
        """Append a turn of the policy, finished or aborted."""
        self.tokens, self.logprobs = (
            np.append(self.tokens, turn.tokens),
            np.append(self.logprobs, turn.logprobs),
        )
        self.loss_mask = np.append(self.loss_mask, np.ones(len(turn.tokens), np.uint8))
        self.segments = merge_segments(self.segments, turn.segments)
        self.routed_experts = turn.routed_experts
        if turn.top_tokens is not None:
            self.top_tokens = (
                turn.top_tokens
                if self.top_tokens is None
                else np.concatenate([self.top_tokens, turn.top_tokens])
            )

    def add_reply(self, reply: ProcessedReply, tokens: NDArray[np.int32]) -> None:
        """Append a reply of the environment."""
        self.turns.append(reply.message)
        self.media += reply.media
        self.tokens, self.logprobs = (
            np.append(self.tokens, tokens),
            np.append(self.logprobs, np.zeros(len(tokens), np.float32)),
        )
        self.loss_mask = np.append(self.loss_mask, np.zeros(len(tokens), np.uint8))

    def ended(self, reason: FinishReason, error: str = "") -> GeneratedSample:
        """Return the sample as a result."""
        return GeneratedSample(
            sample_id=self.sample_id,
            prompt_group_id=self.request.prompt_group_id,
            tokens=self.tokens,
            logprobs=self.logprobs,
            segments=self.segments,
            finish_reason=reason,
            error=error,
            top_tokens=self.top_tokens,
            loss_mask=self.loss_mask,
            turns=tuple(self.turns),
            routed_experts=self.routed_experts,
        )


PendingReply = tuple[Episode, "Future[ProcessedReply | None]"]


class MultiTurnEngine:
    """Implements `Engine` over another engine and an environment."""

    def __init__(
        self,
        engine: Engine,
        pool: EnvironmentPool,
        *,
        config: RunConfig,
        renderer: PromptRenderer,
        library: MediaLibrary,
    ) -> None:
        """Wrap an engine and an environment; `close` closes both.

        Args:
            engine: Generates the turns.
            pool: Replies to them.
            config: Bounds the turns and tokens of a sample.
            renderer: Of the policy.
            library: Loads the media of resumed samples.
        """
        self._engine, self._pool = engine, pool
        self._max_turns, self._max_context_tokens = (
            config.environment.max_turns,
            config.engine.max_context_tokens,
        )
        self._renderer, self._library = renderer, library
        self._episodes: dict[str, Episode] = {}
        self._awaiting_reply: dict[str, Episode] = {}
        self._replies: queue.SimpleQueue[PendingReply | None] = queue.SimpleQueue()
        self._finished: list[GeneratedSample] = []
        self._num_replies = 0
        self._interrupted = threading.Event()

    @property
    def policy_version(self) -> int:
        """Of the loaded weights."""
        return self._engine.policy_version

    @property
    def num_running(self) -> int:
        """Samples submitted and not finished, in the engine or waiting for a reply."""
        return self._engine.num_running + len(self._awaiting_reply) + len(self._finished)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far plus the number of replies: both count as progress."""
        return self._engine.num_tokens + self._num_replies

    @property
    def usage(self) -> EngineUsage:
        """What the engine does; samples that wait for the environment are not included."""
        return self._engine.usage

    def submit(self, request: GenerationRequest) -> None:
        """Queue a prompt group's samples; see `Engine`. A sample with earlier turns continues after
        them.

        Raises:
            PoisonSample: As `Engine`; or there is no context for the environment.
        """
        if request.environment_context is None:
            raise PoisonSample(
                f"prompt group {request.prompt_group_id} has no context for the environment"
            )
        episodes = {
            sample.sample_id: self._build_episode(request, request.environment_context, sample)
            for sample in request.samples
        }
        fresh = tuple(sample for sample in request.samples if not sample.turns)
        if fresh:
            self._engine.submit(replace(request, samples=fresh))
        self._episodes |= episodes
        for sample in request.samples:
            if sample.turns:
                self._resume(episodes[sample.sample_id], sample)

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Return the finished samples; see `Engine`. The list may be empty after a turn that does
        not finish its sample.
        """
        self._take_replies()
        if not self._finished and not self._interrupted.is_set():
            if self._engine.num_running:
                for turn in self._engine.poll(timeout_seconds=timeout_seconds):
                    self._take_turn(turn)
            elif self._awaiting_reply:
                self._take_replies(timeout_seconds=timeout_seconds)
        self._interrupted.clear()
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self) -> None:
        """Make a waiting poll return, from any thread."""
        self._interrupted.set()
        self._replies.put(None)
        self._engine.interrupt()

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Remove the named samples, or all of them without `sample_ids`; those that wait for the
        environment keep all their turns.
        """
        aborted = []
        for sample in self._engine.abort(sample_ids):
            episode = self._episodes.pop(sample.sample_id)
            episode.add_turn(sample)
            aborted.append(episode.ended(FinishReason.ABORT))
        for sample_id in [
            one for one in self._awaiting_reply if sample_ids is None or one in sample_ids
        ]:
            del self._awaiting_reply[sample_id]
            aborted.append(
                _without_last_turn(self._episodes.pop(sample_id)).ended(FinishReason.ABORT)
            )
        return aborted

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        """Switch to another policy version; later turns are generated with it."""
        self._engine.load_weights(weights, on_running=on_running)

    def sleep(self) -> None:
        """Release the device memory."""
        self._engine.sleep()

    def wake(self) -> None:
        """Allocate the device memory again."""
        self._engine.wake()

    def close(self) -> None:
        """Close engine and environment."""
        self._pool.close()
        self._engine.close()

    def _build_episode(
        self, request: GenerationRequest, task: EnvironmentContext, sample: SampleRequest
    ) -> Episode:
        """Return a submitted sample: at its first turn, or after the last reply of an earlier
        attempt.
        """
        episode = Episode(
            request,
            task,
            sample.sample_id,
            sample.seed,
            request.media,
            routed_experts=sample.routed_experts,
        )
        if sample.turns:
            if sample.loss_mask is None or len(sample.loss_mask) != len(sample.tokens):
                raise PoisonSample(
                    f"sample {sample.sample_id}: a prefix with turns needs a loss mask as "
                    f"long as its {len(sample.tokens)} tokens"
                )
            episode.media += tuple(
                self._library.load(reference) for reference in list_message_media(sample.turns)
            )
            episode.turns = list(sample.turns)
            count = _num_tokens_through_last_reply(sample.loss_mask)
            episode.tokens, episode.loss_mask = sample.tokens[:count], sample.loss_mask[:count]
            episode.logprobs = sample.logprobs[:count]
            num_chosen = int(episode.loss_mask.sum())
            episode.segments = _slice_segments(sample.segments, 0, num_chosen)
            episode.top_tokens = (
                None if sample.top_tokens is None else sample.top_tokens[:num_chosen]
            )
        return episode

    def _resume(self, episode: Episode, sample: SampleRequest) -> None:
        """Let the engine continue the turn at which an earlier attempt was aborted."""
        reply, num_chosen = len(episode.tokens), int(episode.loss_mask.sum())
        rest = replace(
            sample,
            tokens=sample.tokens[reply:],
            logprobs=sample.logprobs[reply:],
            segments=_slice_segments(
                sample.segments, num_chosen, num_chosen + len(sample.tokens) - reply
            ),
            top_tokens=None if sample.top_tokens is None else sample.top_tokens[num_chosen:],
        )
        self._submit_turn(episode, rest)

    def _submit_turn(self, episode: Episode, sample: SampleRequest) -> None:
        try:
            self._engine.submit(episode.next_request(sample))
        except PoisonSample as error:
            self._finish(episode, FinishReason.ERROR, str(error))

    def _take_turn(self, turn: GeneratedSample) -> None:
        """Pass a turn to the environment, unless it is the last one."""
        episode = self._episodes[turn.sample_id]
        episode.add_turn(turn)
        text = self._renderer.completion_text(turn.tokens)
        episode.turns.append(ChatMessage.of_text(ASSISTANT, text))
        is_last = episode.num_turns >= self._max_turns or episode.num_left <= 0
        if turn.finish_reason is not FinishReason.STOP or is_last:
            self._finish(episode, turn.finish_reason, turn.error)
            return
        self._awaiting_reply[turn.sample_id] = episode
        self._pool.request_reply(
            turn.sample_id,
            episode.task,
            episode.turns,
            on_reply=lambda future: self._on_reply(episode, future),
        )

    def _on_reply(self, episode: Episode, future: Future[ProcessedReply | None]) -> None:
        """Queue the environment's reply, from its thread; the engine is interrupted after its next
        token.
        """
        self._replies.put((episode, future))
        self._engine.interrupt()

    def _take_replies(self, *, timeout_seconds: float = 0.0) -> None:
        """Process queued replies, waiting for the first with a timeout; replies to aborted samples
        are ignored.
        """
        try:
            turn = (
                self._replies.get(timeout=timeout_seconds)
                if timeout_seconds
                else self._replies.get_nowait()
            )
            while True:
                if turn is not None and self._awaiting_reply.get(turn[0].sample_id) is turn[0]:
                    del self._awaiting_reply[turn[0].sample_id]
                    self._num_replies += 1
                    self._continue(*turn)
                turn = self._replies.get_nowait()
        except queue.Empty:
            return

    def _continue(self, episode: Episode, future: Future[ProcessedReply | None]) -> None:
        """Append a reply and request the next turn; a sample without room for it finishes with its
        last turn.
        """
        try:
            reply = future.result()
            before = (*episode.task.messages, *episode.turns[:-1])
            tokens = (
                None
                if reply is None
                else self._renderer.reply_tokens(before, reply.message, tools=episode.task.tools)
            )
        except PoisonSample as error:
            self._finish(episode, FinishReason.ERROR, str(error))
            return
        if reply is None or tokens is None:
            self._finish(episode, FinishReason.STOP)
        elif (
            len(episode.request.prompt_tokens) + len(episode.tokens) + len(tokens)
            >= self._max_context_tokens
        ):
            self._finish(episode, FinishReason.LENGTH)
        else:
            episode.add_reply(reply, tokens)
            num_top = episode.request.num_top_tokens
            nothing, top = (
                np.empty(0, np.int32),
                np.empty((0, num_top), np.int32) if num_top else None,
            )
            logprobs = np.empty(0, np.float32)
            fresh = SampleRequest(
                sample_id=episode.sample_id,
                seed=episode.seed,
                tokens=nothing,
                logprobs=logprobs,
                segments=(),
                top_tokens=top,
            )
            self._submit_turn(episode, fresh)

    def _finish(self, episode: Episode, reason: FinishReason, error: str = "") -> None:
        del self._episodes[episode.sample_id]
        self._finished.append(episode.ended(reason, error))


def turn_seed(seed: int, num_turns: int) -> int:
    """Derive the seed of a turn; the first one has the sample's own, so that an environment changes
    nothing before its first reply.
    """
    if not num_turns:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{num_turns}".encode(), digest_size=7).digest())


def _num_tokens_through_last_reply(loss_mask: NDArray[np.uint8]) -> int:
    """Return the number of tokens up to the end of the last reply."""
    replies = np.flatnonzero(loss_mask == 0)
    return int(replies[-1]) + 1 if len(replies) else 0


def _slice_segments(
    segments: Sequence[VersionSegment], start: int, end: int
) -> tuple[VersionSegment, ...]:
    """Return the part of segments between two counts of sampled tokens."""
    parts, first = [], 0
    for segment in segments:
        num_tokens = min(first + segment.num_tokens, end) - max(first, start)
        if num_tokens > 0:
            parts.append(replace(segment, num_tokens=num_tokens))
        first += segment.num_tokens
    return tuple(parts)


def _without_last_turn(episode: Episode) -> Episode:
    """Remove the last turn: a sample that continues gets it from its tokens again."""
    return replace(episode, turns=episode.turns[:-1])
