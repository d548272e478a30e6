"""Which fields of a call are refused: all that its dialect's specification does not have, and those
of the specification that would change the tokens or the prompt.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from relax_events.errors import PoisonSample
from relax_events.packages.gateway.anthropic_dialect import AnthropicCall, AnthropicPrompt
from relax_events.packages.gateway.chat_dialect import ChatCall
from relax_events.packages.gateway.dialect import ModelCall
from relax_events.packages.gateway.responses_dialect import ResponsesCall
from relax_events.packages.gateway.token_route import TokenBody, TokenSampling

HELLO = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
BODIES: dict[type[ModelCall], dict[str, Any]] = {
    ChatCall: {"messages": HELLO},
    ResponsesCall: {"input": "hello"},
    AnthropicCall: {"messages": HELLO, "max_tokens": 4},
    AnthropicPrompt: {"messages": HELLO},
}
EXTRAS: dict[str, Any] = {
    # vLLM
    "chat_template_kwargs": {"enable_thinking": False},
    "chat_template": "{{ messages }}",
    "guided_json": {"type": "object"},
    "guided_choice": ["a"],
    "guided_regex": "a*",
    "structured_outputs": {"json": {}},
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "length_penalty": 0.5,
    "min_tokens": 3,
    "best_of": 2,
    "use_beam_search": True,
    "ignore_eos": True,
    "stop_token_ids": [3],
    "bad_words": ["a"],
    "allowed_token_ids": [1],
    "logits_processors": ["a"],
    "truncate_prompt_tokens": 5,
    "add_special_tokens": True,
    "documents": [{"title": "a"}],
    "mm_processor_kwargs": {"a": 1},
    "thinking_token_budget": 4,
    "vllm_xargs": {"a": 1},
    # SGLang
    "regex": "a*",
    "ebnf": "root ::= a",
    "json_schema": "{}",
    "custom_logit_processor": "a",
    "lora_path": "a",
    "no_stop_trim": True,
    # other vendors
    "enable_thinking": False,
    "thinking_budget": 4,
    "extra_body": {"a": 1},
    "typical_p": 0.5,
    "mirostat": 1,
    "provider": {"order": ["a"]},
    "transforms": ["middle-out"],
}
"""Fields of other servers, with a value that has an effect there."""
OF_THE_SPECIFICATION: list[tuple[type[ModelCall], str, Any]] = [
    (ChatCall, "n", 2),
    (ChatCall, "stop", ["a"]),
    (ChatCall, "logit_bias", {"1": 2}),
    (ChatCall, "presence_penalty", 0.1),
    (ChatCall, "reasoning_effort", "low"),
    (ChatCall, "reasoning_effort", "high"),
    (ChatCall, "verbosity", "low"),
    (ChatCall, "response_format", {"type": "json_object"}),
    (ChatCall, "modalities", ["text", "audio"]),
    (ChatCall, "web_search_options", {"search_context_size": "low"}),
    (ChatCall, "functions", [FUNCTION]),
    (ChatCall, "function_call", {"name": "f"}),
    (ChatCall, "tool_choice", "required"),
    (ChatCall, "continue_final_message", True),
    (ChatCall, "add_generation_prompt", False),
    (ResponsesCall, "reasoning", {"effort": "high", "summary": "auto"}),
    (ResponsesCall, "text", {"verbosity": "high"}),
    (ResponsesCall, "text", {"format": {"type": "json_object"}}),
    (ResponsesCall, "context_management", [{"type": "compaction"}]),
    (ResponsesCall, "truncation", "auto"),
    (ResponsesCall, "prompt", {"id": "a"}),
    (AnthropicCall, "stop_sequences", ["a"]),
    (AnthropicCall, "output_config", {"effort": "low"}),
    (AnthropicCall, "output_format", {"type": "json_schema"}),
    (AnthropicCall, "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    (AnthropicCall, "compaction", {"type": "auto"}),
    (AnthropicCall, "mcp_servers", [{"url": "a"}]),
    (AnthropicCall, "tool_choice", {"type": "any"}),
]
NEUTRAL: list[tuple[type[ModelCall], dict[str, Any]]] = [
    (ChatCall, {"user": "a", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}),
    (ChatCall, {"prompt_cache_key": "a", "safety_identifier": "a", "prediction": {"content": "a"}}),
    (ChatCall, {"n": 1, "min_p": 0, "repetition_penalty": 1.0, "ignore_eos": False}),
    (ChatCall, {"response_format": {"type": "text", "json_schema": None}, "logprobs": False}),
    (ChatCall, {"continue_final_message": False, "add_generation_prompt": True}),
    (ChatCall, {"tool_choice": "none", "parallel_tool_calls": False, "tools": []}),
    (ChatCall, {"tool_choice": "auto", "parallel_tool_calls": True, "tools": [TOOL]}),
    (ChatCall, {"temperature": 0.5, "top_p": 0.5, "top_k": 4, "seed": 3}),
    (ResponsesCall, {"store": False, "include": ["reasoning.encrypted_content"]}),
    (ResponsesCall, {"reasoning": {"effort": None, "summary": "auto"}}),
    (ResponsesCall, {"text": {"format": {"type": "text"}, "verbosity": "medium"}}),
    (AnthropicCall, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (AnthropicCall, {"metadata": {"user_id": "a"}, "service_tier": "auto", "betas": ["a"]}),
    (
        AnthropicCall,
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    ),
    (AnthropicPrompt, {"max_tokens": 4, "thinking": {"type": "disabled"}}),
]


@pytest.mark.parametrize("call", BODIES)
@pytest.mark.parametrize("field", EXTRAS)
def test_fields_of_other_servers_are_refused_unless_they_have_no_effect(
    call: type[ModelCall], field: str
) -> None:
    with pytest.raises(ValidationError, match=f"{field} = .*is not supported here; leave it out"):
        call.model_validate(BODIES[call] | {field: EXTRAS[field]})
    for empty in (None, [], {}, ""):
        call.model_validate(BODIES[call] | {field: empty})


@pytest.mark.parametrize(("call", "field", "value"), OF_THE_SPECIFICATION)
def test_fields_of_the_specification_that_change_the_tokens_are_refused(
    call: type[ModelCall], field: str, value: Any
) -> None:
    with pytest.raises(ValidationError, match=f"{field} = "):
        call.model_validate(BODIES[call] | {field: value})


@pytest.mark.parametrize(("call", "fields"), NEUTRAL)
def test_fields_that_change_nothing_of_the_tokens_are_taken(
    call: type[ModelCall], fields: dict[str, Any]
) -> None:
    call.model_validate(BODIES[call] | fields)


@given(
    st.sampled_from(list(BODIES)),
    st.text(min_size=1),
    st.integers(min_value=1) | st.text(min_size=1) | st.booleans() | st.just({"a": None}),
)
def test_no_field_is_dropped_in_silence(call: type[ModelCall], field: str, value: Any) -> None:
    readable = call.model_fields.keys() | call.IGNORED | call.NEUTRAL.keys()
    if field in readable or value == {"a": None}:
        return
    with pytest.raises(ValidationError, match="is not supported here"):
        call.model_validate(BODIES[call] | {field: value})


@pytest.mark.parametrize("field", ["\ud800", "a" * 10**6])
def test_the_error_of_an_odd_field_is_short_text(field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCall.model_validate({"messages": HELLO, field: "b" * 10**6})
    (problem,) = caught.value.errors()
    assert len(problem["msg"].encode()) < 400


@pytest.mark.parametrize("call", BODIES)
@pytest.mark.parametrize(
    ("choice", "max_calls"),
    [
        ({}, None),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, None),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": None}}, None),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, 1),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, 1),
        ({"tool_choice": "none"}, 0),
        ({"tool_choice": {"type": "none"}, "parallel_tool_calls": False}, 0),
    ],
)
def test_a_program_says_how_many_calls_a_turn_may_have(
    call: type[ModelCall], choice: dict[str, Any], max_calls: int | None
) -> None:
    tool = {ChatCall: TOOL, ResponsesCall: {"type": "function"} | FUNCTION}.get(call, {"name": "f"})
    parsed = call.model_validate(BODIES[call] | choice | {"tools": [tool]})
    assert parsed.max_calls == max_calls
    assert bool(parsed.write_tools()) == (max_calls != 0)


@pytest.mark.parametrize("call", BODIES)
@pytest.mark.parametrize(
    "choice",
    [
        "required",
        "any",
        {"type": "any"},
        {"type": "tool", "name": "f"},
        {"type": "auto", "name": "f"},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        {"type": "function", "function": {"name": "f"}},
    ],
)
def test_a_choice_that_forces_a_call_is_refused(call: type[ModelCall], choice: Any) -> None:
    with pytest.raises(ValidationError, match=r"tool_choice = .* use 'auto' or 'none'"):
        call.model_validate(BODIES[call] | {"tool_choice": choice})


@pytest.mark.parametrize(
    ("field", "value"), [("continue_final_message", False), ("add_generation_prompt", True)]
)
def test_a_begun_turn_is_not_ended_by_a_field_of_vllm(field: str, value: bool) -> None:
    begun = {"messages": [*HELLO, {"role": "assistant", "content": "<think>"}]}
    ChatCall.model_validate(begun | {field: not value})
    with pytest.raises(ValidationError, match=f"{field} = {value} contradicts the role"):
        ChatCall.model_validate(begun | {field: value})


@pytest.mark.parametrize(
    ("call", "tool", "field"),
    [
        (AnthropicCall, {"input_examples": [{"a": 1}]}, "input_examples"),
        (AnthropicCall, {"defer_loading": True}, "defer_loading"),
        (AnthropicCall, {"allowed_callers": ["code_execution_20250825"]}, "allowed_callers"),
        (ResponsesCall, {"output_schema": {"type": "object"}}, "output_schema"),
        (ResponsesCall, {"parameters_schema": {"type": "object"}}, "parameters_schema"),
    ],
)
def test_a_field_of_a_tool_that_no_prompt_shows_is_refused(
    call: type[ModelCall], tool: dict[str, Any], field: str
) -> None:
    kind = {"type": "custom" if call is AnthropicCall else "function"}
    shown = {"name": "f", "cache_control": {"type": "ephemeral"}, "defer_loading": False}
    assert call.model_validate(BODIES[call] | {"tools": [kind | shown]}).list_tools()
    tools = call.model_validate(BODIES[call] | {"tools": [kind | shown | tool]})
    with pytest.raises(PoisonSample, match=f"tool 'f' has the field '{field}'"):
        tools.list_tools()


@pytest.mark.parametrize("tool", [TOOL | {"type": "web_search"}, TOOL | {"defer_loading": True}])
def test_a_tool_of_the_chat_is_a_function_and_nothing_more(tool: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="tools"):
        ChatCall.model_validate({"messages": HELLO, "tools": [tool]})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "a"}, "prompt"),
        ({"features": {"a": 1}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "extra_args"),
        ({"sampling_params": {"thinking_token_budget": 3}}, "thinking_token_budget"),
    ],
)
def test_the_token_route_refuses_what_its_format_does_not_have(
    body: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValidationError, match=field):
        TokenBody.model_validate({"token_ids": [1]} | body)


def test_the_token_route_takes_what_the_package_renderers_sends() -> None:
    sampling = {
        "max_tokens": 4,
        "logprobs": 1,
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 3,
    }
    body = {"token_ids": [1], "cache_salt": "a", "priority": 1, "sampling_params": sampling}
    assert isinstance(TokenBody.model_validate(body).sampling_params, TokenSampling)


@pytest.mark.parametrize("call", [*BODIES, TokenBody])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\ud800", r"has '\\ud800', which is half of a character"),
        (float("nan"), "NaN|nan"),
        (float("-inf"), "[Ii]nf|JSON"),
    ],
)
def test_a_body_that_no_answer_could_repeat_is_refused(
    call: type[BaseModel], value: Any, text: str
) -> None:
    body = BODIES.get(call, {"token_ids": [1]})  # type: ignore[call-overload]
    call.model_validate(body | {"model": "whole \U0001f600"})
    for field in ("model", "user", "metadata"):
        shown = {"a": [value]} if field == "metadata" else value
        with pytest.raises(ValidationError, match=text) as caught:
            call.model_validate(body | {field: shown})
        str(caught.value).encode()
