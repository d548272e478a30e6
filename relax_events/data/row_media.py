"""Check and store the media of rows before the rows are issued."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from relax_events.data.placeholders import insert_media
from relax_events.data.rows import PromptRow
from relax_events.errors import MediaError
from relax_events.events.parts import ChatMessage
from relax_events.media.library import MediaLibrary

log = structlog.get_logger()
MessageReader = Callable[[PromptRow], list[ChatMessage]]
"""Returns a row's messages with its media stored; raises MediaError if an item is invalid."""


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
    """Skips rows whose media are missing, malicious or not readable for the model; see
    `PromptFilter`.
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
