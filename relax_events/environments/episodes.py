"""An engine whose samples talk with an environment: each of its answers goes to it, and what it
says goes into the next prompt.

    submit --> engine --> an answer --> environment, beside the engine --> over: finished --> poll
                 ^                                          |
                 +---- the tokens so far, and the reply's --+

Tokens are never rendered again: those that were drawn stay as they are, and a reply's are put
    behind them. So what the trainer reads is what
the engine read, token by token, and so it is with media: a reply's references follow those of the
prompt.
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
from relax_events.data.completions import ASSISTANT
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    Engine,
    EngineUsage,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
    Task,
)
from relax_events.engines.transformers.rows import joined_segments
from relax_events.environments.pool import EnvironmentPool, Said
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage, FinishReason, VersionSegment
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.objects.roots import media_in
from relax_events.weights import Weights


@dataclass(slots=True, eq=False)
class Episode:
    """A sample on its way: what follows its prompt, up to the answer that is in the engine."""

    request: GenerationRequest
    task: Task
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
    """Of prompt and tokens, as far as the engine has read them."""

    @property
    def num_answers(self) -> int:
        """Whole answers so far."""
        return sum(message.role == ASSISTANT for message in self.turns)

    @property
    def num_left(self) -> int:
        """Tokens that the policy may still draw."""
        return self.request.sampling.max_new_tokens - int(self.loss_mask.sum())

    def next_request(self, sample: SampleRequest) -> GenerationRequest:
        """Ask for the answer that comes next, or for the rest of it."""
        prompt = self.request.prompt_tokens
        return replace(
            self.request,
            prompt_tokens=np.concatenate([prompt, self.tokens]),
            chosen=np.concatenate([np.zeros(len(prompt), bool), self.loss_mask.astype(bool)]),
            samples=(
                replace(
                    sample,
                    seed=turn_seed(self.seed, self.num_answers),
                    loss_mask=None,
                    turns=(),
                    routed_experts=self.routed_experts,
                ),
            ),
            sampling=self.request.sampling.model_copy(update={"max_new_tokens": self.num_left}),
            media=self.media,
        )

    def add_answer(self, answer: GeneratedSample) -> None:
        """Take in what the engine drew, whole or aborted."""
        self.tokens, self.logprobs = (
            np.append(self.tokens, answer.tokens),
            np.append(self.logprobs, answer.logprobs),
        )
        self.loss_mask = np.append(self.loss_mask, np.ones(len(answer.tokens), np.uint8))
        self.segments = joined_segments(self.segments, answer.segments)
        self.routed_experts = answer.routed_experts
        if answer.top_tokens is not None:
            self.top_tokens = (
                answer.top_tokens
                if self.top_tokens is None
                else np.concatenate([self.top_tokens, answer.top_tokens])
            )

    def add_reply(self, said: Said, tokens: NDArray[np.int32]) -> None:
        """Take in what the environment said."""
        self.turns.append(said.message)
        self.media += said.media
        self.tokens, self.logprobs = (
            np.append(self.tokens, tokens),
            np.append(self.logprobs, np.zeros(len(tokens), np.float32)),
        )
        self.loss_mask = np.append(self.loss_mask, np.zeros(len(tokens), np.uint8))

    def ended(self, reason: FinishReason, error: str = "") -> GeneratedSample:
        """Hand the sample out."""
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


Answer = tuple[Episode, "Future[Said | None]"]


class Episodes:
    """Implements `Engine` over another one."""

    def __init__(
        self,
        engine: Engine,
        pool: EnvironmentPool,
        *,
        config: RunConfig,
        renderer: PromptRenderer,
        library: MediaLibrary,
    ) -> None:
        """Take over an engine and an environment, and end both at the end.

        Args:
            engine: Draws the answers.
            pool: Answers them.
            config: Bounds the answers and tokens of a sample.
            renderer: Of the policy.
            library: Has the media of samples that are resumed.
        """
        self._engine, self._pool = engine, pool
        self._max_answers, self._max_context_tokens = (
            config.environment.max_answers,
            config.engine.max_context_tokens,
        )
        self._renderer, self._library = renderer, library
        self._episodes: dict[str, Episode] = {}
        self._asked: dict[str, Episode] = {}
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._finished: list[GeneratedSample] = []
        self._num_replies = 0
        self._interrupted = threading.Event()

    @property
    def policy_version(self) -> int:
        """Of the loaded weights."""
        return self._engine.policy_version

    @property
    def num_running(self) -> int:
        """Samples submitted and not finished, whoever has the word."""
        return self._engine.num_running + len(self._asked) + len(self._finished)

    @property
    def num_tokens(self) -> int:
        """Tokens drawn so far, and what the environment has said: whoever has the word is not
        stuck.
        """
        return self._engine.num_tokens + self._num_replies

    @property
    def usage(self) -> EngineUsage:
        """What the engine does; who waits for the environment is not at the engine."""
        return self._engine.usage

    def submit(self, request: GenerationRequest) -> None:
        """Queue a prompt group's samples; see `Engine`. A sample that talked before goes on behind
        what was said.

        Raises:
            PoisonSample: As `Engine`; or there is no task for the environment.
        """
        if request.task is None:
            raise PoisonSample(
                f"prompt group {request.prompt_group_id} brings no task for the environment"
            )
        episodes = {
            sample.sample_id: self._begun(request, request.task, sample)
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
        """Give the samples that finished; an answer that does not end its sample wakes nobody, and
        comes back empty; see `Engine`.
        """
        self._take_answers()
        if not self._finished and not self._interrupted.is_set():
            if self._engine.num_running:
                for answer in self._engine.poll(timeout_seconds=timeout_seconds):
                    self._take_turn(answer)
            elif self._asked:
                self._take_answers(timeout_seconds=timeout_seconds)
        self._interrupted.clear()
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self) -> None:
        """Let a poll that waits return, from any thread."""
        self._interrupted.set()
        self._answers.put(None)
        self._engine.interrupt()

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Take samples out, all of them without `sample_ids`; those that wait for the environment
        come with all that was said.
        """
        aborted = []
        for sample in self._engine.abort(sample_ids):
            episode = self._episodes.pop(sample.sample_id)
            episode.add_answer(sample)
            aborted.append(episode.ended(FinishReason.ABORT))
        for sample_id in [one for one in self._asked if sample_ids is None or one in sample_ids]:
            del self._asked[sample_id]
            aborted.append(
                _before_the_answer(self._episodes.pop(sample_id)).ended(FinishReason.ABORT)
            )
        return aborted

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        """Go over to another policy version; answers that come later are of it."""
        self._engine.load_weights(weights, on_running=on_running)

    def sleep(self) -> None:
        """Give the device memory back."""
        self._engine.sleep()

    def wake(self) -> None:
        """Take the device memory again."""
        self._engine.wake()

    def close(self) -> None:
        """End engine and environment for good."""
        self._pool.close()
        self._engine.close()

    def _begun(self, request: GenerationRequest, task: Task, sample: SampleRequest) -> Episode:
        """Return a sample as it comes: at its first answer, or behind the last reply of an earlier
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
                self._library.processed(reference) for reference in media_in(sample.turns)
            )
            episode.turns = list(sample.turns)
            said = _num_said(sample.loss_mask)
            episode.tokens, episode.loss_mask = sample.tokens[:said], sample.loss_mask[:said]
            episode.logprobs = sample.logprobs[:said]
            num_chosen = int(episode.loss_mask.sum())
            episode.segments = _cut(sample.segments, 0, num_chosen)
            episode.top_tokens = (
                None if sample.top_tokens is None else sample.top_tokens[:num_chosen]
            )
        return episode

    def _resume(self, episode: Episode, sample: SampleRequest) -> None:
        """Let the engine go on with the answer at which an earlier attempt was cut off."""
        said, num_chosen = len(episode.tokens), int(episode.loss_mask.sum())
        rest = replace(
            sample,
            tokens=sample.tokens[said:],
            logprobs=sample.logprobs[said:],
            segments=_cut(sample.segments, num_chosen, num_chosen + len(sample.tokens) - said),
            top_tokens=None if sample.top_tokens is None else sample.top_tokens[num_chosen:],
        )
        self._ask_engine(episode, rest)

    def _ask_engine(self, episode: Episode, sample: SampleRequest) -> None:
        try:
            self._engine.submit(episode.next_request(sample))
        except PoisonSample as error:
            self._finish(episode, FinishReason.ERROR, str(error))

    def _take_turn(self, answer: GeneratedSample) -> None:
        """Pass an answer on to the environment, unless it is the last one."""
        episode = self._episodes[answer.sample_id]
        episode.add_answer(answer)
        text = self._renderer.completion_text(answer.tokens)
        episode.turns.append(ChatMessage.of_text(ASSISTANT, text))
        is_last = episode.num_answers >= self._max_answers or episode.num_left <= 0
        if answer.finish_reason is not FinishReason.STOP or is_last:
            self._finish(episode, answer.finish_reason, answer.error)
            return
        self._asked[answer.sample_id] = episode
        self._pool.ask(
            answer.sample_id,
            episode.task,
            episode.turns,
            on_answer=lambda future: self._note(episode, future),
        )

    def _note(self, episode: Episode, future: Future[Said | None]) -> None:
        """Note what the environment said, from its thread; an engine at work looks at it after its
        next token.
        """
        self._answers.put((episode, future))
        self._engine.interrupt()

    def _take_answers(self, *, timeout_seconds: float = 0.0) -> None:
        """Take what the environment has said; with a timeout, wait for the first of it. What it was
        asked before an abort comes too late.
        """
        try:
            answer = (
                self._answers.get(timeout=timeout_seconds)
                if timeout_seconds
                else self._answers.get_nowait()
            )
            while True:
                if answer is not None and self._asked.get(answer[0].sample_id) is answer[0]:
                    del self._asked[answer[0].sample_id]
                    self._num_replies += 1
                    self._go_on(*answer)
                answer = self._answers.get_nowait()
        except queue.Empty:
            return

    def _go_on(self, episode: Episode, future: Future[Said | None]) -> None:
        """Put a reply behind the answer and ask for the next one; a sample that it leaves no room
        for ends with the answer that it has.
        """
        try:
            said = future.result()
            before = (*episode.task.messages, *episode.turns[:-1])
            tokens = (
                None
                if said is None
                else self._renderer.reply_tokens(before, said.message, tools=episode.task.tools)
            )
        except PoisonSample as error:
            self._finish(episode, FinishReason.ERROR, str(error))
            return
        if said is None or tokens is None:
            self._finish(episode, FinishReason.STOP)
        elif (
            len(episode.request.prompt_tokens) + len(episode.tokens) + len(tokens)
            >= self._max_context_tokens
        ):
            self._finish(episode, FinishReason.LENGTH)
        else:
            episode.add_reply(said, tokens)
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
            self._ask_engine(episode, fresh)

    def _finish(self, episode: Episode, reason: FinishReason, error: str = "") -> None:
        del self._episodes[episode.sample_id]
        self._finished.append(episode.ended(reason, error))


def turn_seed(seed: int, num_answers: int) -> int:
    """Derive the seed of an answer: the sample's own for the first, so that an environment changes
    nothing before it speaks.
    """
    if not num_answers:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{num_answers}".encode(), digest_size=7).digest())


def _num_said(loss_mask: NDArray[np.uint8]) -> int:
    """Return how many tokens there are up to the end of the last reply."""
    replies = np.flatnonzero(loss_mask == 0)
    return int(replies[-1]) + 1 if len(replies) else 0


def _cut(segments: Sequence[VersionSegment], start: int, end: int) -> tuple[VersionSegment, ...]:
    """Return the part of segments between two counts of chosen tokens."""
    parts, first = [], 0
    for segment in segments:
        num_tokens = min(first + segment.num_tokens, end) - max(first, start)
        if num_tokens > 0:
            parts.append(replace(segment, num_tokens=num_tokens))
        first += segment.num_tokens
    return tuple(parts)


def _before_the_answer(episode: Episode) -> Episode:
    """Take the last answer out of what was said: a sample that goes on gets it from its tokens
    again.
    """
    return replace(episode, turns=episode.turns[:-1])
