"""Read the tool calls of a turn, in the format of Qwen and Hermes models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_events.events.json_text import parse_json

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FORMAT = '{"name": ..., "arguments": {...}} between <tool_call> and </tool_call>'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; with `error`, a call that can't be read."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def read_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls of a turn in order; what is no call has an error for the policy."""
    return [_read(body) for body in CALL.findall(text)]


def _read(body: str) -> ToolCall:
    try:
        call: Any = parse_json(body)
    except ValueError:
        return ToolCall(error=f"the tool call is not JSON; write {FORMAT}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error=f"the tool call has no name; write {FORMAT}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(error=f"the tool call's arguments are no object; write {FORMAT}")
    return ToolCall(call["name"], arguments)
