"""An engine for multi-turn samples: an environment replies to each turn of the policy, until it
ends the sample.

    submit --> engine --> a turn --> environment, in child processes --> over: finished --> poll
                 ^                                          |
                 +---- the tokens so far, and the reply's --+

Tokens are never rendered again: sampled ones stay as they are, and a reply's are appended. So the
trainer reads exactly the engine's tokens. The same holds for media: a reply's references follow
the references of the prompt.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace

from relax_events.config import RunConfig
from relax_events.data.conversations import ASSISTANT
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    Engine,
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.engines.turn_engine import TurnEngine, require_context
from relax_events.environments.episode import Episode
from relax_events.environments.pool import EnvironmentPool
from relax_events.environments.reply_media import ProcessedReply
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.media.library import MediaLibrary

PendingReply = tuple[Episode, "Future[ProcessedReply | None]"]


class MultiTurnEngine(TurnEngine[PendingReply]):
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
            config: Limits the turns and tokens of a sample.
            renderer: Renderer of the policy.
            library: Loads the media of resumed samples.
        """
        super().__init__(engine)
        self._pool = pool
        self._max_turns, self._max_context_tokens = (
            config.environment.max_turns,
            config.engine.max_context_tokens,
        )
        self._renderer, self._library = renderer, library
        self._episodes: dict[str, Episode] = {}
        self._awaiting_reply: dict[str, Episode] = {}
        self._num_replies = 0

    @property
    def num_running(self) -> int:
        """Samples submitted and not finished, in the engine or waiting for a reply."""
        return self._engine.num_running + len(self._awaiting_reply) + len(self._finished)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far plus the number of replies: both count as progress."""
        return self._engine.num_tokens + self._num_replies

    @property
    def _is_waiting(self) -> bool:
        return bool(self._awaiting_reply)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a prompt group's samples; see `Engine`. A sample with earlier turns continues after
        them.

        Raises:
            PoisonSample: As `Engine`; or there is no context for the environment.
        """
        context = require_context(request)
        episodes = {
            sample.sample_id: self._build_episode(request, context, sample)
            for sample in request.samples
        }
        fresh = tuple(sample for sample in request.samples if not sample.turns)
        if fresh:
            self._engine.submit(replace(request, samples=fresh))
        self._episodes |= episodes
        for sample in request.samples:
            if sample.turns:
                episode = episodes[sample.sample_id]
                self._submit_turn(episode, episode.aborted_turn(sample))

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Remove the named samples, or all of them without `sample_ids`; samples that wait for the
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
            episode = self._episodes.pop(sample_id).without_last_turn()
            aborted.append(episode.ended(FinishReason.ABORT))
        return aborted

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
            episode.restore(sample, load=self._library.load)
        return episode

    def _submit_turn(self, episode: Episode, sample: SampleRequest) -> None:
        try:
            self._engine.submit(episode.next_request(sample))
        except PoisonSample as error:
            self._finish(episode, FinishReason.ERROR, str(error))

    def _take_turn(self, turn: GeneratedSample) -> None:
        """Pass a turn to the environment, unless it is the last one."""
        episode = self._episodes[turn.sample_id]
        episode.add_turn(turn)
        text = self._renderer.turn_text(turn.tokens)
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
            on_reply=lambda future: self._put((episode, future)),
        )

    def _take_item(self, item: PendingReply) -> None:
        """Process a reply of the environment; one to an aborted sample is ignored."""
        episode, future = item
        if self._awaiting_reply.get(episode.sample_id) is episode:
            del self._awaiting_reply[episode.sample_id]
            self._num_replies += 1
            self._continue(episode, future)

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
                else self._renderer.bridge_tokens(before, [reply.message], tools=episode.task.tools)
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
            self._submit_turn(episode, episode.empty_turn())

    def _finish(self, episode: Episode, reason: FinishReason, error: str = "") -> None:
        del self._episodes[episode.sample_id]
        self._finished.append(episode.ended(reason, error))
