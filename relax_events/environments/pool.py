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
from relax_events.data.conversations import PLACEHOLDERS
from relax_events.engines.protocol import EnvironmentContext
from relax_events.environments.reply_media import ProcessedReply, process_reply, split_contents
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage
from relax_events.media.library import MediaLibrary
from relax_events.objects.store import list_message_media
from relax_events.runtime.subprocess_rpc import LENGTHS, ChildProcessLost, SubprocessRpc

START_SECONDS = 120.0


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
        size = config.environment.processes
        self._free_children: queue.SimpleQueue[_EnvironmentChild] = queue.SimpleQueue()
        self._children = [
            _EnvironmentChild(config, (libraries or (lambda: MediaLibrary(config)))())
            for _ in range(size)
        ]
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="environment")
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            for child in self._children:
                child.start()
                self._free_children.put(child)
            on_failure.pop_all()

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
        for child in self._children:
            child.close()
        self._threads.shutdown()

    def _reply(
        self, sample_id: str, task: EnvironmentContext, turns: Sequence[ChatMessage]
    ) -> ProcessedReply | None:
        child = self._free_children.get()
        try:
            return child.reply(sample_id, task, turns)
        finally:
            self._free_children.put(child)


class _EnvironmentChild:
    """A child, and the media library of its thread."""

    def __init__(self, config: RunConfig, library: MediaLibrary) -> None:
        self._environment, self._library = config.environment, library
        self._setup = {
            **config.environment.model_dump(mode="json"),
            "max_item_bytes": config.model.media.max_item_bytes,
        }
        self._child: SubprocessRpc | None = None
        self._takes_files = self._is_closed = False

    def start(self) -> SubprocessRpc:
        """Start the child; errors as for the pool."""
        child = self._child = SubprocessRpc("relax_events.environments.child", setup=self._setup)
        try:
            response, _ = child.request({}, seconds=START_SECONDS)
        except ChildProcessLost as lost:
            self._child = None
            reason = (
                f"took longer than {START_SECONDS:g} s to load"
                if lost.is_late
                else f"died before it was loaded ({lost.ending})"
            )
            raise ConfigError(
                f"environment {self._environment.function} {reason}; see environment.memory_bytes"
            ) from None
        if "load_error" in response:
            raise ConfigError(response["load_error"])
        self._takes_files = response["takes_files"]
        return child

    def close(self) -> None:
        """Close the child; a waiting call fails."""
        self._is_closed = True
        if self._child is not None:
            self._child.close()

    def reply(
        self, sample_id: str, task: EnvironmentContext, turns: Sequence[ChatMessage]
    ) -> ProcessedReply | None:
        """Call the child, and store the media of its reply; errors as in
        `EnvironmentPool.request_reply`.
        """
        *before, last = (*task.messages, *turns)
        files = (
            [self._library.fetch_file(reference) for reference in list_message_media(before)]
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
            f"environment {self._environment.function} on turn "
            f"{sum(message.role == last.role for message in turns)} of sample {sample_id}"
        )
        response, content = self._request(request, files, where)
        if "error" in response:
            raise PoisonSample(f"{where}: {response['error']}")
        return (
            None
            if response["reply"] is None
            else process_reply(
                response["reply"],
                split_contents(content, response[LENGTHS]),
                library=self._library,
                where=where,
            )
        )

    def _request(
        self, request: dict[str, Any], files: Sequence[bytes], where: str
    ) -> tuple[dict[str, Any], bytes]:
        if self._is_closed:
            raise PoisonSample(f"{where}: the worker is closing")
        child = self._child or self.start()
        try:
            return child.request(request, files, seconds=self._environment.timeout_seconds)
        except ChildProcessLost as lost:
            self._child = None
            limit = (
                f"took longer than {self._environment.timeout_seconds:g} s "
                "(environment.timeout_seconds)"
            )
            raise PoisonSample(
                f"{where}: it {limit if lost.is_late else f'died ({lost.ending})'}"
            ) from None


def describe_content(message: ChatMessage) -> str:
    """Return a message's text, with a placeholder for each media file."""
    return "".join(PLACEHOLDERS.get(part.kind, part.text or "") for part in message.parts)
