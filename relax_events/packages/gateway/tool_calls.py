"""Read tool calls and reasoning out of the policy's text.

A call that can't be read stays in the text, as the policy wrote it; the reason is counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from relax_events.api.events import format_json
from relax_events.data.tool_formats import Call, MalformedCall, NoCall, ToolFormat, index_schemas

THINKING = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
UNCLOSED = "unclosed"


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


def parse_reply(text: str, *, style: ToolFormat, tools: str = "") -> ParsedReply:
    """Split a turn.

    Args:
        text: The turn without its stop token.
        style: The format of tool calls.
        tools: JSON list of the tools that the program offers; empty if there are none.
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
        try:
            calls.extend([_written(call) for call in style.read(match.group(1), schemas)])
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


def _written(call: Call) -> tuple[str, str]:
    name, arguments = call
    try:
        return name, format_json(arguments)
    except ValueError:
        raise MalformedCall("nested_too_deep") from None
