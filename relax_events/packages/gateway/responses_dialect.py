"""The dialect of OpenAI's responses, `POST /v1/responses`: a program's request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from relax_events.api.drivers import Node, path_messages
from relax_events.api.errors import PoisonSample
from relax_events.api.events import ChatMessage
from relax_events.data.conversations import ASSISTANT
from relax_events.data.messages import SYSTEM, Tool, parse_message
from relax_events.episodes.messages import with_one_system_message
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.dialect import (
    OPENAI_ACCOUNT_FIELDS,
    AnswerHead,
    ModelCall,
    Problem,
    build_tool,
    require_list,
    require_text,
)
from relax_events.packages.gateway.responses_answer import (
    answer_events,
    build_response,
    failed_event,
    response_id,
)
from relax_events.packages.gateway.sampling import CallSampling

SUMMARIES = ("auto", "concise", "detailed", "none")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class ResponsesCall(ModelCall):
    """The body of a call. Answers are kept as long as their session, for any value of `store`, so a
    call may name an answer in `previous_response_id` instead of sending the conversation.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CallSampling.NEUTRAL,
        "background": (False,),
        "reasoning": tuple(
            effort | summary
            for effort in ({}, {"effort": "medium"})
            for summary in ({}, *({"summary": each} for each in SUMMARIES))
        ),
        "text": (
            {"format": {"type": "text"}},
            {"verbosity": "medium"},
            {"format": {"type": "text"}, "verbosity": "medium"},
        ),
        "truncation": ("disabled",),
    }
    IGNORED: ClassVar[frozenset[str]] = OPENAI_ACCOUNT_FIELDS | {
        "client_metadata",  # of Codex
        "include",
        "max_tool_calls",
        "stream_options",
    }

    input: str | list[dict[str, Any]]
    instructions: str = ""
    previous_response_id: str = ""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    max_output_tokens: int | None = Field(default=None, ge=1)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def bound(self) -> int | None:
        """The program's bound on the turn, in tokens."""
        return self.max_output_tokens

    def list_tools(self) -> list[Tool]:
        """Return the tools as chat templates read them; see `ModelCall`."""
        tools = []
        for tool in self.tools:
            if tool.get("type") != "function":
                raise PoisonSample(
                    f"a tool of type {tool.get('type')!r} is not supported here; offer tools of "
                    "type 'function' (in Codex, set web_search = \"disabled\")"
                )
            tools.append(build_tool(tool, schema_field="parameters"))
        return tools

    def history(self, session: ChatSession) -> list[ChatMessage]:
        """Return the instructions, the conversation before, and the input; see `ModelCall`."""
        spoken = self._without_instructions(session)
        if self.instructions:
            spoken = [ChatMessage.of_text(SYSTEM, self.instructions), *spoken]
        return with_one_system_message(spoken)

    def record(self, session: ChatSession, node: Node, head: AnswerHead) -> None:
        """Keep the conversation, for a call that names this answer: as the graph has it, which
        has references in place of media.
        """
        spoken, whole = self._without_instructions(session), path_messages(node)
        first = next(
            (at for at, message in enumerate(spoken) if message.role != SYSTEM),
            len(spoken),
        )
        graph_messages = whole[len(whole) - 1 - (len(spoken) - first) :]
        session.answers[response_id(head)] = [*spoken[:first], *graph_messages]

    def answer(self, node: Node, head: AnswerHead) -> dict[str, Any]:
        """Return the answer of a call that is not streamed."""
        return build_response(node, head, request_fields=self._request_fields())

    def events(self, node: Node, head: AnswerHead) -> Iterator[bytes]:
        """Yield the events of a streamed answer."""
        return answer_events(node, head, request_fields=self._request_fields())

    def failure_event(self, problem: Problem, head: AnswerHead) -> bytes:
        """Return a failed response."""
        return failed_event(problem, head, request_fields=self._request_fields())

    def _request_fields(self) -> dict[str, Any]:
        """Return the fields of the call that an answer repeats."""
        return {
            "instructions": self.instructions or None,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id or None,
            "tool_choice": self.tool_choice,
            "tools": self.tools,
        }

    def _without_instructions(self, session: ChatSession) -> list[ChatMessage]:
        before: Sequence[ChatMessage] = ()
        if self.previous_response_id:
            earlier_messages = session.answers.get(self.previous_response_id)
            if earlier_messages is None:
                raise PoisonSample(
                    f"previous_response_id = {self.previous_response_id!r} is no answer of this "
                    "session"
                )
            before = earlier_messages
        if isinstance(self.input, str):
            return [*before, ChatMessage.of_text("user", self.input)]
        read_part = session.read_part
        return [
            *before,
            *(parse_message(one, read_part=read_part) for one in _messages(self.input)),
        ]


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return input items as messages in the form of OpenAI's chat: reasoning, text and calls of one
    turn are one message.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": require_text(item, "call_id", "a function_call_output"),
                    "content": _content(item.get("output") or ""),
                }
            )
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            if text := "".join(_part_text(part) for part in parts):
                _turn(messages, "reasoning_content")["reasoning_content"] = text
        elif kind == "function_call":
            _turn(messages, "").setdefault("tool_calls", []).append(_tool_call(item))
        elif kind != "message":
            raise PoisonSample(f"the input has an item of type {kind!r}, which is not supported")
        elif (role := require_text(item, "role", "a message")) == ASSISTANT:
            _turn(messages, "content")["content"] = _content(item.get("content") or "")
        else:
            messages.append({"role": role, "content": _content(item.get("content") or "")})
    return messages


def _turn(messages: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Return the assistant's message that an item belongs to: the last message, unless that has a
    part already that follows the item in a turn.
    """
    order = ("reasoning_content", "content", "tool_calls")
    later = order[order.index(key) :] if key else ()
    if (
        not messages
        or messages[-1]["role"] != ASSISTANT
        or any(one in messages[-1] for one in later)
    ):
        messages.append({"role": ASSISTANT})
    return messages[-1]


def _tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    name = require_text(item, "name", "a function_call")
    arguments = require_text(item, "arguments", "a function_call")
    return {
        "id": require_text(item, "call_id", "a function_call"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _content(content: Any) -> Any:
    """Return text and images in the form of OpenAI's chat."""
    if isinstance(content, str):
        return content
    return [_part(part) for part in require_list(content, "an item's content")]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") in TEXT_PARTS:
        return {"type": "text", "text": _part_text(part)}
    if part.get("type") == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if part.get("type") == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    return {"type": part.get("type")}


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        raise PoisonSample("a part of an item must be an object")
    return require_text(part, "text", f"a part of type {part.get('type')!r}")
