"""An engine whose samples are episodes: a driver has each sample's session, until it ends.

    polling thread                                event loop of the driver
    submit ------------------------------------>  a session, and the driver's coroutine
    poll   <-- a turn to sample ----------------  session.sample_turn, or a call of a program
       engine.submit, engine.poll
           --- the sampled turn --------------->  environment or program
    poll   <-- the finished sample -------------  the driver has ended

The engine is used by the polling thread only. An episode that fails for another reason than the
policy's is begun again, `environment.attempts` times in all; then its sample fails. One that was
lost with a process that it shared uses no attempt: it begins again alone if it may have caused the
loss, or has been lost often. An aborted sample keeps its turns if its driver can continue them in
another worker; else it is begun again there.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from relax_events.config import RunConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    Engine,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.episodes.call_engine import CallEngine, EngineCall
from relax_events.episodes.render_queue import RenderQueue
from relax_events.episodes.sample import abort_sample, build_empty_sample, finish_sample
from relax_events.episodes.session import Session, SessionBounds
from relax_events.errors import (
    EngineFailed,
    EpisodeFailed,
    EpisodeLate,
    ObjectError,
    PoisonSample,
    RelaxError,
    SessionLost,
)
from relax_events.events.parts import FinishReason
from relax_events.runtime.loop_thread import LoopThread
from relax_events.telemetry.component_metrics import EpisodeMetrics

log = structlog.get_logger()
MAX_LOSSES = 3
"""An episode that lost its session so often with a shared process runs alone."""
MIN_DISTURBED = 32
"""Attempts that others disturbed: fewer say nothing about how often that is."""


class Driver(Protocol):
    """What talks with the policy in a session: an environment or a program."""

    @property
    def loop(self) -> LoopThread:
        """Runs the sessions."""
        ...

    @property
    def session_type(self) -> type[Session]:
        """The sessions that it drives."""
        ...

    @property
    def keeps_turns(self) -> bool:
        """Whether an aborted session continues in another worker; else it is begun again."""
        ...

    @property
    def waits_for_people(self) -> bool:
        """Whether no session can begin before a person starts something."""
        ...

    async def drive(self, session: Session) -> None:
        """Sample the turns of a session up to its end.

        Raises:
            EpisodeFailed, EngineFailed, SessionLost: The episode is to be begun again.
            EpisodeLate: The policy's turn was too slow for its program or environment.
            PoisonSample, ObjectError: The sample fails.
        """
        ...

    def close(self) -> None:
        """End all sessions, and close what drives them."""
        ...


@dataclass(slots=True, eq=False)
class Episode:
    """A sample that has not been returned."""

    request: GenerationRequest
    sample: SampleRequest
    session: Session
    running: Future[GeneratedSample] = field(init=False)
    task: asyncio.Task[Any] | None = field(init=False)

    @property
    def name(self) -> str:
        """The sample's id."""
        return self.sample.sample_id


@dataclass(slots=True)
class AttemptBudget:
    """The attempts of an episode.

    Attributes:
        size: How many failures of its own end it.
        num_failures: Its own so far.
        num_losses: How often it was lost with a process that it shared.
        runs_alone: Whether it shares no process from now on.
    """

    size: int
    num_failures: int = 0
    num_losses: int = 0
    runs_alone: bool = False

    @property
    def is_used(self) -> bool:
        """Whether no attempt is left."""
        return self.num_failures >= self.size

    def count(self, error: EpisodeFailed | EngineFailed | SessionLost) -> str:
        """Count the end of an attempt; return its outcome."""
        if isinstance(error, SessionLost) and not self.runs_alone:
            self.num_losses += 1
            self.runs_alone = error.is_suspect or self.num_losses >= MAX_LOSSES
            return "alone" if self.runs_alone else "disturbed"
        self.num_failures += 1
        return "failed" if self.is_used else "begun_again"

    def describe(self) -> str:
        """Return which attempt has ended."""
        if self.num_failures:
            return f"attempt {self.num_failures} of {self.size}"
        return "begun again alone" if self.runs_alone else "begun again without using an attempt"


class EpisodeEngine(CallEngine):
    """Implements `Engine`; see the module's docstring."""

    def __init__(
        self,
        engine: Engine,
        driver: Driver,
        *,
        config: RunConfig,
        renderer: PromptRenderer,
        metrics: EpisodeMetrics,
    ) -> None:
        """Wrap an engine; `close` closes it and the driver.

        Args:
            engine: Generates the turns.
            driver: Drives the sessions.
            config: Limits turns, tokens and attempts of a sample.
            renderer: Of the policy.
            metrics: Receive the counts.
        """
        super().__init__(engine)
        self._driver, self._metrics, self._config = driver, metrics, config
        self._renderer, self._queue = renderer, RenderQueue.of_renderer(renderer)
        self._bounds = SessionBounds(
            max_turns=config.environment.max_turns,
            max_context_tokens=config.engine.max_context_tokens,
        )
        self._episodes: dict[str, Episode] = {}
        self._ended: deque[Episode] = deque()
        self._num_events = 0
        self._attempts: Counter[str] = Counter()
        """By outcome; counted in the driver's loop."""
        self._has_warned = False

    @property
    def num_running(self) -> int:
        """Samples submitted and not returned."""
        return len(self._episodes) + len(self._finished)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far plus turns begun and episodes ended: all of them are progress."""
        return self._engine.num_tokens + self._num_events

    @property
    def _is_waiting(self) -> bool:
        return bool(self._episodes)

    def submit(self, request: GenerationRequest) -> None:
        """Begin the episodes of a prompt group; see `Engine`. Their first turns are queued when
        this returns, so that the engine reads their prompt once.

        Raises:
            PoisonSample: There is no context for the environment.
        """
        if request.environment_context is None:
            raise PoisonSample(
                f"prompt group {request.prompt_group_id} has no context for the environment"
            )
        for sample in request.samples:
            self._begin(Episode(request, sample, self._open_session(request, sample)))
        self._driver.loop.run(asyncio.sleep(0)).result()

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Return the finished samples; see `Engine`. Waiting for a person is no failure of this
        worker, so it counts as progress.
        """
        if self._episodes and self._driver.waits_for_people:
            self._num_events += 1
        return super().poll(timeout_seconds=timeout_seconds)

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """Remove the named samples, or all; see `Engine`. A finished sample that was not returned
        and can be continued is aborted too; a late one would only be late again.
        """
        episodes = {
            name: episode
            for name, episode in self._episodes.items()
            if (sample_ids is None or name in sample_ids) and not self._is_final(episode)
        }
        stopped = [name for name in self._calls if read_sample_id(name) in episodes]
        turns = {read_sample_id(turn.sample_id): turn for turn in self._engine.abort(stopped)}
        stopping = self._stop([*episodes.values()], turns)
        aborted = self._driver.loop.run(stopping).result()
        error = EngineFailed("the episode was stopped")
        for fail in (self._fail_calls, self._fail_queued):
            fail(error, is_meant=lambda call: read_sample_id(call.name) in episodes)
        for name in episodes:
            del self._episodes[name]
        return aborted

    def close(self) -> None:
        """End all episodes, and close what they use."""
        self._driver.close()
        self._queue.close()
        self._engine.close()

    def _is_final(self, episode: Episode) -> bool:
        """Return whether an episode has ended, and no worker could continue it."""
        if not episode.running.done() or not self._driver.keeps_turns:
            return episode.running.done()
        has_sample = episode.running.exception() is None
        return has_sample and episode.running.result().finish_reason is FinishReason.LATE

    def _take(self, *, timeout_seconds: float = 0.0) -> None:
        super()._take(timeout_seconds=timeout_seconds)
        while self._ended:
            episode = self._ended.popleft()
            if self._episodes.get(episode.name) is episode:
                self._finished.append(episode.running.result())
                del self._episodes[episode.name]
                self._num_events += 1

    def _take_call(self, call: EngineCall) -> None:
        self._num_events += 1
        super()._take_call(call)

    def _begin(self, episode: Episode) -> None:
        self._episodes[episode.name] = episode
        episode.running = self._driver.loop.run(self._run(episode))
        episode.running.add_done_callback(lambda _: self._end(episode))

    def _end(self, episode: Episode) -> None:
        """Hand an ended episode to the polling thread."""
        self._ended.append(episode)
        self._put(None)

    def _open_session(
        self, request: GenerationRequest, sample: SampleRequest, *, runs_alone: bool = False
    ) -> Session:
        return self._driver.session_type(
            request,
            sample,
            self._bounds,
            self._renderer,
            self._queue,
            self.generate,
            runs_alone=runs_alone,
        )

    async def _run(self, episode: Episode) -> GeneratedSample:
        """Run an episode up to its end, or until the attempts are used. An unforeseen error of a
        driver ends its sample alone.
        """
        episode.task = asyncio.current_task()
        problem, budget = "", AttemptBudget(self._config.environment.attempts)
        try:
            while not budget.is_used:
                try:
                    return await self._run_attempt(episode.session)
                except (EpisodeFailed, EngineFailed, SessionLost) as error:
                    outcome = budget.count(error)
                    problem = f"episode {episode.name}, {budget.describe()}: {error}"
                log.warning("episode.failed", sample_id=episode.name, error=problem)
                self._count_attempt(outcome)
                episode.session = self._open_session(
                    episode.request, episode.sample, runs_alone=budget.runs_alone
                )
        except (PoisonSample, ObjectError) as error:
            problem = str(error)
        except RelaxError:
            raise  # of the worker, such as an object store that is away
        except Exception as error:
            problem = f"episode {episode.name}: unforeseen {error!r}"
            log.exception("episode.broken", sample_id=episode.name)
            self._count_attempt("failed")
        return build_empty_sample(episode.request, episode.name, FinishReason.ERROR, error=problem)

    def _count_attempt(self, outcome: str) -> None:
        """Count the end of an attempt; warn once if more are disturbed than finish."""
        self._metrics.count_episode(outcome)
        self._attempts[outcome] += 1
        num_disturbed, num_finished = self._attempts["disturbed"], self._attempts["finished"]
        if num_disturbed > max(num_finished, MIN_DISTURBED) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "sessions.disturbed",
                num_disturbed=num_disturbed,
                num_finished=num_finished,
                reason="environments that hang or die end the sessions that share their process",
                remedy="raise environment.processes",
            )

    async def _run_attempt(self, session: Session) -> GeneratedSample:
        outcome, reason, problem = "finished", None, ""
        try:
            await self._driver.drive(session)
        except EpisodeLate as error:
            session.close()
            outcome, reason, problem = "late", FinishReason.LATE, str(error)
            log.warning("episode.late", sample_id=session.sample.sample_id, error=problem)
        self._metrics.count_malformed_calls(session.malformed_calls)
        trains_all_paths = self._config.environment.trained_paths == "all"
        sample = finish_sample(
            session, trains_all_paths=trains_all_paths, reason=reason, error=problem
        )
        self._count_attempt(outcome)
        if session.graph.num_forks:
            self._metrics.count_forks(session.graph.num_forks)
            log.info(
                "session.forked",
                sample_id=sample.sample_id,
                num_forks=session.graph.num_forks,
                num_paths=len(sample.path_lengths) or 1,
                num_untrained_tokens=session.num_sampled_tokens - sample.num_sampled_tokens,
            )
        return sample

    async def _stop(
        self, episodes: Sequence[Episode], turns: Mapping[str, GeneratedSample]
    ) -> list[GeneratedSample]:
        """End episodes; runs in the loop after the turns that were sampled before have arrived.

        Args:
            episodes: The episodes.
            turns: What the engine has of the turns in flight, by sample id.
        """
        aborted = []
        for episode in episodes:
            assert episode.task is not None, "it began before `submit` returned"
            episode.task.cancel()
            episode.session.close()
            if self._driver.keeps_turns:
                aborted.append(abort_sample(episode.session, turns.get(episode.name)))
            else:
                request = episode.request
                aborted.append(build_empty_sample(request, episode.name, FinishReason.ABORT))
        return aborted


def read_sample_id(call_name: str) -> str:
    """Return the id of the sample that a call belongs to."""
    return call_name.rpartition("#")[0]
