"""A driver that has a foreign program talk with the policy through the gateway: a program that this
worker starts, or a harness that a person has started (`offers`).

    session, key, program  -->  calls of the program, in any dialect  -->  the program has ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from relax_events.api.drivers import Session
from relax_events.api.engines import GenerationRequest, RunConfig
from relax_events.api.errors import EpisodeFailed, StoreUnavailable
from relax_events.api.events import ContentPart, MediaRef, parse_json
from relax_events.api.http import choose_run_tls, read_secret
from relax_events.data.messages import print_message
from relax_events.media.library import MediaLibrary
from relax_events.objects.store import list_message_media
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.offers import SessionOffers
from relax_events.packages.gateway.program import (
    ProgramLimits,
    delete_abandoned_folders,
    run_program,
)
from relax_events.packages.gateway.server import GatewayServer
from relax_events.packages.gateway.session_keys import SessionKeys
from relax_events.packages.gateway.session_media import MediaThreads, SessionMedia, to_chat_part

log = structlog.get_logger()
GONE_SECONDS = 20.0
"""Without a call after a harness's connection closed during a call: clients whose connection breaks
call again within ten."""


class ProgramDriver:
    """Implements `Driver`; see the module's docstring. The state of a program can't be moved, so an
    aborted sample is begun again.

    Attributes:
        offers: The episodes for harnesses; None if this worker starts the programs.
        url: Of the gateway.
    """

    session_type = ChatSession
    keeps_turns = False

    def __init__(
        self,
        config: RunConfig,
        *,
        libraries: Callable[[], MediaLibrary] | None = None,
        index: int = 0,
    ) -> None:
        """Start the gateway; `close` closes it.

        Args:
            config: The run; its environment has a command, or harnesses.
            libraries: Opens a library of the run's media; by default without a version's folder.
            index: The worker's, which is added to the port for harnesses.
        Raises:
            ConfigError: There is no such program, no token for harnesses, or their address needs
                encryption.
            EnvironmentProblem: The port for harnesses is taken.
        """
        environment = config.environment
        self._config = config
        notices_end = environment.harness.is_served and environment.idle_seconds > 0
        self._limits = ProgramLimits(
            start_seconds=environment.start_seconds,
            episode_seconds=environment.episode_seconds,
            idle_seconds=environment.idle_seconds,
            gone_seconds=GONE_SECONDS if notices_end else 0.0,
            memory_bytes=environment.memory_bytes,
        )
        self._command = environment.resolve_command()
        if num_deleted := delete_abandoned_folders():
            log.info("episode_folders.deleted", num_folders=num_deleted)
        self.offers = SessionOffers(self._limits) if environment.harness.is_served else None
        self._media = MediaThreads(libraries or (lambda: MediaLibrary(config)), config)
        self._keys = SessionKeys()
        self._free = asyncio.Semaphore(environment.concurrency)
        self._server = self._serve(index)
        self.loop, self.url = self._server.loop, self._server.url

    @property
    def waits_for_people(self) -> bool:
        """Whether no harness has an episode."""
        return self.offers is not None and not self.offers.num_taken

    async def drive(self, session: Session) -> None:
        """See `Driver`: up to the end of the program.

        Raises:
            EpisodeFailed: It fails, is late before a turn of the policy, or the object store does
                not respond.
            EpisodeLate: It is late after a turn of the policy.
            MediaError, ObjectError: A media file of the row is missing.
        """
        assert isinstance(session, ChatSession), "the driver's type"
        async with self._free:
            try:
                await self._run_program(session)
            except (StoreUnavailable, OSError) as error:
                raise EpisodeFailed(str(error)) from error

    def close(self) -> None:
        """End all programs, and close the gateway."""
        self._server.close()
        self._media.close()

    async def _run_program(self, session: ChatSession) -> None:
        if session.renderer.reads_media:
            row_media = list_message_media(session.context.messages)
            session.media = SessionMedia.of_prompt(self._media, row_media)
        task = await self._media.run(
            lambda library: build_task(session.request, fetch=library.fetch_file)
        )
        key = self._keys.open(session)
        try:
            if self.offers is None:
                await self._run_command(session, key, task)
            elif (reward := await self.offers.run(session, key, task)) is not None:
                session.rewards = (reward,)
        finally:
            self._keys.close(key)

    async def _run_command(self, session: ChatSession, key: str, task: dict[str, Any]) -> None:
        name = self._config.model.path.name
        await run_program(
            self._command,
            task=task,
            variables={
                "OPENAI_BASE_URL": f"{self.url}/v1",
                "OPENAI_API_KEY": key,
                "OPENAI_MODEL": name,
                "ANTHROPIC_BASE_URL": self.url,
                "ANTHROPIC_API_KEY": key,
                "ANTHROPIC_MODEL": name,
            },
            limits=self._limits,
            session=session,
        )

    def _serve(self, index: int) -> GatewayServer:
        """Start the gateway: for programs of this worker, or where harnesses find it."""
        name, harness = self._config.model.path.name, self._config.environment.harness
        if self.offers is None:
            return GatewayServer(self._keys, model_name=name)
        assert harness.token_file is not None, "the run file has one"
        server = GatewayServer(
            self._keys,
            model_name=name,
            host=harness.host,
            port=harness.port + index,
            token=read_secret(harness.token_file, key="environment.harness.token_file"),
            offers=self.offers,
            tls=choose_run_tls(self._config.http, harness.host),
        )
        log.info("gateway.opened", url=server.url)
        return server


def build_task(request: GenerationRequest, *, fetch: Callable[[MediaRef], bytes]) -> dict[str, Any]:
    """Return the part of its row that a program gets: messages, metadata and tools, but no answer.

    Args:
        request: Of the prompt group, with the row for the environment.
        fetch: Returns the content of a media file.
    Raises:
        MediaError, ObjectError: A media file of the row is missing.
    """
    row = request.environment_context
    assert row is not None, "checked on submission"
    return {
        "messages": [
            print_message(message, show_part=lambda part: _show_media(part, fetch))
            for message in row.messages
        ],
        "metadata": parse_json(row.metadata),
        "tools": parse_json(row.tools) if row.tools else [],
        "prompt_group_id": request.prompt_group_id,
    }


def _show_media(part: ContentPart, fetch: Callable[[MediaRef], bytes]) -> dict[str, Any]:
    assert part.media is not None, "media of issued rows are stored"
    return to_chat_part(part.media, fetch(part.media))
