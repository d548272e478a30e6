"""Refuse rows with a field that the chat template leaves out: the policy would not see it.

Whether a template shows a field at all is tried once, by a conversation with a mark in that field.
Where it shows it is the model's convention: many leave out the thoughts of earlier turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

from relax_events.errors import PoisonSample
from relax_events.events.json_text import format_json
from relax_events.events.parts import ChatMessage, ToolCall

TOOLS, TOOL_CALLS, THOUGHTS = "tools", "tool_calls", "thoughts (reasoning_content)"
NAMES = "names of role "
MARK, ID = "zqxmark", "abcdefghi"
"""Some templates want ids of nine characters."""
Render = Callable[[Sequence[ChatMessage], str], str]
QUESTION = ChatMessage.of_text("user", "a")
ANSWER = ChatMessage.of_text("assistant", "b")
CALL = ChatMessage("assistant", tool_calls=[ToolCall("f", "{}", ID)])
REPLY = replace(ChatMessage.of_text("tool", "c"), tool_call_id=ID)


def _build_probes(field: str) -> list[tuple[list[ChatMessage], str]]:
    """Build conversations with their tools; one shows the mark if the template shows the field."""
    if field == TOOLS:
        return [([QUESTION], _offer_tool(MARK))]
    if field == TOOL_CALLS:
        call = replace(CALL, tool_calls=[ToolCall(MARK, "{}", ID)])
        return [([QUESTION, call, REPLY], tools) for tools in ("", _offer_tool("f"))]
    if field == THOUGHTS:
        return [([QUESTION, replace(one, reasoning=MARK)], "") for one in (ANSWER, CALL)]
    role = field.removeprefix(NAMES)
    if role == "tool":
        return [([QUESTION, CALL, replace(REPLY, name=MARK)], "")]
    message = replace(QUESTION, role=role, name=MARK)
    return [([message, QUESTION] if role == "system" else [QUESTION, ANSWER, message], "")]


def _offer_tool(name: str) -> str:
    parameters = {"type": "object", "properties": {}}
    function = {"name": name, "description": "d", "parameters": parameters}
    return format_json([{"type": "function", "function": function}])


class ShownFields:
    """The fields of messages that a chat template shows."""

    def __init__(self, render: Render) -> None:
        """Try nothing yet.

        Args:
            render: Renders a conversation with its tools; raises PoisonSample.
        """
        self._render = render
        self._is_shown = cache(self._try)

    def require(self, messages: Sequence[ChatMessage], *, tools: str) -> None:
        """Refuse a conversation with a field that is not shown.

        Raises:
            PoisonSample: There is one; the text names it.
        """
        fields = dict.fromkeys([*([TOOLS] if tools else ()), *_list_fields(messages)])
        for field in fields:
            if not self._is_shown(field):
                raise PoisonSample(
                    f"the chat template does not show {field}; leave them out of the rows, or set "
                    "data.chat_template_file to a template that shows them"
                )

    def _try(self, field: str) -> bool:
        for messages, tools in _build_probes(field):
            try:
                if MARK in self._render(messages, tools):
                    return True
            except PoisonSample:  # the template refuses such a conversation, and so the row
                return True
        return False


def _list_fields(messages: Iterable[ChatMessage]) -> Iterable[str]:
    """Yield the fields of messages that a template may leave out."""
    called: set[str] = set()
    for message in messages:
        called.update(call.name for call in message.tool_calls)
        if message.tool_calls:
            yield TOOL_CALLS
        if message.reasoning:
            yield THOUGHTS
        if message.name and message.name not in called:  # a call shows the name of its tool
            yield f"{NAMES}{message.role}"
