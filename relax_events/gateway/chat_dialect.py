"""The dialect of OpenAI's chat completions: what a program asks, and the answer.

The run's sampling settings hold for every call, since the trainer needs the distribution that the
tokens were sampled from: `temperature`, `top_p`, `top_k` and `seed` of a program are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import orjson
from pydantic import BaseModel, Field, model_validator

from relax_events.events.parts import FinishReason
from relax_events.gateway.graph import Node, path_tokens

NEUTRAL: dict[str, tuple[Any, ...]] = {
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
"""Fields that are not supported, with the values that have no effect."""


class ChatTool(BaseModel):
    """A tool that the program offers."""

    type: str = "function"
    function: dict[str, Any]


class StreamOptions(BaseModel):
    """What a stream has in addition to the message."""

    include_usage: bool = False


class ChatCall(BaseModel):
    """`POST /v1/chat/completions`."""

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[ChatTool] = Field(default_factory=list)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key, values in NEUTRAL.items():
            if key in data and data[key] not in values:
                raise ValueError(f"{key} = {data[key]!r} is not supported here; leave it out")
        return {key: value for key, value in data.items() if value is not None or key == "messages"}

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

    @property
    def tool_list(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them."""
        return [tool.model_dump() for tool in self.tools]


def finish_reason(node: Node) -> str:
    """Return why a turn ended, in OpenAI's words."""
    if node.sample.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if node.reply.get("tool_calls") else "stop"


def usage(node: Node) -> dict[str, int]:
    """Return the token counts of a call."""
    completion = len(node.sample.tokens)
    total = len(path_tokens(node))
    return {
        "prompt_tokens": total - completion,
        "completion_tokens": completion,
        "total_tokens": total,
    }


def whole_answer(node: Node, *, name: str, model: str) -> dict[str, Any]:
    """Return the answer of a call that is not streamed."""
    choice = {
        "index": 0,
        "message": dict(node.reply),
        "finish_reason": finish_reason(node),
        "logprobs": None,
    }
    return _head("chat.completion", name, model) | {"choices": [choice], "usage": usage(node)}


def answer_events(node: Node, *, name: str, model: str, with_usage: bool) -> Iterator[bytes]:
    """Yield the events of a streamed answer: the message in one piece, then the reason for its
    end.
    """
    head = _head("chat.completion.chunk", name, model)

    def event(delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return orjson.dumps(head | {"choices": [choice]})

    yield event({"role": "assistant", "content": ""})
    for key in ("reasoning_content", "content"):
        if node.reply.get(key):
            yield event({key: node.reply[key]})
    if calls := node.reply.get("tool_calls"):
        yield event({"tool_calls": [{"index": index} | call for index, call in enumerate(calls)]})
    yield event({}, finish_reason(node))
    if with_usage:
        yield orjson.dumps(head | {"choices": [], "usage": usage(node)})


def _head(kind: str, name: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": model}
