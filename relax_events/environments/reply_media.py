"""Fetch, check and store the media of an environment's reply, as they came over the pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_events.data.conversations import insert_media, split_at_placeholders
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage, Modality
from relax_events.media.items import read_items
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia


@dataclass(frozen=True, slots=True)
class ProcessedReply:
    """A reply with its media stored and preprocessed."""

    message: ChatMessage
    media: tuple[ProcessedMedia, ...]


def process_reply(
    reply: Mapping[str, Any], contents: Sequence[bytes], *, library: MediaLibrary, where: str
) -> ProcessedReply:
    """Store and decode the media of a reply.

    Args:
        reply: The header of `encode_reply`.
        contents: Its files.
        library: Stores and loads them.
        where: The environment and its call, for errors.
    Raises:
        PoisonSample: A file is invalid, or files and placeholders don't match.
    """
    files: dict[Modality, list[bytes | str]] = {Modality(name): [] for name in reply["media"]}
    for (name, is_file), content in zip(reply["kinds"], contents, strict=True):
        files[Modality(name)].append(content if is_file else content.decode())
    items = {
        modality: read_items(pieces, modality=modality, location=f"{where}: {modality.value}")
        for modality, pieces in files.items()
    }
    try:
        messages, ordered = split_at_placeholders(
            [ChatMessage.of_text(reply["role"], reply["text"])], items, location=where
        )
    except ConfigError as error:
        raise PoisonSample(str(error)) from None
    references = [library.add(item) for item in ordered]
    media = tuple(library.load(reference) for reference in references)
    return ProcessedReply(insert_media(messages, references)[0], media)
