"""Messages of the model APIs in one form, and what makes two of them the same message.

A program sends its whole history with each call. Whether a message of that history is one that the
session knows is decided by `fingerprint`, which ignores what programs change without meaning it:
the spelling of JSON arguments, missing against empty content, spaces around the policy's text, and
fields other than role, content, tool calls and the id of the answered call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from relax_events.data.conversations import ASSISTANT
from relax_events.errors import PoisonSample

Message = Mapping[str, Any]
DIGEST_BYTES = 16


def text_of(message: Message) -> str:
    """Return a message's text; parts of text are joined.

    Raises:
        PoisonSample: A part is no text.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise PoisonSample(
                f"a message has a part of type {kind!r}; this gateway takes text parts only"
            )
        texts.append(part["text"])
    return "".join(texts)


def fingerprint(message: Message) -> bytes:
    """Return what two messages share exactly if they count as the same."""
    role, text = str(message.get("role", "")), text_of(message)
    calls = [
        [call["function"]["name"], _sorted_json(call["function"].get("arguments", ""))]
        for call in message.get("tool_calls") or ()
    ]
    answered = str(message.get("tool_call_id") or "")
    return orjson.dumps([role, text.strip() if role == ASSISTANT else text, calls, answered])


def path_digests(messages: Sequence[Message], *, tools: Sequence[Message]) -> list[bytes]:
    """Return a digest of each prefix of a conversation: entry i covers the first i messages, and
    the tools.
    """
    digest = hashlib.blake2b(
        orjson.dumps(list(tools), option=orjson.OPT_SORT_KEYS), digest_size=DIGEST_BYTES
    ).digest()
    digests = [digest]
    for message in messages:
        digest = extend_digest(digest, message)
        digests.append(digest)
    return digests


def extend_digest(digest: bytes, message: Message) -> bytes:
    """Return the digest of a path with one more message."""
    return hashlib.blake2b(digest + fingerprint(message), digest_size=DIGEST_BYTES).digest()


def for_template(message: Message) -> dict[str, Any]:
    """Return a message as chat templates read it: the text in one piece, and the arguments of tool
    calls parsed.
    """
    rendered = {key: value for key, value in message.items() if value is not None}
    rendered["content"] = text_of(message)
    if calls := message.get("tool_calls"):
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
    """Return arguments as JSON with sorted keys; text that is no JSON stays as it is."""
    try:
        value = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        return str(arguments)
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
