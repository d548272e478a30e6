"""An engine whose samples are episodes of a foreign program, which talks with the policy through
the gateway: a program that this worker starts, or a harness that a person has started (`offers`).

    rollout loop's thread                         gateway's thread (event loop)
    submit ------------------------------------>  an episode: session, key, program
    poll   <-- calls ---------------------------  a call of the program, in any dialect
       engine.submit, engine.poll
           --- sampled turns ------------------>  answer of the call
    poll   <-- finished episodes ---------------  the program has ended: the sample

The engine is used by the loop's thread only. An episode that fails for another reason than the
policy's is begun again, `environment.attempts` times in all; then its sample fails, and with it its
prompt group, which becomes a dead letter: it is never scored. An aborted episode is begun again by
the next worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import structlog

from relax_events.config import RunConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    Engine,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.engines.turn_engine import require_context
from relax_events.errors import (
    EngineFailed,
    EpisodeFailed,
    MediaError,
    ObjectError,
    StoreUnavailable,
)
from relax_events.events.parts import FinishReason
from relax_events.gateway.call_engine import CallEngine, EngineCall
from relax_events.gateway.offers import SessionOffers
from relax_events.gateway.program import (
    ProgramLimits,
    delete_abandoned_folders,
    resolve_command,
    run_program,
)
from relax_events.gateway.render_queue import RenderQueue
from relax_events.gateway.sample import build_sample, build_task
from relax_events.gateway.server import GatewayServer
from relax_events.gateway.session import Session, SessionBounds
from relax_events.gateway.session_keys import SessionKeys
from relax_events.gateway.session_media import MediaThreads, SessionMedia
from relax_events.http.tls import choose_run_tls
from relax_events.media.library import MediaLibrary
from relax_events.objects.store import list_message_media
from relax_events.secret_handling import read_secret
from relax_events.telemetry.component_metrics import EpisodeMetrics

log = structlog.get_logger()
CLOSE_SECONDS = 30.0


class EpisodeEngine(CallEngine):
    """Implements `Engine`; see the module's docstring."""

    def __init__(
        self,
        engine: Engine,
        *,
        config: RunConfig,
        renderer: PromptRenderer,
        metrics: EpisodeMetrics,
        libraries: Callable[[], MediaLibrary] | None = None,
        index: int = 0,
    ) -> None:
        """Start the gateway; `close` closes it and the engine.

        Args:
            engine: Generates the turns.
            config: The run; its environment has a command.
            renderer: Of the policy.
            metrics: Receive the counts.
            libraries: Opens a library of the run's media; by default without a version's folder.
            index: The worker's, which is added to the port for harnesses.
        Raises:
            ConfigError: There is no such program, no token for harnesses, or their address needs
                encryption.
            EnvironmentProblem: The port for harnesses is taken.
        """
        super().__init__(engine)
        self._config, self._metrics = config, metrics
        self._renderer, self._queue = renderer, RenderQueue.of_renderer(renderer)
        self._bounds = SessionBounds(
            max_turns=config.environment.max_turns,
            max_new_tokens=config.engine.sampling.max_new_tokens,
            max_context_tokens=config.engine.max_context_tokens,
        )
        environment = config.environment
        self._limits = ProgramLimits(
            start_seconds=environment.start_seconds,
            episode_seconds=environment.episode_seconds,
            memory_bytes=environment.memory_bytes,
        )
        self._command = resolve_command(environment.command) if environment.command else ()
        if num_deleted := delete_abandoned_folders():
            log.info("episode_folders.deleted", num_folders=num_deleted)
        self._offers = SessionOffers(self._limits) if environment.harness.is_served else None
        self._media = MediaThreads(libraries or (lambda: MediaLibrary(config)), config)
        self._keys = SessionKeys()
        self._episodes: dict[str, tuple[GenerationRequest, Future[None]]] = {}
        self._num_events = 0
        self._server = self._serve(index)
        self._free = asyncio.Semaphore(config.environment.concurrency)

    def _serve(self, index: int) -> GatewayServer:
        """Start the gateway: for programs of this worker, or where harnesses find it."""
        name, harness = self._config.model.path.name, self._config.environment.harness
        call_seconds = self._limits.episode_seconds
        if self._offers is None:
            return GatewayServer(self._keys, model_name=name, call_seconds=call_seconds)
        assert harness.token_file is not None, "the run file has one"
        server = GatewayServer(
            self._keys,
            model_name=name,
            host=harness.host,
            port=harness.port + index,
            token=read_secret(harness.token_file, key="environment.harness.token_file"),
            offers=self._offers,
            call_seconds=call_seconds,
            tls=choose_run_tls(self._config.http, harness.host),
        )
        log.info("gateway.opened", url=server.url)
        return server

    @property
    def num_running(self) -> int:
        """Episodes that have not been returned."""
        return len(self._episodes) + len(self._finished)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far plus calls and ends of episodes: all of them are progress."""
        return self._engine.num_tokens + self._num_events

    @property
    def _is_waiting(self) -> bool:
        return bool(self._episodes)

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Return the finished samples; see `Engine`. Waiting for a harness is no failure of this
        worker, so it counts as progress while no harness has an episode.
        """
        if self._offers is not None and self._episodes and not self._offers.num_taken:
            self._num_events += 1
        return super().poll(timeout_seconds=timeout_seconds)

    def submit(self, request: GenerationRequest) -> None:
        """Begin the episodes of a prompt group; see `Engine`.

        Raises:
            PoisonSample: There is no context for the environment.
        """
        require_context(request)
        for sample in request.samples:
            running = self._server.run(self._run_episode(request, sample))
            self._episodes[sample.sample_id] = (request, running)

    def abort(self, sample_ids: Collection[str] | None = None) -> list[GeneratedSample]:
        """End the named episodes, or all; they are begun again when they are submitted again."""
        self._take()
        names = [name for name in self._episodes if sample_ids is None or name in sample_ids]
        aborted = []
        for name in names:
            request, running = self._episodes.pop(name)
            running.cancel()
            aborted.append(_without_tokens(request, name, FinishReason.ABORT))
        stopped = [call for call in self._calls if call.rpartition("#")[0] in names]
        self._engine.abort(stopped)
        self._fail_calls(stopped, EngineFailed("the episode was stopped"))
        return aborted

    def close(self) -> None:
        """End all programs, and close the gateway and the engine."""
        for _, running in self._episodes.values():
            running.cancel()
        self._server.close(seconds=CLOSE_SECONDS)
        self._media.close()
        self._queue.close()
        self._engine.close()

    def _take_item(self, item: EngineCall | GeneratedSample) -> None:
        """Process a call of a program, or the sample of a finished episode."""
        if isinstance(item, EngineCall):
            self._num_events += 1
            super()._take_item(item)
        elif self._episodes.pop(item.sample_id, None) is not None:
            self._num_events += 1
            self._finished.append(item)

    async def _run_episode(self, request: GenerationRequest, sample: SampleRequest) -> None:
        """Run an episode up to its end, or until the attempts are used; runs in the gateway's
        thread.
        """
        attempts = self._config.environment.attempts
        async with self._free:
            for attempt in range(1, attempts + 1):
                try:
                    result = await self._run_attempt(request, sample)
                    self._metrics.count_episode("finished")
                    break
                except (EpisodeFailed, EngineFailed, StoreUnavailable, OSError) as error:
                    problem = (
                        f"episode {sample.sample_id}, attempt {attempt} of {attempts}: {error}"
                    )
                    log.warning("episode.failed", sample_id=sample.sample_id, error=problem)
                    self._metrics.count_episode("failed" if attempt == attempts else "begun_again")
                except (MediaError, ObjectError) as error:
                    result = _without_tokens(
                        request, sample.sample_id, FinishReason.ERROR, error=str(error)
                    )
                    break
            else:
                result = _without_tokens(
                    request, sample.sample_id, FinishReason.ERROR, error=problem
                )
        self._put(result)

    def _open_session(self, request: GenerationRequest, sample: SampleRequest) -> Session:
        """Open a session of a prompt group, which knows the media of its row."""
        media = None
        if self._renderer.reads_media and request.environment_context is not None:
            row_media = list_message_media(request.environment_context.messages)
            media = SessionMedia.of_prompt(self._media, row_media)
        return Session(
            request,
            sample,
            self._bounds,
            self._renderer,
            self._queue,
            self.generate,
            media=media,
        )

    async def _run_attempt(
        self, request: GenerationRequest, sample: SampleRequest
    ) -> GeneratedSample:
        session = self._open_session(request, sample)
        task = await self._media.run(partial(build_task, request, fetch=self._media.fetch_file))
        key = self._keys.open(session)
        try:
            reward = await self._drive(session, key, task)
        finally:
            self._keys.close(key)
        self._metrics.count_malformed_calls(session.malformed_calls)
        trains_all_paths = self._config.environment.trained_paths == "all"
        result = build_sample(session, trains_all_paths=trains_all_paths)
        if reward is not None:
            result = replace(result, environment_rewards=(reward,))
        self._report_forks(session, result)
        return result

    async def _drive(self, session: Session, key: str, task: dict[str, Any]) -> float | None:
        """Have a program drive a session up to its end; return the reward of a harness.

        Raises:
            EpisodeFailed: It fails, or is late.
        """
        if self._offers is not None:
            return await self._offers.run(session, key, task)
        name = self._config.model.path.name
        await run_program(
            self._command,
            task=task,
            variables={
                "OPENAI_BASE_URL": f"{self._server.url}/v1",
                "OPENAI_API_KEY": key,
                "OPENAI_MODEL": name,
                "ANTHROPIC_BASE_URL": self._server.url,
                "ANTHROPIC_API_KEY": key,
                "ANTHROPIC_MODEL": name,
            },
            limits=self._limits,
            first_call=session.first_call,
            accepts_failure=lambda: session.limit is not None,
        )
        return None

    def _report_forks(self, session: Session, result: GeneratedSample) -> None:
        """Count and log the forks of a session."""
        if not session.graph.num_forks:
            return
        self._metrics.count_forks(session.graph.num_forks)
        log.info(
            "session.forked",
            sample_id=result.sample_id,
            num_forks=session.graph.num_forks,
            num_paths=len(result.path_lengths) or 1,
            num_untrained_tokens=session.num_sampled_tokens - result.num_sampled_tokens,
        )


def _without_tokens(
    request: GenerationRequest, sample_id: str, reason: FinishReason, *, error: str = ""
) -> GeneratedSample:
    return GeneratedSample(
        sample_id=sample_id,
        prompt_group_id=request.prompt_group_id,
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        segments=(),
        finish_reason=reason,
        error=error,
    )
