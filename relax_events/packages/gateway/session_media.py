"""The media of sessions: found in their messages, stored with the run's objects, known by content.

    part of a message --> bytes --> digest --> known to the session: its reference
                                         `---> checked, decoded and stored --> MediaRef

A program sends its whole history with each call, and so each file again. A session stores it once,
in any encoding, and has the same reference for it on all paths. Slow work runs in threads, each
with a library of its own; the sessions' event loop only waits.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from relax_events.api.engines import ProcessedMedia, RunConfig
from relax_events.api.errors import MediaError, PoisonSample
from relax_events.api.events import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.api.prompts import MediaItem
from relax_events.api.training import MediaConfig
from relax_events.data.conversations import ASSISTANT
from relax_events.data.messages import SYSTEM
from relax_events.media.items import (
    AUDIO_PART,
    DATA_URI,
    WEB,
    MediaAccess,
    MediaKey,
    PendingPart,
    read_part_item,
)
from relax_events.media.library import LibraryThreads, MediaLibrary
from relax_events.media.token_layout import read_modality

NUM_THREADS = 2
MAX_FILES = 64
"""Media files that one program may show the policy, its row's files included."""
MAX_REQUEST_BYTES = 64 * 1024**2
"""Of all media in one call, even if a sample may have more."""
BASE64_RATIO = 4 / 3


class MediaThreads(LibraryThreads):
    """The threads that read, store and load media for all sessions of a gateway."""

    def __init__(self, libraries: Callable[[], MediaLibrary], config: RunConfig) -> None:
        """Start no thread yet.

        Args:
            libraries: Opens a library of the run's media; each thread has its own.
            config: The run, with the limits of files and the hosts of web addresses.
        """
        super().__init__(libraries, size=NUM_THREADS, name="session-media")
        self.limits: MediaConfig = config.model.media
        self.access = MediaAccess(hosts=config.data.media_hosts)
        self.max_files = MAX_FILES


@dataclass(slots=True, eq=False)
class SessionMedia:
    """The media files of a session.

    Attributes:
        threads: Of the gateway.
        by_digest: The known files by content; at the beginning the files of the prompt's row.
    """

    threads: MediaThreads
    by_digest: dict[tuple[bytes, Modality], MediaRef] = field(default_factory=dict)
    _by_key: dict[MediaKey, MediaRef] = field(default_factory=dict)

    @classmethod
    def of_prompt(cls, threads: MediaThreads, references: Iterable[MediaRef]) -> SessionMedia:
        """Begin with the files of the prompt's row, which are stored already."""
        return cls(threads, {(one.digest, read_modality(one)): one for one in references})

    @property
    def max_request_bytes(self) -> int:
        """Bytes of one call's media in JSON: a program sends the media of its history again, and a
        file too many is refused by its name.
        """
        limits = self.threads.limits
        whole = (self.threads.max_files + 1) * limits.max_item_bytes * BASE64_RATIO
        return min(int(whole), MAX_REQUEST_BYTES)

    def read_part(self, part: Any) -> PendingPart:
        """Read a part of a program's message that is no text; errors as for `read_item`."""
        item = read_item(part, access=self.threads.access)
        return PendingPart(item.modality, item=item)

    async def resolve(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages with a reference in place of each media file.

        Raises:
            MediaError: A file is missing, invalid, too large, or not for this model.
            PoisonSample: There are too many files, or a message may have none.
            ObjectError, StoreUnavailable: The store failed.
        """
        if not any(map(has_pending, messages)):
            return list(messages)
        return await self.threads.run(
            lambda library: [self._resolve(message, library) for message in messages]
        )

    async def load(self, references: Sequence[MediaRef]) -> tuple[ProcessedMedia, ...]:
        """Load files as inputs of the model; errors as for `resolve`."""
        return await self.threads.run(lambda library: tuple(map(library.load, references)))

    def _resolve(self, message: ChatMessage, library: MediaLibrary) -> ChatMessage:
        if not has_pending(message):
            return message
        if message.role in (ASSISTANT, SYSTEM):
            raise PoisonSample(f"a message of role {message.role!r} has media; it takes text only")
        parts = [
            self._reference_part(part.item, library) if isinstance(part, PendingPart) else part
            for part in message.parts
        ]
        return replace(message, parts=parts)

    def _reference_part(self, item: MediaItem, library: MediaLibrary) -> ContentPart:
        if (reference := self._by_key.get(item.key)) is None:
            reference = self._by_key[item.key] = self._store(item, library)
        return ContentPart(read_modality(reference), media=reference)

    def _store(self, item: MediaItem, library: MediaLibrary) -> MediaRef:
        data = item.read(self.threads.limits)
        name = sha256(data).digest(), item.modality
        if (reference := self.by_digest.get(name)) is not None:
            return reference
        if len(self.by_digest) >= self.threads.max_files:
            raise MediaError(
                f"the session has its {self.threads.max_files} media files; show it fewer",
                reason="too_many",
            )
        reference = library.add(MediaItem(item.modality, data, item.location))
        self.by_digest[name] = reference
        return reference


def has_pending(message: ChatMessage) -> bool:
    """Return whether a message has media that are not stored."""
    return any(isinstance(part, PendingPart) for part in message.parts)


def read_item(part: Any, *, access: MediaAccess) -> MediaItem:
    """Return the media file of a part; errors as `read_part_item`, also for paths of files."""
    item = read_part_item(part, access=access)
    if not isinstance(item.source, str) or not item.source.startswith((DATA_URI, *WEB)):
        raise PoisonSample(
            f"{item.location} must hold a data URI or a web address, got {str(item.source)[:40]!r}"
        )
    return item


def to_chat_part(reference: MediaRef, content: bytes) -> dict[str, Any]:
    """Return a media file as a part of OpenAI's chat, with its content."""
    data = base64.b64encode(content).decode()
    if (modality := read_modality(reference)) is Modality.AUDIO:
        kind = reference.media_type.partition("/")[2].removeprefix("x-")
        return {"type": AUDIO_PART, AUDIO_PART: {"data": data, "format": kind}}
    uri = f"data:{reference.media_type};base64,{data}"
    name = f"{modality.value}_url"
    return {"type": name, name: {"url": uri}}
