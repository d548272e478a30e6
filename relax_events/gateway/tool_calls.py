"""Read tool calls and reasoning out of the policy's text, in the format of Qwen and Hermes models:

<think>...</think> text <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

THINKING = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A turn of the policy, as its text says.

    Attributes:
        content: The text outside of reasoning and tool calls.
        reasoning: The text between the think tags.
        calls: Name and arguments, the text of a JSON object, of each well-formed tool call.
    """

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


def parse_reply(text: str) -> ParsedReply:
    """Split a turn; a malformed tool call stays in the content, as the policy wrote it."""
    reasoning = ""
    if found := THINKING.match(text):
        reasoning, text = found.group(1).strip(), text[found.end() :]
    calls: list[tuple[str, str]] = []

    def take(match: re.Match[str]) -> str:
        call = _parse_call(match.group(1))
        if call is None:
            return match.group(0)
        calls.append(call)
        return ""

    content = CALL.sub(take, text)
    return ParsedReply(content.strip() if calls else content, reasoning, tuple(calls))


def _parse_call(text: str) -> tuple[str, str] | None:
    try:
        call: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    if not isinstance(arguments := call.get("arguments", {}), dict):
        return None
    try:
        return call["name"], orjson.dumps(arguments).decode()
    except TypeError:  # nested too deep to be written again
        return None
