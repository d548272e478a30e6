"""Match the placeholders in a prompt's text with its media, and split the messages of a row into
prompt and completion. All functions are pure.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Literal

from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.media.items import MediaItem, PendingPart

PLACEHOLDERS = {Modality.IMAGE: "<image>", Modality.AUDIO: "<audio>", Modality.VIDEO: "<video>"}
"""The placeholder of each modality in a prompt's text."""


def split_at_placeholders(
    messages: Sequence[ChatMessage], items: Mapping[Modality, Sequence[MediaItem]], *, location: str
) -> tuple[list[ChatMessage], list[MediaItem]]:
    """Split the texts of a prompt at its placeholders.

    Args:
        messages: The prompt.
        items: The media of the row's columns, by modality. Placeholders of a modality that is not a
            key, or that the prompt has as parts, stay ordinary text.
        location: File and row, for errors.
    Returns:
        The messages, with an empty part for each media item, and the items in the order of the
        prompt.
    Raises:
        ConfigError: The numbers of placeholders and media items differ.
    """
    in_parts = {part.kind for message in messages for part in message.parts}
    if not items and in_parts <= {Modality.TEXT}:
        return list(messages), []
    marked = items.keys() - in_parts
    pieces = [[list(_split_part(part, marked)) for part in one.parts] for one in messages]
    places = [part for parts in pieces for split in parts for part in split if _is_media(part)]
    counts = Counter(part.kind for part in places if not isinstance(part, PendingPart))
    for modality, files in items.items():
        if counts[modality] != len(files):
            raise ConfigError(
                f"{location}: the prompt has {counts[modality]} {PLACEHOLDERS[modality]} and the "
                f"row has {len(files)} of modality {modality.value}; there must be one placeholder "
                "for each"
            )
    remaining = {modality: deque(files) for modality, files in items.items()}
    media = [
        part.item if isinstance(part, PendingPart) else remaining[part.kind].popleft()
        for part in places
    ]
    split_messages = [
        replace(message, parts=[_without_item(part) for split in parts for part in split])
        for message, parts in zip(messages, pieces, strict=True)
    ]
    return split_messages, media


def _is_media(part: ContentPart) -> bool:
    return part.kind is not Modality.TEXT


def _without_item(part: ContentPart) -> ContentPart:
    return ContentPart(part.kind) if isinstance(part, PendingPart) else part


def _split_part(part: ContentPart, marked: Set[Modality]) -> Iterable[ContentPart]:
    if _is_media(part) or not marked:
        yield part
        return
    marks = {PLACEHOLDERS[modality]: modality for modality in marked}
    for piece in re.split(f"({'|'.join(marks)})", part.text or ""):
        if piece in marks:
            yield ContentPart(marks[piece])
        elif piece:
            yield ContentPart(Modality.TEXT, piece)


def insert_media(
    messages: Sequence[ChatMessage], references: Sequence[MediaRef]
) -> list[ChatMessage]:
    """Put media references into the empty parts that `split_at_placeholders` made."""
    remaining = iter(references)
    return [
        replace(
            message,
            parts=[
                part if part.kind is Modality.TEXT else replace(part, media=next(remaining))
                for part in message.parts
            ],
        )
        for message in messages
    ]


ASSISTANT = "assistant"
Messages = list[ChatMessage]


def begins_turn(conversation: Sequence[ChatMessage]) -> bool:
    """Return whether a conversation ends with an assistant's message, whose text is continued."""
    return bool(conversation) and conversation[-1].role == ASSISTANT


def split_conversation(
    conversation: Messages, *, train_on: Literal["all", "last"], location: str
) -> tuple[Messages, Messages]:
    """Split a conversation before the first assistant message that is trained on.

    Args:
        conversation: The whole conversation.
        train_on: `last` trains on the last assistant message only; all messages before it are the
            prompt.
        location: File, line and column, for errors.
    Returns:
        The prompt, and the completion: all messages from that one to the end, other roles included.
    Raises:
        ConfigError: The conversation does not end with an assistant message, or begins with one, or
            the one that is trained on follows another.
    """
    check_completion(conversation[-1:], location=location)
    turns = [index for index, message in enumerate(conversation) if message.role == ASSISTANT]
    first = turns[0] if train_on == "all" else turns[-1]
    if first == 0:
        raise ConfigError(
            f"{location} begins with an assistant message; the prompt must have at least one "
            "message before it"
        )
    _refuse_begun_turn(conversation[:first], location=location)
    return conversation[:first], conversation[first:]


def _refuse_begun_turn(prompt: Messages, *, location: str) -> None:
    """Refuse a prompt that ends in the middle of a conversation with an assistant's message: the
    next message would continue its text.
    """
    if begins_turn(prompt):
        raise ConfigError(
            f"{location} has two assistant messages in a row, {len(prompt)} and "
            f"{len(prompt) + 1}; join them into one"
        )


def split_preference_pair(
    prompt: Messages, chosen: Messages, rejected: Messages, *, location: str
) -> tuple[Messages, list[Messages]]:
    """Split a preference pair into the prompt and the two completions.

    Args:
        prompt: Empty if both conversations contain it: then it is their common prefix, up to the
            assistant message in which they differ.
        chosen: Messages of the chosen completion; they may begin with the prompt's messages.
        rejected: The same for the rejected completion.
        location: File and line, for errors.
    Raises:
        ConfigError: There is no prompt, a completion is invalid, or both are equal.
    """
    prefix = prompt or _common_prefix(chosen, rejected)
    if not prompt:
        _refuse_begun_turn(prefix, location=location)
    if not prefix:
        raise ConfigError(
            f"{location} has no prompt: chosen and rejected have no common prefix; "
            "set data.prompt_key"
        )
    pair = [
        answer[len(prefix) :] if answer[: len(prefix)] == prefix else answer
        for answer in (chosen, rejected)
    ]
    if pair[0] == pair[1]:
        raise ConfigError(
            f"{location} has the same completion as chosen and rejected; a pair must differ"
        )
    return prefix, [
        check_completion(answer, location=f"{location}: {name}")
        for name, answer in zip(("chosen", "rejected"), pair, strict=True)
    ]


def check_completion(completion: Messages, *, location: str) -> Messages:
    """Check that messages begin and end with the assistant's, and return them.

    Raises:
        ConfigError: They don't; the text names the roles.
    """
    roles = [message.role for message in completion]
    if not roles or roles[0] != ASSISTANT or roles[-1] != ASSISTANT:
        raise ConfigError(
            f"{location}: a completion must begin and end with a message of role 'assistant', "
            f"got {', '.join(map(repr, roles)) or 'none'}"
        )
    return completion


def _common_prefix(one: Messages, other: Messages) -> Messages:
    """Return the common prefix, up to the assistant message in which both differ, or the last one
    if they don't.
    """
    count = 0
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left.role == right.role == ASSISTANT:
            count = index
        if left != right:
            break
    return one[:count]
