"""What common clients send by default is answered: bodies as they send them to a model that they
don't know, less their texts.

Recorded on a server of canned answers: openai 3.57, anthropic 2.14, langchain-openai 1.7,
langchain-anthropic 1.7, litellm 1.110, openai-agents 0.24. Read in their sources or in published
records: Codex (`ResponsesApiRequest`, of a model without metadata), Claude Code 2.1 (context_management,
output_config), mini-swe-agent (litellm with `drop_params`), aider, OpenHands (litellm).
"""

from __future__ import annotations

from typing import Any

import pytest

from relax_events.errors import PoisonSample
from relax_events.packages.gateway.anthropic_dialect import AnthropicCall, anthropic_error
from relax_events.packages.gateway.chat_dialect import ChatCall
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.dialect import ModelCall, describe
from relax_events.packages.gateway.responses_dialect import ResponsesCall

SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
LOOK = {"name": "look", "description": "look", "parameters": SCHEMA}
USER = {"role": "user", "content": "hi"}
ARGUMENTS = '{"key": "a"}'
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}
TOOLS = {"tools": [{"type": "function", "function": LOOK}]}
ECHO = {
    "content": None,
    "refusal": None,
    "role": "assistant",
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [CALL],
    "reasoning_content": "hm",
}
"""An answer as `model_dump` writes it."""
ITEM = {
    "type": "function_call",
    "id": "f1",
    "call_id": "c1",
    "name": "look",
    "arguments": ARGUMENTS,
    "status": "completed",
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
INPUT = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
FUNCTION = {"type": "function", "strict": False} | LOOK
CODEX = {
    "instructions": "be",
    "tools": [FUNCTION],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "stream": True,
    "include": [],
    "prompt_cache_key": "a",
    "client_metadata": {"x-codex-installation-id": "a"},
}
CLAUDE_TOOL = {
    "name": "look",
    "description": "look",
    "input_schema": SCHEMA,
    "eager_input_streaming": True,
}
TEXT = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
CLAUDE_CODE = {
    "messages": [{"role": "user", "content": [TEXT]}],
    "system": [TEXT],
    "tools": [CLAUDE_TOOL],
    "metadata": {"user_id": "a"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}
CLAUDE_TURN = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "tool_use", "id": "c1", "name": "look", "input": {"key": "a"}},
]
CLAUDE_RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "42", "is_error": False}
REQUESTS: dict[str, tuple[type[ModelCall], dict[str, Any]]] = {
    "openai chat": (ChatCall, {"messages": [USER, ECHO, RESULT], "stream": False} | TOOLS),
    "openai responses": (ResponsesCall, {"input": [USER, ITEM, OUTPUT], "tools": [FUNCTION]}),
    "langchain chat": (ChatCall, {"messages": [USER], "stream": True} | TOOLS),
    "openai agents": (
        ResponsesCall,
        {"include": [], "input": [USER, ITEM, OUTPUT], "instructions": "be", "tools": [FUNCTION]},
    ),
    "mini-swe-agent": (
        ChatCall,
        {"messages": [USER, ECHO, RESULT], "temperature": 0.0, "parallel_tool_calls": True} | TOOLS,
    ),
    "aider": (ChatCall, {"messages": [USER], "temperature": 0, "stream": True}),
    "openhands": (
        ChatCall,
        {
            "messages": [{"role": "system", "content": [{"type": "text", "text": "be"}]}, USER],
            "top_p": 1.0,
            "max_completion_tokens": 100,
        }
        | TOOLS,
    ),
    "codex": (ResponsesCall, {"input": [INPUT]} | CODEX),
    "codex, next call": (ResponsesCall, {"input": [INPUT, ITEM, OUTPUT]} | CODEX),
    "codex, with summaries": (
        ResponsesCall,
        {"input": [INPUT]} | CODEX | {"reasoning": {"summary": "auto"}},
    ),
    "codex, a model with efforts": (
        ResponsesCall,
        {"input": [INPUT]}
        | CODEX
        | {
            "reasoning": {"effort": "medium", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
        },
    ),
    "anthropic": (AnthropicCall, {"messages": [USER], "max_tokens": 9, "tools": [CLAUDE_TOOL]}),
    **{
        f"claude code, effort {effort}": (
            AnthropicCall,
            CLAUDE_CODE | {"output_config": {"effort": effort}},
        )
        for effort in ("medium", "high", "xhigh")
    },
    "claude code, next call": (
        AnthropicCall,
        CLAUDE_CODE
        | {
            "messages": [
                USER,
                {"role": "assistant", "content": CLAUDE_TURN},
                {"role": "user", "content": [CLAUDE_RESULT]},
            ]
        },
    ),
}


def session() -> ChatSession:
    """Return a session that reads text."""
    empty = ChatSession.__new__(ChatSession)
    empty.media, empty.num_refused, empty.answers = None, 0, {}
    return empty


@pytest.mark.parametrize("name", REQUESTS)
def test_a_default_request_is_answered(name: str) -> None:
    kind, body = REQUESTS[name]
    call = kind.model_validate({"model": "any"} | body)
    history = call.history(session())
    assert history[-1].text in ("hi", "42")
    assert ("look" in call.write_tools()) == ("tools" in body)
    if history[-1].role == "tool":
        assert [one.name for one in history[-2].tool_calls] == ["look"]
    assert call.max_calls == (1 if body.get("parallel_tool_calls") is False else None)


def test_a_client_that_wants_a_thread_learns_to_send_its_messages() -> None:
    body = {"messages": [USER], "max_tokens": 9, "thread": {"type": "create"}}
    asked = session()
    with pytest.raises(PoisonSample, match="thread is not supported here") as caught:
        AnthropicCall.model_validate(body).history(asked)
    details = anthropic_error(describe(caught.value, asked))["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request"}


def test_a_tool_of_a_vendor_is_refused_with_the_setting_that_leaves_it_out() -> None:
    body = {"input": "hi"} | CODEX | {"tools": [FUNCTION, {"type": "web_search"}]}
    with pytest.raises(PoisonSample, match='set web_search = "disabled"'):
        ResponsesCall.model_validate(body).write_tools()
