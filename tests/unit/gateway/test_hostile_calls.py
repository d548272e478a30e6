"""Turns of the policy that are built to be slow to read: two million characters, each read a bounded
number of times. A reader whose time grows with the square of the length takes hours for them.
"""
# ruff: noqa: RUF001 - the tags of DeepSeek have a wide bar

from __future__ import annotations

import json

import pytest

from relax_events.data.tool_formats import FORMATS
from relax_events.packages.gateway.tool_calls import parse_reply

NUM_CHARACTERS = 2_000_000
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = json.dumps([{"type": "function", "function": FUNCTION}])
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CASES = [
    *(("hermes", *parts) for parts in (("", "\n", ""), ("\n", "\n", "<think>"))),
    ("hermes", "", "<tool_call>", ""),
    ("hermes", "<tool_call>", " ", "x"),
    ("hermes", "<tool_call>", " ", "x</tool_call>"),
    ("hermes", "", "<tool_call>x</tool_call>", ""),
    ("hermes", '<tool_call>{"a": "', "\\", ""),
    ("qwen3_coder", "", "<function=f>", ""),
    ("qwen3_coder", "", "<tool_call>", ""),
    ("qwen3_coder", "<tool_call>", " ", "x"),
    ("qwen3_coder", "<function=f>x</function>", " ", "x"),
    ("qwen3_coder", "<function=f>", "<parameter=a>", "</function>"),
    ("qwen3_coder", "<function=f>", "\n", "x</function>"),
    ("qwen3_coder", "<function=f><parameter=a>", "\n", "x</function>"),
    ("glm", "", "<tool_call>", ""),
    ("glm", "<tool_call>f", "<arg_key>", "</tool_call>"),
    ("glm", "<tool_call>f<arg_key>", "</arg_key>", "</tool_call>"),
    ("glm", "<tool_call>f<arg_key>", "</arg_key><arg_value>", "</tool_call>"),
    ("glm", "<tool_call>f<arg_key>a</arg_key>", " ", "x</tool_call>"),
    ("mistral", "", "[TOOL_CALLS]", ""),
    ("mistral", "[TOOL_CALLS]f", " ", "x"),
    ("mistral", "[TOOL_CALLS]", "f", ""),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]", "a", ""),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]a[ARGS]", " ", "x"),
    ("deepseek", "", " ", "x"),
    ("deepseek", "", BEGIN, ""),
    ("deepseek", f"{BEGIN}f{SEPARATOR}", " ", f"x{END}"),
    ("deepseek", f"{BEGIN}f{SEPARATOR}```", " ", f"x{END}"),
    ("deepseek", f"{BEGIN}f{SEPARATOR}```json", " ", f"x```{END}"),
    ("llama3", '{"a": "', ";", ""),
    ("llama3", "<|python_tag|>", ";", ""),
    ("llama3", '<|python_tag|>{"a": "', ";{", ""),
    ("llama3", "{}", " ", "x"),
    ("llama3", "<|python_tag|>", "{};", "x"),
    ("llama3", "{", "[", ""),
]
"""Format, begin, a piece that is repeated, end."""


@pytest.mark.parametrize(("style", "begin", "piece", "end"), CASES)
def test_no_turn_is_read_again_and_again(style: str, begin: str, piece: str, end: str) -> None:
    text = begin + piece * (NUM_CHARACTERS // len(piece)) + end
    parsed = parse_reply(text, style=FORMATS[style], tools=TOOLS)
    assert (parsed.content, parsed.calls) == (text, ())


def test_each_of_many_calls_is_read() -> None:
    text = '{"name": "f", "parameters": {"a": "; {"}};' * 20_000
    parsed = parse_reply(text, style=FORMATS["llama3"], tools=TOOLS)
    assert parsed.calls == (("f", '{"a":"; {"}'),) * 20_000
