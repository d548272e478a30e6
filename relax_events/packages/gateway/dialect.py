"""What the dialects of the model APIs share: a call of the policy, its answer, and its errors.

    body --> ModelCall --> messages, tools, bound --> session --> node --> answer, or events

A dialect translates in both directions and nothing more: all of them drive the same session, so a
program may change the dialect between two calls. A run's sampling settings hold for all its calls,
since the trainer needs the distribution that the tokens were sampled from: `temperature`, `top_p`,
`top_k` and `seed` of a program are ignored there, and hold where a model is served without a run.
What else would change the tokens or the prompt is refused, and so is a field that the dialect's
specification does not have, since another server may read it as such a setting.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import field_validator

from relax_events.api.drivers import Node, SessionClosed, SessionLimit, path_tokens
from relax_events.api.errors import EngineFailed, PoisonSample
from relax_events.api.events import ChatMessage, FinishReason
from relax_events.data.messages import Tool, write_json
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.sampling import EMPTY, MAX_SHOWN, CallSampling

RETRY_SECONDS = 1
OPENAI_ACCOUNT_FIELDS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of both dialects of OpenAI for accounts, prices and caches."""
NO_PARALLEL = "disable_parallel_tool_use"
"""Of `tool_choice` in Anthropic's dialect; in OpenAI's, `parallel_tool_calls` is false."""
TOOL_FIELDS = frozenset(
    {"type", "name", "description", "cache_control", "eager_input_streaming", "strict"}
)
"""Fields of a tool that are shown, or that change neither the tokens nor the prompt."""
LINE_BREAKS = {"\x85": b"\\u0085", "\u2028": b"\\u2028", "\u2029": b"\\u2029"}
"""Characters that some clients take for the end of a line of an event stream, as JSON escapes."""


NO_THREADS = "thread_unsupported_request"
"""After which clients of Anthropic send the whole conversation with each call."""


class ThreadRefused(PoisonSample):
    """A call wants the server to hold its conversation."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer says of itself.

    Attributes:
        name: Unique.
        model: The name under which the program asked for the policy.
        created: Unix time in seconds.
    """

    name: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a call has no answer.

    Attributes:
        status: HTTP status; 4xx are final, others are tried again by the clients of all dialects.
        text: The problem.
        code: The cause.
        retry_after_seconds: When to try again; 0 leaves the header out.
        is_final: Whether the client must not try again, for any status.
    """

    status: int
    text: str
    code: str = "invalid_request"
    retry_after_seconds: int = 0
    is_final: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the clients of all dialects obey."""
        headers = {"Retry-After": str(self.retry_after_seconds)} if self.retry_after_seconds else {}
        return headers | ({"x-should-retry": "false"} if self.is_final else {})


class ModelCall(CallSampling, ABC):
    """A call of the policy in some dialect."""

    model: str = ""
    stream: bool = False
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True

    @field_validator("tool_choice")
    @classmethod
    def _choice_is_free(cls, choice: str | dict[str, Any]) -> str | dict[str, Any]:
        kind, others = choice, {}
        if isinstance(choice, dict):
            others = {key: value for key, value in choice.items() if value is not None}
            kind = others.pop("type", "auto")
        if kind not in ("auto", "none", "") or others.keys() - {NO_PARALLEL}:
            shown = repr(choice)[:MAX_SHOWN]
            raise ValueError(f"tool_choice = {shown} is not supported here; use 'auto' or 'none'")
        return choice

    @property
    def max_calls(self) -> int | None:
        """How many tool calls the turn may have; None for any number."""
        choice = self.tool_choice if isinstance(self.tool_choice, dict) else {}
        if "none" in (self.tool_choice, choice.get("type")):
            return 0
        return 1 if choice.get(NO_PARALLEL) or not self.parallel_tool_calls else None

    @property
    @abstractmethod
    def bound(self) -> int | None:
        """The program's bound on the turn, in tokens."""

    @abstractmethod
    def list_tools(self) -> list[Tool]:
        """Return the tools as chat templates read them.

        Raises:
            PoisonSample: A tool can't be offered to the policy.
        """

    def write_tools(self) -> str:
        """Return the tools as the text of a JSON list, empty if none may be called.

        Raises:
            PoisonSample: They are no JSON that can be shown, or as `list_tools`.
        """
        tools = [] if self.max_calls == 0 else self.list_tools()
        return write_json(tools, what="the tools") if tools else ""

    @abstractmethod
    def history(self, session: ChatSession) -> list[ChatMessage]:
        """Return the whole conversation up to the turn that is asked for.

        Raises:
            PoisonSample: It has something that this gateway can't translate.
        """

    @abstractmethod
    def answer(self, node: Node, head: AnswerHead) -> dict[str, Any]:
        """Return the answer of a call that is not streamed."""

    @abstractmethod
    def events(self, node: Node, head: AnswerHead) -> Iterator[bytes]:
        """Yield the server-sent events of a streamed answer."""

    @abstractmethod
    def failure_event(self, problem: Problem, head: AnswerHead) -> bytes:
        """Return the event that ends a stream without an answer."""

    def record(self, session: ChatSession, node: Node, head: AnswerHead) -> None:
        """Keep what later calls of this dialect may refer to: by default nothing."""


def describe(error: Exception, session: ChatSession) -> Problem:
    """Return an error of a session as a problem: a refused call is 4xx, a failed engine or store
    503.
    """
    if isinstance(error, SessionLimit):
        return Problem(status=400, text=str(error), code=error.limit.value)
    if isinstance(error, SessionClosed):
        return Problem(status=410, text=str(error), code="session_closed", is_final=True)
    if isinstance(error, PoisonSample):
        session.num_refused += 1
        code = NO_THREADS if isinstance(error, ThreadRefused) else "invalid_messages"
        return Problem(status=400, text=str(error), code=code)
    code = "engine_failed" if isinstance(error, EngineFailed) else "store_failed"
    return Problem(status=503, text=str(error), code=code, retry_after_seconds=RETRY_SECONDS)


def is_cut_off(node: Node) -> bool:
    """Return whether a turn ended by a bound on its tokens."""
    return node.sample.finish_reason is FinishReason.LENGTH


def count_tokens(node: Node) -> tuple[int, int]:
    """Return how many tokens a call has read and sampled."""
    num_sampled = len(node.sample.tokens)
    return len(path_tokens(node)) - num_sampled, num_sampled


def data_event(data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event without a name."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    for character, escape in LINE_BREAKS.items():
        text = text.replace(character.encode(), escape)
    return b"data: " + text + b"\n\n"


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(data)


def require_list(value: Any, what: str) -> list[Any]:
    """Return a value that must be a list of objects.

    Raises:
        PoisonSample: It is none.
    """
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise PoisonSample(f"{what} must be a list of objects, got {type(value).__name__}")
    return value


def require_text(item: Mapping[str, Any], key: str, what: str) -> str:
    """Return a field that must be text.

    Raises:
        PoisonSample: It is none.
    """
    if not isinstance(value := item.get(key), str):
        raise PoisonSample(f"{what} has no text in {key!r}")
    return value


def build_tool(tool: Mapping[str, Any], *, schema_field: str) -> Tool:
    """Return a tool as chat templates read it.

    Args:
        tool: In the form of its dialect.
        schema_field: Which holds the schema of its arguments.
    Raises:
        PoisonSample: It has no name, or a field that would change how the policy sees it.
    """
    name = require_text(tool, "name", "a tool")
    for key in tool.keys() - TOOL_FIELDS - {schema_field}:
        if tool[key] not in (*EMPTY, False, ["direct"]):
            raise PoisonSample(
                f"tool {name!r} has the field {key!r}, which no prompt shows; leave it out"
            )
    description, parameters = tool.get("description"), tool.get(schema_field)
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}
