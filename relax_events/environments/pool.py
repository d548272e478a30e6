"""Run an environment in child processes: one that hangs, grows or crashes fails its sample, and
never the worker.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from relax_events.config import RunConfig
from relax_events.confinement import ChildLost, ChildPool, ChildSettings, Reply
from relax_events.confinement.entry_points import find_environment
from relax_events.data.conversations import PLACEHOLDERS
from relax_events.engines.protocol import EnvironmentContext
from relax_events.environments.reply_encoding import MAX_REPLY_BYTES
from relax_events.environments.reply_media import ProcessedReply, process_reply
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage
from relax_events.media.library import MediaLibrary
from relax_events.objects.store import list_message_media

ReplyCallback = Callable[["Future[ProcessedReply | None]"], None]


class EnvironmentPool:
    """`environment.processes` children, each with a thread that also fetches, checks, stores and
    decodes the media of its replies.

    Use it from one thread.
    """

    def __init__(
        self, config: RunConfig, *, libraries: Callable[[], MediaLibrary] | None = None
    ) -> None:
        """Start the children and wait until all have loaded the function.

        Args:
            config: The run; its environment has a function.
            libraries: Opens a library of the run's media; each child's thread has its own.
        Raises:
            ConfigError: The function can't be loaded; the text says why.
        """
        environment = config.environment
        self._config, self._takes_files = environment, False
        self._libraries: queue.SimpleQueue[MediaLibrary] = queue.SimpleQueue()
        for _ in range(environment.processes):
            self._libraries.put((libraries or (lambda: MediaLibrary(config)))())
        self._threads = ThreadPoolExecutor(environment.processes, thread_name_prefix="environment")
        self._children = ChildPool(
            ChildSettings(
                entry_point=find_environment(str(environment.function), has_sessions=False),
                setup=build_setup(config),
                size=environment.processes,
            )
        )
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

    def request_reply(
        self,
        sample_id: str,
        task: EnvironmentContext,
        turns: Sequence[ChatMessage],
        *,
        on_reply: ReplyCallback,
    ) -> None:
        """Request a reply to the last turn of the policy.

        Args:
            sample_id: For errors.
            task: The row of its prompt.
            turns: The policy's turns and the replies so far, ending with a turn of the policy.
            on_reply: Receives the reply, from another thread; None when the sample is over, a
                `PoisonSample` when the environment or its media failed.
        """
        snapshot = tuple(turns)  # the caller's list changes
        self._threads.submit(self._reply, sample_id, task, snapshot).add_done_callback(on_reply)

    def close(self) -> None:
        """Close all children; running calls are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._children.close()
        self._threads.shutdown()

    def _reply(
        self, sample_id: str, task: EnvironmentContext, turns: Sequence[ChatMessage]
    ) -> ProcessedReply | None:
        library = self._libraries.get()
        try:
            return self._reply_with(library, sample_id, task, turns)
        finally:
            self._libraries.put(library)

    def _reply_with(
        self,
        library: MediaLibrary,
        sample_id: str,
        task: EnvironmentContext,
        turns: Sequence[ChatMessage],
    ) -> ProcessedReply | None:
        *before, last = (*task.messages, *turns)
        files = (
            [library.fetch_file(reference) for reference in list_message_media(before)]
            if self._takes_files
            else []
        )
        request = {
            "completion": last.text,
            "messages": [
                {"role": message.role, "content": describe_content(message)} for message in before
            ],
            "answer": task.answer,
            "metadata": task.metadata,
        }
        where = (
            f"environment {self._config.function} on turn "
            f"{sum(message.role == last.role for message in turns)} of sample {sample_id}"
        )
        reply = self._call_child(request, files, where)
        if "error" in reply.head:
            raise PoisonSample(f"{where}: {reply.head['error']}")
        return (
            None
            if reply.head["reply"] is None
            else process_reply(
                reply.head["reply"],
                reply.contents,
                library=library,
                where=where,
            )
        )

    def _call_child(self, request: dict[str, Any], files: Sequence[bytes], where: str) -> Reply:
        seconds = self._config.timeout_seconds
        try:
            return self._children.call(request, files, seconds=seconds).result()
        except ChildLost as lost:
            if not lost.was_loaded:
                raise self._load_error(lost) from None
            if lost.kind == "closed":
                raise PoisonSample(f"{where}: the worker is closing") from None
            text = lost.describe("environment.timeout_seconds")
            raise PoisonSample(f"{where}: it {text}") from None


def build_setup(config: RunConfig) -> dict[str, Any]:
    """Return the first message to the children of an environment."""
    limits = {
        "max_item_bytes": config.model.media.max_item_bytes,
        "max_reply_bytes": MAX_REPLY_BYTES,
    }
    return config.environment.model_dump(mode="json") | limits


def describe_content(message: ChatMessage) -> str:
    """Return a message's text, with a placeholder for each media file."""
    return "".join(PLACEHOLDERS.get(part.kind, part.text or "") for part in message.parts)
