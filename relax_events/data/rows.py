"""Rows of prompt sources, the protocol of a source, and checking and storing the media of rows
before they are issued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from relax_events.config import RowsConfig
from relax_events.data.conversations import insert_media
from relax_events.errors import ConfigError, MediaError
from relax_events.events.parts import ChatMessage, Modality
from relax_events.media.items import MediaItem
from relax_events.media.library import MediaLibrary

MAX_EXAMPLES = 8


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt: messages, reference answer, a JSON object for the reward function, and a JSON list
    of tools.

    `completions` are SFT or DPO targets, each the messages that follow the prompt: one, or a chosen
    and a rejected one. A target of a single message is the `answer`; it is repeated here only if
    the reference answer differs. `media` are the items for the empty parts of the messages, in
    order; they are not read yet.
    """

    messages: list[ChatMessage]
    answer: str
    metadata: str = "{}"
    tools: str = ""
    completions: list[list[ChatMessage]] = field(default_factory=list)
    media: list[MediaItem] = field(default_factory=list)


class PromptSource(Protocol):
    """A fixed number of prompts with random access; the same index always returns the same row."""

    @property
    def num_rows(self) -> int:
        """Number of rows, at least 1."""

    @property
    def invalid_rows(self) -> InvalidRows:
        """The rows that were skipped as invalid."""

    def row(self, index: int) -> PromptRow:
        """Read or generate row `index`, with 0 <= index < num_rows.

        Raises:
            IndexError: There is no such row.
            ConfigError: The row is invalid; the text names it.
        """


@dataclass(slots=True)
class InvalidRows:
    """Counts the invalid rows of a file, and keeps the errors of the first ones."""

    section: str
    max_count: int = 0
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, error: ConfigError) -> None:
        """Count a row.

        Raises:
            ConfigError: There are more invalid rows than the run file allows.
        """
        self.count += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(str(error))
        if self.count > self.max_count:
            count_text = (
                (
                    f"; it is invalid row number {self.count}, and "
                    f"{self.section}.max_invalid_rows is "
                    f"{self.max_count}"
                )
                if self.max_count
                else ""
            )
            raise ConfigError(f"{error}{count_text}")


def add_system_prompt(messages: list[ChatMessage], system_prompt: str) -> list[ChatMessage]:
    """Put a system prompt first, unless the conversation has its own."""
    if not system_prompt or (messages and messages[0].role == "system"):
        return messages
    return [ChatMessage.of_text("system", system_prompt), *messages]


class PromptSourceKind(Protocol):
    """A kind of prompt source that a package adds by an entry point in the group
    `relax_events.prompt_sources`.
    """

    modality: Modality
    """Modality of the media in its rows; text if they have none."""

    def open(self, name: str, task: str, config: RowsConfig, *, seed: int) -> PromptSource:
        """Open a source.

        Args:
            name: Name of the entry point, as in run files.
            task: The text after the name in `data.source`.
            config: Number of rows, options and system prompt.
            seed: The run's seed.
        Raises:
            ConfigError: There is no such task, or it rejects these options.
        """
        ...


log = structlog.get_logger()
MessageReader = Callable[[PromptRow], list[ChatMessage]]
"""Returns a row's messages with its media stored; raises `MediaError` if an item is invalid."""


def plain_messages(row: PromptRow) -> list[ChatMessage]:
    """Return the messages of a row without media."""
    return row.messages


def build_storing_reader(library: MediaLibrary) -> MessageReader:
    """Build a function that stores the media of rows in a library, each item once."""

    def store(row: PromptRow) -> list[ChatMessage]:
        return (
            insert_media(row.messages, [library.add(item) for item in row.media])
            if row.media
            else row.messages
        )

    return store


def build_checking_reader(library: MediaLibrary) -> MessageReader:
    """Build a function that checks the media of rows and stores nothing, to inspect data before a
    run.
    """

    def check(row: PromptRow) -> list[ChatMessage]:
        return (
            insert_media(row.messages, [library.preprocess(item).reference for item in row.media])
            if row.media
            else row.messages
        )

    return check


class MediaFilter:
    """A `PromptFilter` that skips rows whose media are missing, malicious or not supported by the
    model.
    """

    def __init__(self, read_messages: MessageReader) -> None:
        self._read_messages = read_messages

    def __call__(
        self, row: PromptRow, *, mean_rewards: Sequence[float], train_step: int
    ) -> float | str:
        """See `PromptFilter`."""
        try:
            self._read_messages(row)
        except MediaError as error:
            log.warning("row.skipped", reason=error.reason, error=str(error))
            return f"media_{error.reason}"
        return 0.0
