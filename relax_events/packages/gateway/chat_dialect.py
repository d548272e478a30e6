"""The dialect of OpenAI's chat completions, `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from relax_events.api.drivers import Node
from relax_events.api.events import ChatMessage
from relax_events.data.conversations import ASSISTANT
from relax_events.data.messages import Tool, parse_message, print_message, refuse_unknown_fields
from relax_events.episodes.messages import with_one_system_message
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.dialect import (
    OPENAI_ACCOUNT_FIELDS,
    AnswerHead,
    ModelCall,
    Problem,
    count_tokens,
    data_event,
    is_cut_off,
)
from relax_events.packages.gateway.sampling import CallSampling

END = b"data: [DONE]\n\n"


class ChatTool(BaseModel):
    """A tool that the program offers."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: dict[str, Any]


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class ChatCall(ModelCall):
    """The body of a call."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CallSampling.NEUTRAL,
        "function_call": ("auto", "none"),
        "modalities": (["text"],),
        "reasoning_effort": ("medium",),
        "response_format": ({"type": "text"},),
        "verbosity": ("medium",),
    }
    IGNORED: ClassVar[frozenset[str]] = OPENAI_ACCOUNT_FIELDS | {"prediction"}

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[ChatTool] = Field(default_factory=list)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream_options: StreamOptions | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _last_message_decides(self) -> Self:
        """Refuse fields of vLLM that contradict the last message: an assistant's is continued."""
        begins_turn = self.messages[-1].get("role") == ASSISTANT
        for field, value in (
            ("continue_final_message", begins_turn),
            ("add_generation_prompt", not begins_turn),
        ):
            if getattr(self, field) not in (None, value):
                raise ValueError(
                    f"{field} = {not value} contradicts the role of the last message; leave it out"
                )
        return self

    @property
    def bound(self) -> int | None:
        """The program's bound on the turn, in tokens."""
        return self.max_completion_tokens or self.max_tokens

    def list_tools(self) -> list[Tool]:
        """Return the tools, which have the form of chat templates."""
        return [tool.model_dump() for tool in self.tools]

    def history(self, session: ChatSession) -> list[ChatMessage]:
        """Return the messages; the program sends all of them with each call; see `ModelCall`."""
        messages = []
        for number, message in enumerate(self.messages):
            what = f"message {number}"
            refuse_unknown_fields(message, what=what)
            messages.append(parse_message(message, what=what, read_part=session.read_part))
        return with_one_system_message(messages)

    def answer(self, node: Node, head: AnswerHead) -> dict[str, Any]:
        """Return the answer of a call that is not streamed."""
        choice = {
            "index": 0,
            "message": _print_reply(node.reply),
            "finish_reason": finish_reason(node),
            "logprobs": None,
        }
        return _head("chat.completion", head) | {"choices": [choice], "usage": usage(node)}

    def events(self, node: Node, head: AnswerHead) -> Iterator[bytes]:
        """Yield the chunks: the message in one piece, then the reason for its end."""
        chunk = _head("chat.completion.chunk", head)

        def event(delta: dict[str, Any], reason: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
            return data_event(chunk | {"choices": [choice]})

        yield event({"role": "assistant", "content": ""})
        reply = print_message(node.reply)
        for key in ("reasoning_content", "content"):
            if reply.get(key):
                yield event({key: reply[key]})
        if calls := reply.get("tool_calls"):
            yield event(
                {"tool_calls": [{"index": index} | call for index, call in enumerate(calls)]}
            )
        yield event({}, finish_reason(node))
        if self.stream_options is not None and self.stream_options.include_usage:
            yield data_event(chunk | {"choices": [], "usage": usage(node)})
        yield END

    def failure_event(self, problem: Problem, head: AnswerHead) -> bytes:
        """Return the error, at which the client stops to read."""
        return data_event(openai_error(problem))


def openai_error(problem: Problem) -> dict[str, Any]:
    """Return an error in the format of both dialects of OpenAI."""
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"error": {"message": problem.text, "type": kind, "code": problem.code, "param": None}}


def _print_reply(reply: ChatMessage) -> dict[str, Any]:
    """Return a turn; one that only calls tools has null as its content."""
    printed = print_message(reply)
    return printed | {"content": None} if reply.tool_calls and not reply.text else printed


def finish_reason(node: Node) -> str:
    """Return why a turn ended, in OpenAI's words."""
    if is_cut_off(node):
        return "length"
    return "tool_calls" if node.reply.tool_calls else "stop"


def usage(node: Node) -> dict[str, int]:
    """Return the token counts of a call."""
    prompt, completion = count_tokens(node)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _head(kind: str, head: AnswerHead) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{head.name}",
        "object": kind,
        "created": head.created,
        "model": head.model,
    }
