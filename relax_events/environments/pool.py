"""Runs an environment in child processes, beside the engine: one that hangs, grows or crashes costs
its sample and never the worker.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from relax_events.config import RunConfig
from relax_events.data.placeholders import MARKERS, with_media, with_places
from relax_events.engines.protocol import Task
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage, Modality
from relax_events.media.items import items_of
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.objects.roots import media_in
from relax_events.runtime.subprocess_rpc import LENGTHS, AnsweringChild, ChildLost

START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Said:
    """A reply as the model is shown it: its media are in the store."""

    message: ChatMessage
    media: tuple[ProcessedMedia, ...]


Answered = Callable[["Future[Said | None]"], None]


class EnvironmentPool:
    """As many children as `environment.processes` say, each with a thread that also fetches,
    checks, stores and decodes their media.

    Use it from one thread.
    """

    def __init__(
        self, config: RunConfig, *, libraries: Callable[[], MediaLibrary] | None = None
    ) -> None:
        """Start the children and wait until all have loaded the function.

        Args:
            config: The run; its environment has a function.
            libraries: Opens another library of the run's media; each child's thread has one.
        Raises:
            ConfigError: The function can't be loaded; the text says why.
        """
        size = config.environment.processes
        self._places: queue.SimpleQueue[_Place] = queue.SimpleQueue()
        self._all = [
            _Place(config, (libraries or (lambda: MediaLibrary(config)))()) for _ in range(size)
        ]
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="environment")
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            for place in self._all:
                place.start()
                self._places.put(place)
            on_failure.pop_all()

    def ask(
        self, sample_id: str, task: Task, turns: Sequence[ChatMessage], *, on_answer: Answered
    ) -> None:
        """Ask for a reply to the last answer.

        Args:
            sample_id: For errors.
            task: Of its prompt.
            turns: The answers and replies so far, ending with an answer.
            on_answer: Is given the reply, from another thread; None when the sample is over, a
                `PoisonSample` when the environment, or a piece of media that it brought, failed.
        """
        said = tuple(turns)  # the caller's goes on
        self._threads.submit(self._reply, sample_id, task, said).add_done_callback(on_answer)

    def close(self) -> None:
        """End all children; calls that still run are cut off."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for place in self._all:
            place.close()
        self._threads.shutdown()

    def _reply(self, sample_id: str, task: Task, turns: Sequence[ChatMessage]) -> Said | None:
        place = self._places.get()
        try:
            return place.reply(sample_id, task, turns)
        finally:
            self._places.put(place)


class _Place:
    """A child, and what media its thread has at hand."""

    def __init__(self, config: RunConfig, library: MediaLibrary) -> None:
        self._environment, self._library = config.environment, library
        self._setup = {
            **config.environment.model_dump(mode="json"),
            "max_item_bytes": config.model.media.max_item_bytes,
        }
        self._child: AnsweringChild | None = None
        self._takes_files = self._is_closed = False

    def start(self) -> AnsweringChild:
        """Start the child; errors as for the pool."""
        child = self._child = AnsweringChild("relax_events.environments.child", setup=self._setup)
        try:
            said, _ = child.ask({}, seconds=START_SECONDS)
        except ChildLost as lost:
            self._child = None
            how = (
                f"took longer than {START_SECONDS:g} s to load"
                if lost.is_late
                else f"died before it was loaded ({lost.ending})"
            )
            raise ConfigError(
                f"environment {self._environment.function} {how}; see environment.memory_bytes"
            ) from None
        if "load_error" in said:
            raise ConfigError(said["load_error"])
        self._takes_files = said["takes_files"]
        return child

    def close(self) -> None:
        """End the child; a call that waits for it fails."""
        self._is_closed = True
        if self._child is not None:
            self._child.close()

    def reply(self, sample_id: str, task: Task, turns: Sequence[ChatMessage]) -> Said | None:
        """Ask the child, and take in what media it brings; errors as `EnvironmentPool.ask` says."""
        *before, last = (*task.messages, *turns)
        files = (
            [self._library.file(reference) for reference in media_in(before)]
            if self._takes_files
            else []
        )
        question = {
            "completion": last.text,
            "messages": [
                {"role": message.role, "content": _content(message)} for message in before
            ],
            "answer": task.answer,
            "metadata": task.metadata,
        }
        where = (
            f"environment {self._environment.function} on answer "
            f"{sum(message.role == last.role for message in turns)} of sample {sample_id}"
        )
        said, content = self._asked(question, files, where)
        if "error" in said:
            raise PoisonSample(f"{where}: {said['error']}")
        return (
            None
            if said["reply"] is None
            else self._taken(said["reply"], _split(content, said[LENGTHS]), where)
        )

    def _asked(
        self, question: dict[str, Any], files: Sequence[bytes], where: str
    ) -> tuple[dict[str, Any], bytes]:
        if self._is_closed:
            raise PoisonSample(f"{where}: the worker ends")
        child = self._child or self.start()
        try:
            return child.ask(question, files, seconds=self._environment.timeout_seconds)
        except ChildLost as lost:
            self._child = None
            limit = (
                f"took longer than {self._environment.timeout_seconds:g} s "
                "(environment.timeout_seconds)"
            )
            raise PoisonSample(
                f"{where}: it {limit if lost.is_late else f'died ({lost.ending})'}"
            ) from None

    def _taken(self, reply: dict[str, Any], contents: Sequence[bytes], where: str) -> Said:
        brought: dict[Modality, list[bytes | str]] = {Modality(name): [] for name in reply["media"]}
        for (name, is_file), content in zip(reply["kinds"], contents, strict=True):
            brought[Modality(name)].append(content if is_file else content.decode())
        items = {
            modality: items_of(pieces, modality=modality, place=f"{where}: {modality.value}")
            for modality, pieces in brought.items()
        }
        try:
            messages, ordered = with_places(
                [ChatMessage.of_text(reply["role"], reply["text"])], items, place=where
            )
        except ConfigError as error:
            raise PoisonSample(str(error)) from None
        references = [self._library.admit(item) for item in ordered]
        media = tuple(self._library.processed(reference) for reference in references)
        return Said(with_media(messages, references)[0], media)


def _content(message: ChatMessage) -> str:
    return "".join(MARKERS.get(part.kind, part.text or "") for part in message.parts)


def _split(content: bytes, lengths: Sequence[int]) -> list[bytes]:
    return [content[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
