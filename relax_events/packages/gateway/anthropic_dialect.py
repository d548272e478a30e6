"""The dialect of Anthropic's messages, `POST /v1/messages`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from relax_events.api.drivers import Limit, Node
from relax_events.api.errors import PoisonSample
from relax_events.api.events import ChatMessage, format_json
from relax_events.data.conversations import ASSISTANT
from relax_events.data.messages import (
    Tool,
    parse_arguments,
    parse_message,
    refuse_unknown_fields,
    write_json,
)
from relax_events.episodes.messages import with_one_system_message
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.dialect import (
    AnswerHead,
    ModelCall,
    Problem,
    ThreadRefused,
    build_tool,
    count_tokens,
    is_cut_off,
    named_event,
    require_list,
    require_text,
)
from relax_events.packages.gateway.sampling import CallSampling

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""By status; below 500 others are `invalid_request_error`, from there on `api_error`."""
Item = dict[str, Any]
KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}
"""Of `context_management`, which coding agents send: it edits nothing."""
ROLES = ("user", "assistant", "system")


class AnthropicPrompt(ModelCall):
    """The part of a call that becomes the prompt; alone it is counted."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CallSampling.NEUTRAL,
        "context_management": ({"edits": []}, {"edits": [KEEP_THOUGHTS]}),
        "output_config": tuple({"effort": each} for each in ("medium", "high", "xhigh")),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "betas",
            "billing_policy",
            "cache_control",
            "diagnostics",
            "fallback_credit_token",
            "fallbacks",
            "inference_geo",
            "max_tokens",
            "metadata",
            "service_tier",
            "speed",
            "thinking",
            "user_profile_id",
            "workspace_id",
        }
    )

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    thread: dict[str, Any] = Field(default_factory=dict)

    @field_validator("messages")
    @classmethod
    def _roles_are_known(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, message in enumerate(messages):
            if message.get("role") not in ROLES:
                raise ValueError(
                    f"message {number} has the role {message.get('role')!r}; use one of {ROLES}"
                )
        return messages

    @property
    def bound(self) -> int | None:
        """A count samples nothing."""
        return None

    def list_tools(self) -> list[Tool]:
        """Return the tools as chat templates read them; see `ModelCall`."""
        tools = []
        for tool in self.tools:
            if (kind := tool.get("type", "custom")) not in ("custom", None):
                raise PoisonSample(
                    f"a tool of type {kind!r} runs at Anthropic; offer tools with an input_schema"
                )
            tools.append(build_tool(tool, schema_field="input_schema"))
        return tools

    def history(self, session: ChatSession) -> list[ChatMessage]:
        """Return the conversation: a result of a tool is a message of its own; see `ModelCall`."""
        if self.thread:
            raise ThreadRefused("thread is not supported here; send all messages with each call")
        messages: list[Item] = []
        if self.system:
            messages.append({"role": "system", "content": _content(self.system)})
        for number, message in enumerate(self.messages):
            refuse_unknown_fields(message, what=f"message {number}")
            content = message.get("content", "")
            if message["role"] == ASSISTANT:
                messages.append(_assistant_message(content))
            elif message["role"] == "system" or isinstance(content, str):
                messages.append({"role": message["role"], "content": _content(content)})
            else:
                messages += _user_messages(require_list(content, "a message's content"))
        read_part = session.read_part
        return with_one_system_message(
            [parse_message(one, read_part=read_part) for one in messages]
        )

    def answer(self, node: Node, head: AnswerHead) -> dict[str, Any]:
        """Return the answer of a call that is not streamed."""
        num_read, num_sampled = count_tokens(node)
        return {
            "id": f"msg_{head.name}",
            "type": "message",
            "role": ASSISTANT,
            "model": head.model,
            "content": list(_blocks(node.reply)),
            "stop_reason": stop_reason(node),
            "stop_sequence": None,
            "usage": {
                "input_tokens": num_read,
                "output_tokens": num_sampled,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    def events(self, node: Node, head: AnswerHead) -> Iterator[bytes]:
        """Yield the events: each block in one piece."""
        whole = self.answer(node, head)
        start = whole | {"content": [], "stop_reason": None}
        start["usage"] = whole["usage"] | {"output_tokens": 0}
        yield _event("message_start", message=start)
        for index, block in enumerate(whole["content"]):
            empty, delta = _block_start(block), _block_delta(block)
            yield _event("content_block_start", index=index, content_block=empty)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=end, usage=whole["usage"])
        yield _event("message_stop")

    def failure_event(self, problem: Problem, head: AnswerHead) -> bytes:
        """Return the error, which the client raises."""
        return named_event("error", anthropic_error(problem))


class AnthropicCall(AnthropicPrompt):
    """The body of a call."""

    max_tokens: int = Field(ge=1)

    @property
    def bound(self) -> int | None:
        """The program's bound on the turn, in tokens."""
        return self.max_tokens


def anthropic_error(problem: Problem) -> dict[str, Any]:
    """Return an error in Anthropic's format. A full context is named as its programs look for it,
    which then shorten their history.
    """
    text = problem.text
    if problem.code == Limit.CONTEXT.value:
        text = f"prompt is too long: {text}"
    usual = "invalid_request_error" if problem.status < 500 else "api_error"
    kind = ERROR_TYPES.get(problem.status, usual)
    error = {"type": kind, "message": text, "code": problem.code}
    return {"type": "error", "error": error | {"details": {"error_code": problem.code}}}


def stop_reason(node: Node) -> str:
    """Return why a turn ended, in Anthropic's words."""
    if is_cut_off(node):
        return "max_tokens"
    return "tool_use" if node.reply.tool_calls else "end_turn"


def _blocks(reply: ChatMessage) -> Iterator[Item]:
    """Yield a turn as content blocks; a turn without anything is an empty text."""
    if reply.reasoning:
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": ""}
    if reply.text or not reply.tool_calls:
        yield {"type": "text", "text": reply.text}
    for call in reply.tool_calls:
        arguments = parse_arguments(call)
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _block_start(block: Mapping[str, Any]) -> dict[str, Any]:
    field = {"thinking": "thinking", "text": "text", "tool_use": "input"}[block["type"]]
    return {**block, field: {} if field == "input" else ""}


def _block_delta(block: Mapping[str, Any]) -> dict[str, Any]:
    if block["type"] == "tool_use":
        return {
            "type": "input_json_delta",
            "partial_json": format_json(block["input"]),
        }
    return {"type": f"{block['type']}_delta", block["type"]: block[block["type"]]}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind} | fields)


def _assistant_message(content: Any) -> Item:
    """Return a turn of the policy, as a program sends it back."""
    if isinstance(content, str):
        return {"role": ASSISTANT, "content": content}
    texts, reasoning, calls = [], [], []
    for block in require_list(content, "an assistant message's content"):
        match block.get("type"):
            case "text":
                texts.append(require_text(block, "text", "a text block"))
            case "thinking":
                reasoning.append(require_text(block, "thinking", "a thinking block"))
            case "redacted_thinking":
                continue
            case "tool_use":
                calls.append(_tool_call(block))
            case kind:
                raise PoisonSample(f"an assistant message has a block of type {kind!r}")
    message: Item = {"role": ASSISTANT, "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    name = require_text(block, "name", "a tool_use block")
    arguments = write_json(block.get("input") or {}, what=f"the input of {name!r}")
    return {
        "id": str(block.get("id", "")),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _user_messages(blocks: Sequence[dict[str, Any]]) -> Iterator[Item]:
    """Yield the parts of a user message: each result of a tool, and the blocks between them."""
    rest: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            rest.append(block)
            continue
        if rest:
            yield {"role": "user", "content": _content(rest)}
            rest = []
        yield {
            "role": "tool",
            "tool_call_id": require_text(block, "tool_use_id", "a tool_result block"),
            "content": _content(block.get("content") or ""),
        }
    if rest or not blocks:
        yield {"role": "user", "content": _content(rest)}


def _content(content: Any) -> Any:
    """Return text and images in the form of OpenAI's chat."""
    if isinstance(content, str):
        return content
    return [_part(block) for block in require_list(content, "a message's content")]


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return {"type": "text", "text": require_text(block, "text", "a text block")}
    if kind != "image" or not isinstance(source, dict):
        return {"type": kind}
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type', '')};base64,{source.get('data', '')}"
    else:
        url = require_text(source, "url", "the source of an image")
    return {"type": "image_url", "image_url": {"url": url}}
