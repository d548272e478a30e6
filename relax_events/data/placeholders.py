"""Match the placeholders in a prompt's text with its media: pure functions over conversations."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.media.items import MediaItem

PLACEHOLDERS = {Modality.IMAGE: "<image>", Modality.AUDIO: "<audio>", Modality.VIDEO: "<video>"}
"""The placeholder of each modality in a prompt's text."""
MODALITIES = {marker: modality for modality, marker in PLACEHOLDERS.items()}
ANY_PLACEHOLDER = re.compile("(" + "|".join(map(re.escape, MODALITIES)) + ")")


def split_at_placeholders(
    messages: Sequence[ChatMessage], items: Mapping[Modality, Sequence[MediaItem]], *, location: str
) -> tuple[list[ChatMessage], list[MediaItem]]:
    """Split the texts of a prompt at its placeholders.

    Args:
        messages: The prompt.
        items: The row's media by modality. Placeholders of a modality that is not a key stay
            ordinary text.
        location: File and row, for errors.
    Returns:
        The messages, with an empty part for each media item, and the items in the order of the
        prompt.
    Raises:
        ConfigError: The numbers of placeholders and media items differ.
    """
    parted = [
        replace(
            message, parts=[piece for part in message.parts for piece in _split_part(part, items)]
        )
        for message in messages
    ]
    kinds: list[Modality] = [
        part.kind for message in parted for part in message.parts if part.kind is not Modality.TEXT
    ]
    counts = Counter(kinds)
    for modality, brought in items.items():
        if counts[modality] != len(brought):
            rule = (
                f"the prompt has {counts[modality]} {PLACEHOLDERS[modality]} and the row has "
                f"{len(brought)} of modality {modality.value}"
            )
            raise ConfigError(f"{location}: {rule}; there must be one placeholder for each")
    waiting = {modality: deque(brought) for modality, brought in items.items()}
    return parted, [waiting[kind].popleft() for kind in kinds]


def _split_part(
    part: ContentPart, items: Mapping[Modality, Sequence[MediaItem]]
) -> Iterable[ContentPart]:
    for piece in ANY_PLACEHOLDER.split(part.text or ""):
        modality = MODALITIES.get(piece, Modality.TEXT)
        if modality in items:
            yield ContentPart(modality)
        elif piece:
            yield ContentPart(Modality.TEXT, piece)


def insert_media(
    messages: Sequence[ChatMessage], references: Sequence[MediaRef]
) -> list[ChatMessage]:
    """Put media references into the empty parts that `split_at_placeholders` made."""
    waiting = iter(references)
    return [
        replace(
            message,
            parts=[
                part if part.kind is Modality.TEXT else replace(part, media=next(waiting))
                for part in message.parts
            ],
        )
        for message in messages
    ]
