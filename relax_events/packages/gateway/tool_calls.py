"""Read tool calls and reasoning out of the policy's text.

A call that can't be read stays in the text, as the policy wrote it; the reason is counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from relax_events.api.events import format_json, require_depth
from relax_events.data.tool_formats import (
    Call,
    MalformedCall,
    NoCall,
    Schemas,
    ToolFormat,
    index_schemas,
    require_arguments,
)

THINKING = re.compile(r"\A\s*+(?:<think>)?+(.*?)</think>\s*", re.DOTALL)
UNCLOSED, TOO_MANY = "unclosed", "too_many_calls"
MAX_DEPTH = 200
"""Levels of arguments; what prints answers and prompts ends at 254."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A turn of the policy in parts.

    Attributes:
        content: The text outside of reasoning and tool calls.
        reasoning: The text between the think tags.
        calls: Name and arguments, the text of a JSON object, of each well-formed tool call.
        malformed: Why a tool call could not be read, in one word for each such call.
    """

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    malformed: tuple[str, ...] = ()


def parse_reply(
    text: str, *, style: ToolFormat, tools: str = "", max_calls: int | None = None
) -> ParsedReply:
    """Split a turn.

    Args:
        text: The turn without its stop token.
        style: The format of tool calls.
        tools: JSON list of the tools that the program offers; empty if there are none.
        max_calls: How many calls the program takes; None for any number.
    """
    reasoning = ""
    if thinking := THINKING.match(text):
        reasoning, text = thinking.group(1).strip(), text[thinking.end() :]
    schemas = index_schemas(tools)
    calls: list[tuple[str, str]] = []
    malformed: list[str] = []
    num_left = 0

    def take(match: re.Match[str]) -> str:
        nonlocal num_left
        if match.group(1) is None:
            return match.group(0)
        try:
            read = style.read(match.group(1), schemas)
            written = [_write_call(call, schemas) for call in read]
            _require_room(len(calls) + len(written), max_calls)
            calls.extend(written)
        except NoCall:
            return match.group(0)
        except MalformedCall as error:
            malformed.append(str(error))
            num_left += sum(match.group(0).count(opener) for opener in style.openers)
            return match.group(0)
        return ""

    content = style.blocks.sub(take, text)
    if sum(content.count(opener) for opener in style.openers) > num_left:
        malformed.append(UNCLOSED)
    for wrapper in style.wrappers if calls else ():
        content = content.replace(wrapper, "")
    return ParsedReply(
        content.strip() if calls else content, reasoning, tuple(calls), tuple(malformed)
    )


def _write_call(call: Call, schemas: Schemas) -> tuple[str, str]:
    """Return a call with its arguments as JSON text.

    Raises:
        MalformedCall: A required argument is missing, or the text can't be shown to a program.
    """
    require_arguments(call, schemas)
    name, arguments = call
    try:
        require_depth(arguments, max_levels=MAX_DEPTH)
    except ValueError:
        raise MalformedCall("nested_too_deep") from None
    try:
        text = format_json(arguments)
        (name + text).encode()
    except UnicodeEncodeError:
        raise MalformedCall("lone_surrogate") from None
    except ValueError:
        raise MalformedCall("infinite_number") from None
    return name, text


def _require_room(num_calls: int, max_calls: int | None) -> None:
    if max_calls is not None and num_calls > max_calls:
        raise MalformedCall(TOO_MANY)
