"""Run an environment in child processes: one that hangs, grows or crashes fails its sample, and
never the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from relax_events.config import RunConfig
from relax_events.confinement import ChildLost, ChildPool, ChildSettings, Reply
from relax_events.confinement.entry_points import find_environment
from relax_events.data.conversations import PLACEHOLDERS
from relax_events.data.messages import print_message
from relax_events.engines.protocol import EnvironmentContext
from relax_events.environments.reply_encoding import MAX_REPLY_BYTES
from relax_events.environments.reply_media import ProcessedReply, process_reply
from relax_events.errors import ConfigError, EpisodeLate, PoisonSample
from relax_events.events.parts import ChatMessage
from relax_events.media.library import LibraryThreads, MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.objects.store import list_message_media
from relax_events.runtime.loop_thread import LoopThread


class EnvironmentPool:
    """`environment.processes` children, and as many threads that fetch, check, store and decode the
    media of their replies.

    Attributes:
        loop: Waits for the replies.
    """

    def __init__(
        self, config: RunConfig, *, libraries: Callable[[], MediaLibrary] | None = None
    ) -> None:
        """Start the children and wait until all have loaded the function.

        Args:
            config: The run; its environment has a function.
            libraries: Opens a library of the run's media; each thread has its own.
        Raises:
            ConfigError: The function can't be loaded; the text says why.
        """
        environment = config.environment
        self._config, self._takes_files = environment, False
        self._media = LibraryThreads(
            libraries or (lambda: MediaLibrary(config)),
            size=environment.processes,
            name="environment",
        )
        self._children = ChildPool(
            ChildSettings(
                entry_point=find_environment(str(environment.function), has_sessions=False),
                setup=build_setup(config),
                size=environment.processes,
            )
        )
        self.loop = LoopThread("environments")
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._takes_files = self._start()
            on_failure.pop_all()

    def _start(self) -> bool:
        """Start the children; return whether the function takes files."""
        try:
            return bool(self._children.start()[0]["takes_files"])
        except ChildLost as lost:
            raise self._load_error(lost) from None

    def _load_error(self, lost: ChildLost) -> ConfigError:
        name = f"environment {self._config.function}"
        return lost.as_load_error(name, see="environment.memory_bytes")

    async def reply(
        self, sample_id: str, task: EnvironmentContext, turns: Sequence[ChatMessage]
    ) -> ProcessedReply | None:
        """Return the reply to the last turn of the policy; None when the sample is over.

        Args:
            sample_id: For errors.
            task: The row of its prompt.
            turns: The policy's turns and the replies so far, ending with a turn of the policy.
        Raises:
            EpisodeLate: The environment is late; its process had no other call.
            PoisonSample: The environment or its media failed.
        """
        *before, last = (*task.messages, *turns)
        files = await self._fetch(before) if self._takes_files else []
        request = {
            "completion": last.text,
            "messages": print_messages(before),
            "answer": task.answer,
            "metadata": task.metadata,
        }
        number = sum(message.role == last.role for message in turns)
        where = f"environment {self._config.function} on turn {number} of sample {sample_id}"
        reply = await self._call_child(request, files, where)
        if "error" in reply.head:
            raise PoisonSample(f"{where}: {reply.head['error']}")
        head = reply.head["reply"]
        if head is None:
            return None
        return await self._media.run(
            lambda library: process_reply(head, reply.contents, library=library, where=where)
        )

    async def load_media(self, messages: Sequence[ChatMessage]) -> tuple[ProcessedMedia, ...]:
        """Return the media of messages as inputs of the model; errors as of `MediaLibrary.load`."""
        references = list_message_media(messages)
        return await self._media.run(lambda library: tuple(map(library.load, references)))

    def close(self) -> None:
        """Cancel running calls, and end all children."""
        self.loop.close()
        self._children.close()
        self._media.close()

    async def _fetch(self, messages: Sequence[ChatMessage]) -> list[bytes]:
        references = list_message_media(messages)
        return await self._media.run(lambda library: [*map(library.fetch_file, references)])

    async def _call_child(
        self, request: dict[str, Any], files: Sequence[bytes], where: str
    ) -> Reply:
        seconds = self._config.timeout_seconds
        try:
            return await asyncio.wrap_future(self._children.call(request, files, seconds=seconds))
        except ChildLost as lost:
            if not lost.was_loaded:
                raise self._load_error(lost) from None
            if lost.kind == "closed":
                raise PoisonSample(f"{where}: the worker is closing") from None
            text = f"{where}: it {lost.describe('environment.timeout_seconds')}"
            raise (EpisodeLate(text) if lost.is_late else PoisonSample(text)) from None


def build_setup(config: RunConfig) -> dict[str, Any]:
    """Return the first message to the children of an environment."""
    limits = {
        "max_item_bytes": config.model.media.max_item_bytes,
        "max_reply_bytes": MAX_REPLY_BYTES,
    }
    return config.environment.model_dump(mode="json") | limits


def print_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, each content a text with a placeholder for each file."""
    return [print_message(one) | {"content": _print_content(one)} for one in messages]


def _print_content(message: ChatMessage) -> str:
    return "".join(PLACEHOLDERS.get(part.kind, part.text or "") for part in message.parts)
