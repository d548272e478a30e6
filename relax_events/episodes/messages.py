"""The rule for when two messages are the same message, and paths of them.

A program sends its whole history with each call. `fingerprint` decides whether the session knows a
message of that history. It ignores changes that programs make without meaning them: the spelling
of JSON arguments and of whole numbers in them, missing against empty content, spaces around the
policy's text, the encoding of a media file, and other fields than role, content, tool calls and
the id of the answered call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import orjson

from relax_events.data.conversations import ASSISTANT
from relax_events.data.messages import SYSTEM, parse_arguments
from relax_events.events.parts import ChatMessage, ToolCall

DIGEST_BYTES = 16
MAX_EXACT_INTEGER = 2**53
"""Below it a float has the value of the integer that it stands for."""


def with_one_system_message(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a conversation whose system messages at its beginning are one, since chat templates
    take one there.
    """
    conversation = list(messages)
    count = next(
        (index for index, message in enumerate(conversation) if message.role != SYSTEM),
        len(conversation),
    )
    if count < 2:
        return conversation
    text = "\n\n".join(message.text for message in conversation[:count])
    return [ChatMessage.of_text(SYSTEM, text), *conversation[count:]]


def fingerprint(message: ChatMessage) -> bytes:
    """Return a digest that two messages share exactly if they count as the same."""
    content: Any = message.text
    if message.role == ASSISTANT:
        content = content.strip()
    elif any(part.media for part in message.parts):
        content = [[one.media.digest.hex()] if one.media else one.text for one in message.parts]
    calls = [[call.name, _sorted_json(call)] for call in message.tool_calls]
    return orjson.dumps([message.role, content, calls, message.tool_call_id])


def path_digests(messages: Sequence[ChatMessage], *, tools: str) -> list[bytes]:
    """Return a digest of each prefix of a conversation: entry i covers the first i messages, and
    the tools.
    """
    shown = orjson.dumps(orjson.loads(tools or "[]"), option=orjson.OPT_SORT_KEYS)
    digest = hashlib.blake2b(shown, digest_size=DIGEST_BYTES).digest()
    digests = [digest]
    for message in messages:
        digest = extend_digest(digest, message)
        digests.append(digest)
    return digests


def extend_digest(digest: bytes, message: ChatMessage) -> bytes:
    """Return the digest of a path with one more message."""
    return hashlib.blake2b(digest + fingerprint(message), digest_size=DIGEST_BYTES).digest()


def _sorted_json(call: ToolCall) -> str:
    """Return a call's arguments as JSON with sorted keys, and 1.0 as 1, as JavaScript writes it;
    text that is no JSON, or nested too deep, stays as it is.
    """
    value = parse_arguments(call)
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return call.arguments
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
