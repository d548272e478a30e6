"""An engine for samples whose environment has a state: each sample has a session.

    submit --> a session is set up --> the prompt, with what the environment says first
                   engine --> a turn --> the session's answer --> over: finished --> poll
                     ^                          |
                     +-- tokens so far, answer -+

Tokens and media are treated as in `multi_turn`. An episode that fails for another reason than the
policy's is begun again in a new session, `environment.attempts` times in all; then its sample
fails, its prompt group becomes a dead letter, and it is never scored. The state of a session can't
be moved, so an aborted sample is begun again by the next worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
import structlog

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
from relax_events.environments.session_pool import (
    EnvironmentSession,
    ProcessedObservation,
    ProcessedOpening,
    SessionPool,
)
from relax_events.errors import EpisodeFailed, PoisonSample
from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.telemetry.component_metrics import EpisodeMetrics

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Talk:
    """A running sample: its session, and its turns once the session is set up."""

    request: GenerationRequest
    sample: SampleRequest
    session: EnvironmentSession
    attempt: int = 1
    episode: Episode | None = None
    prompt: tuple[ChatMessage, ...] = ()
    """The prompt's messages, if the environment changed them."""
    rewards: list[float | None] = field(default_factory=list)
    num_answers: int = 0
    """Turns that the environment has answered."""


Answer = ProcessedOpening | ProcessedObservation
PendingAnswer = tuple[_Talk, "Future[Answer]"]


class SessionEngine(TurnEngine[PendingAnswer]):
    """Implements `Engine`; see the module's docstring."""

    def __init__(
        self,
        engine: Engine,
        pool: SessionPool,
        *,
        config: RunConfig,
        renderer: PromptRenderer,
        metrics: EpisodeMetrics,
    ) -> None:
        """Wrap an engine and the run's environment; `close` closes both.

        Args:
            engine: Generates the turns.
            pool: Holds the sessions.
            config: Limits turns, tokens and attempts of a sample.
            renderer: Of the policy.
            metrics: Receive the counts.
        """
        super().__init__(engine)
        self._pool, self._renderer, self._metrics = pool, renderer, metrics
        self._max_turns, self._attempts = (
            config.environment.max_turns,
            config.environment.attempts,
        )
        self._max_context_tokens = config.engine.max_context_tokens
        self._may_reward = config.environment.interface != "mcp"
        self._talks: dict[str, _Talk] = {}
        self._num_answers = 0

    @property
    def num_running(self) -> int:
        """Samples submitted and not returned."""
        return len(self._talks) + len(self._finished)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far plus answers of the environment: both are progress."""
        return self._engine.num_tokens + self._num_answers

    @property
    def _is_waiting(self) -> bool:
        return bool(self._talks)

    def submit(self, request: GenerationRequest) -> None:
        """Begin the episodes of a prompt group; see `Engine`.

        Raises:
            PoisonSample: There is no context for the environment.
        """
        for sample in request.samples:
            self._begin(request, sample, attempt=1)

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Remove the named samples, or all; they are begun again when they are submitted again."""
        self._engine.abort(sample_ids)
        names = [name for name in self._talks if sample_ids is None or name in sample_ids]
        aborted = []
        for name in names:
            talk = self._talks.pop(name)
            talk.session.close()
            aborted.append(_without_tokens(talk, FinishReason.ABORT))
        return aborted

    def close(self) -> None:
        """Close engine and environment."""
        self._pool.close()
        self._engine.close()

    def _begin(self, request: GenerationRequest, sample: SampleRequest, *, attempt: int) -> None:
        session = self._pool.session(sample.sample_id, require_context(request))
        talk = _Talk(request, sample, session, attempt)
        self._talks[sample.sample_id] = talk
        self._await(talk, session.open())

    def _await(self, talk: _Talk, answer: Future[Any]) -> None:
        answer.add_done_callback(lambda future: self._put((talk, future)))

    def _take_item(self, item: PendingAnswer) -> None:
        """Process an answer of the environment; one to an aborted sample is ignored."""
        talk, future = item
        if self._talks.get(talk.sample.sample_id) is not talk:
            return
        self._num_answers += 1
        self._guarded(talk, lambda: self._process(talk, future.result()))

    def _guarded(self, talk: _Talk, work: Callable[[], None]) -> None:
        """Do a step of an episode; begin it again, or fail it, if that fails."""
        try:
            work()
        except EpisodeFailed as error:
            self._fail(talk, error)
        except PoisonSample as error:
            self._finish(talk, FinishReason.ERROR, str(error))

    def _process(self, talk: _Talk, answer: Answer) -> None:
        if isinstance(answer, ProcessedOpening):
            talk.episode = self._open_episode(talk, answer)
            self._submit_turn(talk.episode)
        else:
            self._continue(talk, answer)

    def _open_episode(self, talk: _Talk, opening: ProcessedOpening) -> Episode:
        """Return the episode at its first turn: with the row's prompt as it is, or with what the
        environment adds to it.

        Raises:
            PoisonSample: The template rejects the prompt, or no room for an answer is left.
        """
        request, task = talk.request, talk.session.task
        if opening.messages or opening.tools or opening.replaces_prompt:
            task, media = open_task(task, request.media, opening)
            talk.prompt = tuple(task.messages)
            request = replace(
                request,
                prompt_tokens=self._renderer.prompt_tokens(task.messages, tools=task.tools),
                media=tuple(media),
            )
            self._check_room(request)
        sample = talk.sample
        return Episode(request, task, sample.sample_id, sample.seed, request.media)

    def _check_room(self, request: GenerationRequest) -> None:
        length = len(request.prompt_tokens)
        if length >= self._max_context_tokens:
            raise PoisonSample(
                f"the prompt with the environment's first messages has {length} tokens; "
                f"engine.max_context_tokens is {self._max_context_tokens}"
            )

    def _submit_turn(self, episode: Episode) -> None:
        self._engine.submit(episode.next_request(episode.empty_turn()))

    def _take_turn(self, turn: GeneratedSample) -> None:
        """Pass a complete turn to the environment; a turn that was cut off ends the sample."""
        talk = self._talks[turn.sample_id]
        episode = talk.episode
        assert episode is not None, "the engine has its turn"
        episode.add_turn(turn)
        text = self._renderer.turn_text(turn.tokens)
        episode.turns.append(ChatMessage.of_text(ASSISTANT, text))
        if turn.finish_reason is not FinishReason.STOP:
            talk.rewards.append(None)
            self._finish(talk, turn.finish_reason, turn.error)
            return
        self._await(talk, talk.session.step(text))

    def _continue(self, talk: _Talk, answer: ProcessedObservation) -> None:
        """Append the environment's messages and request the next turn, unless the sample is over
        or out of turns, tokens or room.
        """
        episode = talk.episode
        assert episode is not None, "it has made a turn"
        talk.rewards.append(answer.reward)
        talk.num_answers += 1
        is_last = episode.num_turns >= self._max_turns or episode.num_left <= 0
        if answer.is_over or is_last or not answer.replies:
            self._finish(talk, FinishReason.STOP)
            return
        messages = [reply.message for reply in answer.replies]
        before = (*episode.task.messages, *episode.turns[:-1])
        tokens = self._renderer.bridge_tokens(before, messages, tools=episode.task.tools)
        length = len(episode.request.prompt_tokens) + len(episode.tokens) + len(tokens)
        if length >= self._max_context_tokens:
            self._finish(talk, FinishReason.LENGTH)
            return
        for number, reply in enumerate(answer.replies):
            episode.add_reply(reply, tokens if not number else np.empty(0, np.int32))
        self._submit_turn(episode)

    def _fail(self, talk: _Talk, error: EpisodeFailed) -> None:
        """Begin an episode again, or end it after its last attempt."""
        name = talk.sample.sample_id
        problem = f"episode {name}, attempt {talk.attempt} of {self._attempts}: {error}"
        log.warning("episode.failed", sample_id=name, error=problem)
        if talk.attempt >= self._attempts:
            self._metrics.count_episode("failed")
            self._finish(talk, FinishReason.ERROR, problem)
            return
        self._metrics.count_episode("begun_again")
        talk.session.close()
        self._begin(talk.request, talk.sample, attempt=talk.attempt + 1)

    def _finish(self, talk: _Talk, reason: FinishReason, error: str = "") -> None:
        del self._talks[talk.sample.sample_id]
        talk.session.close()
        if talk.episode is None or reason is FinishReason.ERROR:
            self._finished.append(_without_tokens(talk, FinishReason.ERROR, error))
            return
        self._metrics.count_episode("finished")
        sample = talk.episode.ended(reason, error)
        if rewards := self._list_rewards(talk):
            sample = replace(sample, environment_rewards=rewards)
        if talk.prompt:
            prompt_tokens = talk.episode.request.prompt_tokens
            sample = replace(sample, prompt_tokens=prompt_tokens, prompt_messages=talk.prompt)
        self._finished.append(sample)

    def _list_rewards(self, talk: _Talk) -> tuple[float, ...]:
        """Return the reward of each turn; 0 for a turn that was cut off, which no environment has
        seen. Empty for an environment that gives none.
        """
        answered = [reward for reward in talk.rewards if reward is not None]
        only_cut_off = talk.num_answers == 0 and self._may_reward
        return tuple(reward or 0.0 for reward in talk.rewards) if answered or only_cut_off else ()


def open_task(
    task: EnvironmentContext, media: Sequence[ProcessedMedia], opening: ProcessedOpening
) -> tuple[EnvironmentContext, list[ProcessedMedia]]:
    """Return the row with what the environment said first, and the media of its messages.

    Args:
        task: The row of the prompt.
        media: Of its messages.
        opening: What the environment said.
    """
    first_messages = [reply.message for reply in opening.messages]
    added = [piece for reply in opening.messages for piece in reply.media]
    messages = first_messages if opening.replaces_prompt else [*task.messages, *first_messages]
    opened = replace(task, messages=messages, tools=_join_tools(task.tools, opening.tools))
    return opened, added if opening.replaces_prompt else [*media, *added]


def _join_tools(row: str, opening: str) -> str:
    """Join two JSON lists of tools, either of which may be empty."""
    if not row or not opening:
        return row or opening
    return orjson.dumps([*orjson.loads(row), *orjson.loads(opening)]).decode()


def _without_tokens(talk: _Talk, reason: FinishReason, error: str = "") -> GeneratedSample:
    return GeneratedSample(
        sample_id=talk.sample.sample_id,
        prompt_group_id=talk.request.prompt_group_id,
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        segments=(),
        finish_reason=reason,
        error=error,
    )
