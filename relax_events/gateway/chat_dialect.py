"""The dialect of OpenAI's chat completions, `POST /v1/chat/completions`; messages have its form
everywhere in the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from relax_events.gateway.dialect import (
    AnswerHead,
    ModelCall,
    Problem,
    count_tokens,
    data_event,
    is_cut_off,
)
from relax_events.gateway.graph import Node
from relax_events.gateway.messages import Message, with_one_system_message
from relax_events.gateway.session import Session

END = b"data: [DONE]\n\n"


class ChatTool(BaseModel):
    """A tool that the program offers."""

    type: str = "function"
    function: dict[str, Any]


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class ChatCall(ModelCall):
    """The body of a call."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "n": (1, None),
        "stop": (None, [], ""),
        "logprobs": (False, None),
        "top_logprobs": (0, None),
        "logit_bias": (None, {}),
        "presence_penalty": (0, None),
        "frequency_penalty": (0, None),
        "functions": (None, []),
        "response_format": (None, {"type": "text"}),
        "tool_choice": (None, "auto", "none"),
        "modalities": (None, ["text"]),
    }

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[ChatTool] = Field(default_factory=list)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _messages_have_roles(self) -> ChatCall:
        for number, message in enumerate(self.messages):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {number} has no role")  # noqa: TRY004 pydantic's
            for call in message.get("tool_calls") or ():
                function = call.get("function") if isinstance(call, dict) else None
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    raise ValueError(  # noqa: TRY004 pydantic's
                        f"message {number} has a tool call without a function's name"
                    )
        return self

    @property
    def bound(self) -> int | None:
        """The program's bound on the turn, in tokens."""
        return self.max_completion_tokens or self.max_tokens

    def tool_list(self) -> list[Message]:
        """Return the tools, which have the form of chat templates."""
        return [tool.model_dump() for tool in self.tools]

    def history(self, session: Session) -> list[Message]:
        """Return the messages; the program sends all of them with each call."""
        return with_one_system_message(self.messages)

    def answer(self, node: Node, head: AnswerHead) -> dict[str, Any]:
        """Return the answer of a call that is not streamed."""
        choice = {
            "index": 0,
            "message": dict(node.reply),
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
        for key in ("reasoning_content", "content"):
            if node.reply.get(key):
                yield event({key: node.reply[key]})
        if calls := node.reply.get("tool_calls"):
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


def finish_reason(node: Node) -> str:
    """Return why a turn ended, in OpenAI's words."""
    if is_cut_off(node):
        return "length"
    return "tool_calls" if node.reply.get("tool_calls") else "stop"


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
