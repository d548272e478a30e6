"""Messages of the model APIs in one form, and the rule for when two of them are the same message.

A program sends its whole history with each call. `fingerprint` decides whether the session knows a
message of that history. It ignores changes that programs make without meaning them: the spelling
of JSON arguments and of whole numbers in them, missing against empty content, spaces around the
policy's text, the encoding of a media file, and fields other than role, content, tool calls and
the id of the answered call.

A program's media are data URIs or web addresses in parts of messages. `session_media` puts
references in their place: `{"type": "image", "media": MediaRef(...)}`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from relax_events.data.conversations import ASSISTANT
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality

Message = Mapping[str, Any]
DIGEST_BYTES = 16
SYSTEM = "system"
SYSTEM_ROLES = (SYSTEM, "developer")
"""Chat templates know the first of them only."""
MAX_EXACT_INTEGER = 2**53
"""Below it a float has the value of the integer that it stands for."""


def read_content(message: Message) -> list[str | MediaRef]:
    """Return a message's content: texts, with neighbours joined, and media references.

    Raises:
        PoisonSample: A part is neither; the text names its type.
    """
    content = message.get("content")
    if content is None:
        return []
    pieces: list[str | MediaRef] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        piece = _piece(part)
        if isinstance(piece, str) and pieces and isinstance(before := pieces[-1], str):
            pieces[-1] = before + piece
        else:
            pieces.append(piece)
    return pieces


def _piece(part: Any) -> str | MediaRef:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(text := part.get("text"), str):
        return text
    if kind != "text" and isinstance(part, Mapping):
        media = part.get("media")
        if isinstance(media, MediaRef):
            return media
    raise PoisonSample(f"a message has a part of type {kind!r}; this gateway takes text parts only")


def read_text(message: Message) -> str:
    """Return a message's text without its media; errors as for `read_content`."""
    return "".join(piece for piece in read_content(message) if isinstance(piece, str))


def count_text_bytes(value: Any) -> int:
    """Return how many bytes of text messages or tools have: in all fields but media, with names."""
    total, values = 0, [value]
    while values:
        one = values.pop()
        if isinstance(one, str):
            total += len(one.encode("utf-8", "replace"))
        elif isinstance(one, Mapping):
            values += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            values += one
    return total


def list_media(messages: Iterable[Message]) -> list[MediaRef]:
    """Return the media references of messages, in order; errors as for `read_content`."""
    return [
        piece
        for message in messages
        if not isinstance(message.get("content"), str)
        for piece in read_content(message)
        if isinstance(piece, MediaRef)
    ]


def to_chat_message(message: Message) -> ChatMessage:
    """Return a message as events have it; errors as for `read_content`."""
    parts = [
        ContentPart(Modality.TEXT, piece)
        if isinstance(piece, str)
        else ContentPart(_modality(piece), media=piece)
        for piece in read_content(message)
    ]
    return ChatMessage(str(message["role"]), parts or [ContentPart(Modality.TEXT, "")])


def _modality(media: MediaRef) -> Modality:
    return Modality(media.media_type.partition("/")[0])


def joined_parts(parts: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """Return parts as content: text alone in one piece."""
    if all(part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)


def with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose system messages at its beginning are one, since chat templates
    take one there; a developer's message is a system message, which they don't know either.
    """
    conversation = [
        {**message, "role": SYSTEM} if message.get("role") in SYSTEM_ROLES else message
        for message in messages
    ]
    count = next(
        (index for index, message in enumerate(conversation) if message.get("role") != SYSTEM),
        len(conversation),
    )
    if count < 2:
        return conversation
    text = "\n\n".join(read_text(message) for message in conversation[:count])
    return [{"role": SYSTEM, "content": text}, *conversation[count:]]


def fingerprint(message: Message) -> bytes:
    """Return a digest that two messages share exactly if they count as the same."""
    role = str(message.get("role", ""))
    pieces: list[str | MediaRef] = read_content(message)
    text: Any = "".join(one for one in pieces if isinstance(one, str))
    if role == ASSISTANT:
        text = text.strip()
    elif any(isinstance(one, MediaRef) for one in pieces):
        text = [one if isinstance(one, str) else [one.digest.hex()] for one in pieces]
    calls = [
        [call["function"]["name"], _sorted_json(call["function"].get("arguments", ""))]
        for call in message.get("tool_calls") or ()
    ]
    answered = str(message.get("tool_call_id") or "")
    return orjson.dumps([role, text, calls, answered])


def path_digests(messages: Sequence[Message], *, tools: Sequence[Message]) -> list[bytes]:
    """Return a digest of each prefix of a conversation: entry i covers the first i messages, and
    the tools.

    Raises:
        PoisonSample: The tools are nested too deep, or a message has a part that is not supported.
    """
    try:
        shown = orjson.dumps(list(tools), option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise PoisonSample(f"the tools are no JSON that can be shown: {error}") from None
    digest = hashlib.blake2b(shown, digest_size=DIGEST_BYTES).digest()
    digests = [digest]
    for message in messages:
        digest = extend_digest(digest, message)
        digests.append(digest)
    return digests


def extend_digest(digest: bytes, message: Message) -> bytes:
    """Return the digest of a path with one more message."""
    return hashlib.blake2b(digest + fingerprint(message), digest_size=DIGEST_BYTES).digest()


def for_template(message: Message, *, takes_text: bool = False) -> dict[str, Any]:
    """Return a message as chat templates read it: the text in one piece if it has no media, and the
    arguments of tool calls parsed, unless the template takes their text.
    """
    rendered = {key: value for key, value in message.items() if value is not None}
    pieces = read_content(message)
    if all(isinstance(one, str) for one in pieces):
        rendered["content"] = read_text(message)
    else:
        rendered["content"] = [
            {"type": "text", "text": one}
            if isinstance(one, str)
            else {"type": _modality(one).value}
            for one in pieces
        ]
    if (calls := message.get("tool_calls")) and not takes_text:
        rendered["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"])}}
            for call in calls
        ]
    return rendered


def _parsed(function: Message) -> Any:
    arguments = function.get("arguments", "")
    try:
        return orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        return arguments


def _sorted_json(arguments: Any) -> str:
    """Return arguments as JSON with sorted keys, and 1.0 as 1, as JavaScript writes it; text that
    is no JSON, or nested too deep, stays as it is.
    """
    try:
        value = orjson.loads(arguments) if isinstance(arguments, str) else arguments
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, TypeError):
        return str(arguments)
    if b".0" in text:
        text = orjson.dumps(_with_integers(value), option=orjson.OPT_SORT_KEYS)
    return text.decode()


def _with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_integers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_integers(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT_INTEGER:
        return int(value)
    return value
