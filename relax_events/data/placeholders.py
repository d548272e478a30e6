"""Placeholders in a prompt's text, and the media that they stand for: pure functions over
conversations.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.media.items import MediaItem

MARKERS = {Modality.IMAGE: "<image>", Modality.AUDIO: "<audio>", Modality.VIDEO: "<video>"}
"""What stands in a prompt's text for a piece of media."""
MODALITIES = {marker: modality for modality, marker in MARKERS.items()}
ANY_MARKER = re.compile("(" + "|".join(map(re.escape, MODALITIES)) + ")")


def with_places(
    messages: Sequence[ChatMessage], items: Mapping[Modality, Sequence[MediaItem]], *, place: str
) -> tuple[list[ChatMessage], list[MediaItem]]:
    """Part the texts of a prompt at its placeholders.

    Args:
        messages: The prompt.
        items: What the row brings, by modality. A modality that is not named here has no
            placeholders: they are text like any other.
        place: File and row, for errors.
    Returns:
        The messages, in which a part without text and media stands for each piece, and the pieces
        in the order of the prompt.
    Raises:
        ConfigError: There are more or fewer placeholders than pieces.
    """
    parted = [
        replace(message, parts=[piece for part in message.parts for piece in _parted(part, items)])
        for message in messages
    ]
    kinds: list[Modality] = [
        part.kind for message in parted for part in message.parts if part.kind is not Modality.TEXT
    ]
    counts = Counter(kinds)
    for modality, brought in items.items():
        if counts[modality] != len(brought):
            rule = (
                f"the prompt holds {counts[modality]} {MARKERS[modality]} and the row brings "
                f"{len(brought)} of modality {modality.value}"
            )
            raise ConfigError(f"{place}: {rule}; there must be one for each")
    waiting = {modality: deque(brought) for modality, brought in items.items()}
    return parted, [waiting[kind].popleft() for kind in kinds]


def _parted(
    part: ContentPart, items: Mapping[Modality, Sequence[MediaItem]]
) -> Iterable[ContentPart]:
    for piece in ANY_MARKER.split(part.text or ""):
        modality = MODALITIES.get(piece, Modality.TEXT)
        if modality in items:
            yield ContentPart(modality)
        elif piece:
            yield ContentPart(Modality.TEXT, piece)


def with_media(
    messages: Sequence[ChatMessage], references: Sequence[MediaRef]
) -> list[ChatMessage]:
    """Put references into the places that `with_places` left for them."""
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
