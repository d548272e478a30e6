"""The media of rows on their way to the log: checked and stored when the row is about to be
issued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from relax_events.data.placeholders import with_media
from relax_events.data.rows import PromptRow
from relax_events.errors import MediaError
from relax_events.events.parts import ChatMessage
from relax_events.media.library import MediaLibrary

log = structlog.get_logger()
MessagesOf = Callable[[PromptRow], list[ChatMessage]]
"""Returns a row's conversation with its media in the store; raises MediaError where a piece of them
is unfit."""


def plain_messages(row: PromptRow) -> list[ChatMessage]:
    """Return the conversation of a row without media."""
    return row.messages


def stored_messages(library: MediaLibrary) -> MessagesOf:
    """Return what puts the media of rows into a library, each once."""

    def stored(row: PromptRow) -> list[ChatMessage]:
        return (
            with_media(row.messages, [library.admit(item) for item in row.media])
            if row.media
            else row.messages
        )

    return stored


def shown_messages(library: MediaLibrary) -> MessagesOf:
    """Return what checks the media of rows and stores nothing, for looking at data before there is
    a run.
    """

    def shown(row: PromptRow) -> list[ChatMessage]:
        return (
            with_media(row.messages, [library.show(item).reference for item in row.media])
            if row.media
            else row.messages
        )

    return shown


class MediaJudge:
    """Passes over rows whose media are missing, hostile or nothing that the model can be shown; see
    `judging.Judge`.
    """

    def __init__(self, messages_of: MessagesOf) -> None:
        self._messages_of = messages_of

    def __call__(
        self, row: PromptRow, *, mean_rewards: Sequence[float], train_step: int
    ) -> float | str:
        """See `judging.Judge`."""
        try:
            self._messages_of(row)
        except MediaError as error:
            log.warning("row.passed_over", reason=error.reason, error=str(error))
            return f"media_{error.reason}"
        return 0.0
