"""Which messages of a row are the prompt, and which are what is learnt: pure functions over
conversations.
"""

from __future__ import annotations

from typing import Literal

from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage

ASSISTANT = "assistant"
Messages = list[ChatMessage]


def divided(
    conversation: Messages, *, train_on: Literal["all", "last"], place: str
) -> tuple[Messages, Messages]:
    """Cut a conversation before the first assistant message that is learnt.

    Args:
        conversation: Whole.
        train_on: `last` learns the last assistant message alone; what stands before it is prompt.
        place: File, line and column, for errors.
    Returns:
        The prompt, and the completion: from that message to the end, with whatever stands between
            the assistant's messages.
    Raises:
        ConfigError: The conversation does not end with an assistant message, or begins with one.
    """
    checked_completion(conversation[-1:], place=place)
    turns = [index for index, message in enumerate(conversation) if message.role == ASSISTANT]
    first = turns[0] if train_on == "all" else turns[-1]
    if first == 0:
        raise ConfigError(
            f"{place} begins with an assistant message; something must stand before what is learnt"
        )
    return conversation[:first], conversation[first:]


def pair_of(
    prompt: Messages, chosen: Messages, rejected: Messages, *, place: str
) -> tuple[Messages, list[Messages]]:
    """Return the prompt, and the two answers without the messages of the prompt before them.

    Args:
        prompt: Empty where the answers bring it: it is then what both begin with, up to the
            assistant message in which they part.
        chosen: Messages, that may begin with those of the prompt.
        rejected: Likewise.
        place: File and line, for errors.
    Raises:
        ConfigError: There is no prompt, an answer is none, or both are the same.
    """
    shared = prompt or _common_start(chosen, rejected)
    if not shared:
        raise ConfigError(
            f"{place} has no prompt: chosen and rejected begin with nothing that they share; "
            "set data.prompt_key"
        )
    pair = [
        answer[len(shared) :] if answer[: len(shared)] == shared else answer
        for answer in (chosen, rejected)
    ]
    if pair[0] == pair[1]:
        raise ConfigError(
            f"{place} has the same answer as chosen and as rejected; nothing can be learnt from it"
        )
    return shared, [
        checked_completion(answer, place=f"{place}: {name}")
        for name, answer in zip(("chosen", "rejected"), pair, strict=True)
    ]


def checked_completion(completion: Messages, *, place: str) -> Messages:
    """Return messages that begin and end with the assistant's.

    Raises:
        ConfigError: They don't; the text names the roles.
    """
    roles = [message.role for message in completion]
    if not roles or roles[0] != ASSISTANT or roles[-1] != ASSISTANT:
        raise ConfigError(
            f"{place}: what is learnt must begin and end with a message of role 'assistant', "
            f"got {', '.join(map(repr, roles)) or 'none'}"
        )
    return completion


def _common_start(one: Messages, other: Messages) -> Messages:
    """Return what both begin with, up to the assistant message in which they part, or the last one
    where they don't.
    """
    count = 0
    for index, (mine, its) in enumerate(zip(one, other, strict=False)):
        if mine.role == its.role == ASSISTANT:
            count = index
        if mine != its:
            break
    return one[:count]
