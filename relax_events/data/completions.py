"""Split the messages of a row into prompt and completion: pure functions over conversations."""

from __future__ import annotations

from typing import Literal

from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage

ASSISTANT = "assistant"
Messages = list[ChatMessage]


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
        ConfigError: The conversation does not end with an assistant message, or begins with one.
    """
    check_completion(conversation[-1:], location=location)
    turns = [index for index, message in enumerate(conversation) if message.role == ASSISTANT]
    first = turns[0] if train_on == "all" else turns[-1]
    if first == 0:
        raise ConfigError(
            f"{location} begins with an assistant message; the prompt must have at least one "
            "message before it"
        )
    return conversation[:first], conversation[first:]


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
    shared = prompt or _common_prefix(chosen, rejected)
    if not shared:
        raise ConfigError(
            f"{location} has no prompt: chosen and rejected have no common prefix; "
            "set data.prompt_key"
        )
    pair = [
        answer[len(shared) :] if answer[: len(shared)] == shared else answer
        for answer in (chosen, rejected)
    ]
    if pair[0] == pair[1]:
        raise ConfigError(
            f"{location} has the same completion as chosen and rejected; a pair must differ"
        )
    return shared, [
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
    for index, (mine, its) in enumerate(zip(one, other, strict=False)):
        if mine.role == its.role == ASSISTANT:
            count = index
        if mine != its:
            break
    return one[:count]
