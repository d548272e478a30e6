"""Runs stateful environments in child processes, many sessions in each.

    engine's thread            this pool's thread (event loop)             child process
    open, step, close  ---->   one task each: request with a deadline ---> the session
    callback           <----   media fetched and stored in threads   <---  its answer

Sessions share processes. One that is late, or runs while its process dies, is lost; it may have
lost its neighbours' sessions too. `SessionLost` says which: those that were under way are suspects,
and begin again in a process of their own, where a fault is known to be theirs (ADR 79). A failure
that is an environment's own is an `EpisodeFailed`, an invalid reply a `PoisonSample`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import structlog

from relax_events.config import EnvironmentConfig, RunConfig
from relax_events.confinement import ChildLost, ChildPool, ChildSettings, Reply
from relax_events.confinement.entry_points import (
    SERVER_SESSIONS,
    USER_SESSIONS,
    EntryPoint,
    find_environment,
)
from relax_events.confinement.profiles import list_ports
from relax_events.confinement.served import IS_CONCURRENT
from relax_events.engines.protocol import EnvironmentContext
from relax_events.environments.interfaces.protocol import DEADLINES
from relax_events.environments.pool import build_setup, print_messages
from relax_events.environments.reply_media import ProcessedReply, process_reply
from relax_events.errors import ConfigError, EpisodeFailed, EpisodeLate, PoisonSample, SessionLost
from relax_events.events.json_text import format_json, parse_json
from relax_events.media.library import LibraryThreads, MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.objects.store import list_message_media
from relax_events.runtime.loop_thread import LoopThread

log = structlog.get_logger()
SILENT_SECONDS = 30.0
"""A child that ticks each second and is silent for so long hangs."""
GRACE_SECONDS = 5.0
"""For a child that keeps deadlines itself to say that one was missed."""
MIN_LONE_PROCESSES = 4
"""At most so many sessions that must run alone do, or as many as the environment has processes."""


@dataclass(frozen=True, slots=True)
class ProcessedOpening:
    """What the environment said before the first turn; see `Opening`. `tools` is a JSON list."""

    messages: tuple[ProcessedReply, ...]
    replaces_prompt: bool
    tools: str

    @property
    def is_empty(self) -> bool:
        """Whether the prompt stays as it is."""
        return not (self.messages or self.tools or self.replaces_prompt)

    def add_to(
        self, task: EnvironmentContext, media: Sequence[ProcessedMedia]
    ) -> tuple[EnvironmentContext, tuple[ProcessedMedia, ...]]:
        """Return a row with what the environment said, and the media of its messages.

        Args:
            task: The row of the prompt.
            media: Of its messages.
        """
        messages = [reply.message for reply in self.messages]
        added = tuple(piece for reply in self.messages for piece in reply.media)
        if not self.replaces_prompt:
            messages, added = [*task.messages, *messages], (*media, *added)
        return replace(task, messages=messages, tools=_join_tools(task.tools, self.tools)), added


@dataclass(frozen=True, slots=True)
class ProcessedObservation:
    """What the environment said to a turn; see `Observation`."""

    replies: tuple[ProcessedReply, ...]
    is_over: bool
    reward: float | None


class EnvironmentSession:
    """The environment of one sample, from the engine's side. Each call returns a future."""

    def __init__(
        self, pool: SessionPool, sample_id: str, task: EnvironmentContext, *, runs_alone: bool
    ) -> None:
        """Prepare a session; `open` sets it up."""
        self._pool, self.sample_id, self.task = pool, sample_id, task
        self.runs_alone = runs_alone
        self._opening: Future[ProcessedOpening] | None = None
        self.number = 0
        self.slot: int | None = None
        """Which of the pool's children holds it; those of sessions that run alone have their own
        numbers.
        """
        self.child: int | None = None
        """The process of that child in which it was set up."""
        self.is_lost = self.holds_slot = False

    def open(self) -> Future[ProcessedOpening]:
        """Set the session up, once a slot of `environment.concurrency` is free."""
        self._opening = self._pool.loop.run(self._pool.open_session(self))
        return self._opening

    def step(self, completion: str) -> Future[ProcessedObservation]:
        """Give the environment a turn of the policy."""
        return self._pool.loop.run(self._pool.step_session(self, completion))

    def close(self) -> None:
        """Close the session, also while it is being set up; the caller does not wait for it."""
        if self._opening is not None:
            self._opening.cancel()
            self._pool.loop.run(self._pool.close_session(self))


class SessionPool:
    """`environment.processes` children, each with many sessions. Used from one thread."""

    def __init__(
        self, config: RunConfig, *, libraries: Callable[[], MediaLibrary] | None = None
    ) -> None:
        """Start the children, and wait until all have loaded the environment.

        Args:
            config: The run; its environment has an interface with sessions.
            libraries: Opens a library of the run's media; each thread has its own.
        Raises:
            ConfigError: The environment can't be loaded; the text says why.
        """
        environment = self._environment = config.environment
        self.name = f"environment {environment.name}"
        self._media = LibraryThreads(
            libraries or (lambda: MediaLibrary(config)), size=environment.processes, name="replies"
        )
        self._numbers = count(1)
        self._free = asyncio.Semaphore(environment.concurrency)
        self.loop = LoopThread("environments")
        self._num_sessions = [0] * environment.processes
        self._children = _build_children(config, size=environment.processes)
        num_lone = max(MIN_LONE_PROCESSES, environment.processes)
        self._lone_children = _build_children(config, size=num_lone)
        self._lone_slots: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for slot in range(num_lone):
            self._lone_slots.put_nowait(slot)
        self._takes_files = self._is_concurrent = False
        try:
            ready = self._children.start()[0]
            self._takes_files = bool(ready["takes_files"])
            self._is_concurrent = bool(ready[IS_CONCURRENT])
        except ChildLost as lost:
            self.close()
            raise self._load_error(lost) from None

    def session(
        self, sample_id: str, task: EnvironmentContext, *, runs_alone: bool = False
    ) -> EnvironmentSession:
        """Return the session of a sample, not yet set up; `runs_alone` in a process of its own."""
        return EnvironmentSession(self, sample_id, task, runs_alone=runs_alone)

    def close(self) -> None:
        """Close all sessions and processes."""
        self.loop.close(last=self._close_children())
        self._media.close()

    async def open_session(self, session: EnvironmentSession) -> ProcessedOpening:
        """Set a session up; see `EnvironmentSession.open`.

        Raises:
            EpisodeFailed: The environment failed or is late.
            PoisonSample: Its messages are invalid.
        """
        if session.runs_alone:
            session.slot = await self._lone_slots.get()
        await self._free.acquire()
        session.holds_slot = True
        task = session.task
        session.number = next(self._numbers)
        if not session.runs_alone:
            session.slot = min(range(len(self._num_sessions)), key=self._num_sessions.__getitem__)
            self._num_sessions[session.slot] += 1
        files = await self._fetch(task) if self._takes_files else []
        question = {
            "op": "open",
            "sample_id": session.sample_id,
            "seed": compute_seed(session.sample_id),
            "messages": print_messages(task.messages),
            "answer": task.answer,
            "metadata": task.metadata,
        }
        reply = await self._request(session, question, files)
        messages = await self._process(session, reply)
        return ProcessedOpening(messages, reply.head["replaces_prompt"], reply.head["tools"])

    async def step_session(
        self, session: EnvironmentSession, completion: str
    ) -> ProcessedObservation:
        """Give a session a turn; errors as of `open_session`."""
        question = {"op": "step", "completion": completion}
        reply = await self._request(session, question)
        replies = await self._process(session, reply)
        return ProcessedObservation(replies, reply.head["is_over"], reply.head["reward"])

    async def close_session(self, session: EnvironmentSession) -> None:
        """Close a session and free its slot; a failure is logged."""
        try:
            if session.slot is not None:
                if not session.runs_alone:
                    self._num_sessions[session.slot] -= 1
                if session.number and not session.is_lost:
                    await self._request(session, {"op": "close"})
        except (EpisodeFailed, PoisonSample, SessionLost) as error:
            log.warning("session.close_failed", sample_id=session.sample_id, error=str(error))
        finally:
            if session.runs_alone and session.slot is not None:
                self._lone_slots.put_nowait(session.slot)
                session.slot = None
            if session.holds_slot:
                session.holds_slot = False
                self._free.release()

    async def _request(
        self,
        session: EnvironmentSession,
        question: Mapping[str, Any],
        files: Sequence[bytes] = (),
    ) -> Reply:
        stage = question["op"]
        where = f"{self.name}, {stage}, sample {session.sample_id}"
        children = self._lone_children if session.runs_alone else self._children
        answer = children.call(
            {**question, "session": session.number},
            files,
            seconds=self._seconds(stage),
            slot=session.slot,
            child=session.child,
        )
        try:
            reply = await asyncio.wrap_future(answer)
        except ChildLost as lost:
            session.is_lost = True
            raise self._read_loss(session, lost, where, stage) from None
        session.child = reply.child
        if "late" in reply.head:
            text = f"{where}: {reply.head['late']}"
            raise _blame(session, text, is_late_turn=stage == "step")
        _check_answer(reply, where)
        return reply

    def _seconds(self, stage: str) -> float:
        """Return the deadline of a request, after which its process is killed."""
        seconds: float = getattr(self._environment, DEADLINES[stage])
        return seconds + (GRACE_SECONDS if self._is_concurrent else 0.0)

    def _load_error(self, lost: ChildLost) -> ConfigError:
        return lost.as_load_error(f"{self.name}: its process", see="environment.memory_bytes")

    def _read_loss(
        self, session: EnvironmentSession, lost: ChildLost, where: str, stage: str
    ) -> EpisodeFailed | EpisodeLate | SessionLost:
        """Return the error of a session that was lost with its process."""
        if not lost.was_loaded:
            return EpisodeFailed(str(self._load_error(lost)))
        text = f"{where}: its process {lost.describe('')}, and with it the session"
        if lost.kind == "late":  # of another request, perhaps, with another deadline
            seconds = getattr(self._environment, key := DEADLINES[stage])
            text = f"{where}: took longer than {seconds:g} s (environment.{key})"
        if lost.kind == "state_lost":
            return SessionLost(text, is_suspect=False)
        return _blame(session, text, is_late_turn=lost.is_late and stage == "step")

    async def _fetch(self, task: EnvironmentContext) -> list[bytes]:
        references = list_message_media(task.messages)
        return await self._media.run(lambda library: [*map(library.fetch_file, references)])

    async def _process(
        self, session: EnvironmentSession, reply: Reply
    ) -> tuple[ProcessedReply, ...]:
        if not reply.head["replies"]:
            return ()
        where = f"{self.name}, sample {session.sample_id}"

        def process(library: MediaLibrary) -> tuple[ProcessedReply, ...]:
            processed, first = [], 0
            for message in reply.head["replies"]:
                end = first + len(message["kinds"])
                files = reply.contents[first:end]
                processed.append(process_reply(message, files, library=library, where=where))
                first = end
            return tuple(processed)

        return await self._media.run(process)

    async def _close_children(self) -> None:
        seconds = self._environment.timeout_seconds + 1.0
        for children in (self._children, self._lone_children):
            await asyncio.to_thread(children.close, exit_seconds=seconds)


def _blame(
    session: EnvironmentSession, text: str, *, is_late_turn: bool
) -> EpisodeFailed | EpisodeLate | SessionLost:
    """Return the error of a session that was under way when it, or its process, was lost.

    Args:
        session: In a process of its own, the fault is known to be its own.
        text: What happened.
        is_late_turn: Whether it was late with its answer to a turn of the policy.
    """
    if not session.runs_alone:
        return SessionLost(text, is_suspect=True)
    return EpisodeLate(text) if is_late_turn else EpisodeFailed(text)


def _build_children(config: RunConfig, *, size: int) -> ChildPool:
    environment = config.environment
    entry_point, addresses = choose_entry_point(environment)
    return ChildPool(
        ChildSettings(
            entry_point=entry_point,
            setup=build_setup(config),
            size=size,
            silent_seconds=SILENT_SECONDS,
            keeps_state=True,
            ports=list_ports(addresses),
        )
    )


def choose_entry_point(environment: EnvironmentConfig) -> tuple[EntryPoint, list[str]]:
    """Return the entry point of an environment with sessions, and the addresses of its servers."""
    if environment.interface == "openenv":
        return SERVER_SESSIONS, [environment.address]
    if environment.interface == "mcp":
        servers = environment.tool_servers.values()
        if any(server.command for server in servers):
            return USER_SESSIONS, []
        return SERVER_SESSIONS, [server.address for server in servers]
    return find_environment(str(environment.function), has_sessions=True), []


def _join_tools(row: str, opening: str) -> str:
    """Join two JSON lists of tools, either of which may be empty."""
    if not row or not opening:
        return row or opening
    return format_json([*parse_json(row), *parse_json(opening)])


def _check_answer(reply: Reply, where: str) -> None:
    """Refuse the answer of a session that is an error.

    Raises:
        EpisodeFailed: The environment failed.
        PoisonSample: Its reply is invalid.
    """
    if "failed" in reply.head:
        raise EpisodeFailed(f"{where}: {reply.head['failed']}")
    if "invalid" in reply.head:
        raise PoisonSample(f"{where}: {reply.head['invalid']}")


def compute_seed(sample_id: str) -> int:
    """Return the seed of a sample's prompt group."""
    prompt_group_id = sample_id.rpartition("/")[0]
    return int.from_bytes(hashlib.blake2b(prompt_group_id.encode(), digest_size=4).digest()) >> 1
