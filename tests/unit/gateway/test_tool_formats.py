"""Tool calls as the model families write them, by hand; malformed ones stay text, with a reason."""
# ruff: noqa: RUF001 - the tags of DeepSeek have a wide bar

from __future__ import annotations

import json
from typing import Any

import pytest

from relax_events.data.tool_formats import FORMATS, choose_format
from relax_events.packages.gateway.tool_calls import parse_reply

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "key": {"type": "string"},
                    "count": {"type": "integer"},
                    "box": {"type": ["array", "null"]},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "write", "parameters": {"type": "object", "required": ["path"]}},
    },
]
MISSING = ("arguments_missing",)
CALL = ("look", {"key": "12", "count": 3})
HERMES = '<tool_call>\n{"name": "look", "arguments": {"key": "12", "count": 3}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=look>\n<parameter=key>\n12\n</parameter>\n"
    "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>look\n<arg_key>key</arg_key>\n<arg_value>12</arg_value>\n"
    "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
LLAMA = '{"name": "look", "parameters": {"key": "12", "count": 3}}'
MISTRAL = '[TOOL_CALLS][{"name": "look", "arguments": {"key": "12", "count": 3}}]'
MISTRAL_NEW = '[TOOL_CALLS]look[ARGS]{"key": "12", "count": 3}'
MISTRAL_IDS = '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"key": "12", "count": 3}'
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"key": "12", "count": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"key": "12", "count": 3}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


def calls_in(name: str, text: str) -> list[tuple[str, Any]]:
    """Return the calls of a turn."""
    parsed = parse_reply(text, style=FORMATS[name], tools=json.dumps(TOOLS))
    return [(function, json.loads(arguments)) for function, arguments in parsed.calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "num_calls"),
    [
        ("hermes", f"See. {HERMES}", "See.", 1),
        ("hermes", HERMES + HERMES, "", 2),
        ("qwen3_coder", f"See.\n{CODER}", "See.", 1),
        ("qwen3_coder", f"{CODER}\n{CODER.removeprefix('<tool_call>')}", "", 2),
        ("glm", f"See.\n{GLM}{GLM}", "See.", 2),
        ("llama3", LLAMA, "", 1),
        ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
        ("mistral", f"See.{MISTRAL}", "See.", 1),
        ("mistral", MISTRAL_NEW + MISTRAL_IDS, "", 2),
        ("deepseek", f"See.{DEEPSEEK_V3}", "See.", 1),
        ("deepseek", DEEPSEEK, "", 1),
    ],
)
def test_calls_are_read_in_the_format_of_each_family(
    name: str, text: str, content: str, num_calls: int
) -> None:
    parsed = parse_reply(
        f"<think>So.</think>\n\n{text}", style=FORMATS[name], tools=json.dumps(TOOLS)
    )
    assert (parsed.reasoning, parsed.content, parsed.malformed) == ("So.", content, ())
    assert calls_in(name, text) == [CALL] * num_calls


@pytest.mark.parametrize(
    ("name", "text", "reasons"),
    [
        ("hermes", '<tool_call>{"name": "look"</tool_call>', ("not_json",)),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ("no_name",)),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            ("arguments_no_object",),
        ),
        ("hermes", 'a <tool_call>{"name": "look", "arg', ("unclosed",)),
        ("hermes", '<tool_call>{"name": "look", "args": {"key": "a"}}</tool_call>', MISSING),
        ("hermes", '<tool_call>{"name": "write"}</tool_call>', MISSING),
        ("hermes", '<tool_call>{"name": "write", "arguments": null}</tool_call>', MISSING),
        ("hermes", '<tool_call>{"name": "write", "parameters": {"p": 1}}</tool_call>', MISSING),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}, "parameters": {"a": 1}}</tool_call>',
            ("arguments_twice",),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1}, "b": 2}</tool_call>',
            ("unknown_key",),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
            ("key_twice",),
        ),
        ("hermes", "<tool_call>[]</tool_call>", ("no_name",)),
        (
            "hermes",
            '<tool_call>{"name": "look", "arguments": {"key": "a"}</tool_call>',
            ("not_json",),
        ),
        (
            "hermes",
            '<tool_call>{"name": "look", "arguments": {"key": "a\nb"}}</tool_call>',
            ("not_json",),
        ),
        (
            "hermes",
            '<tool_call>"{\\"name\\": \\"look\\", \\"arguments\\": {}}"</tool_call>',
            ("no_name",),
        ),
        (
            "hermes",
            '<tool_call>{"name": "look", "arguments": {}} {"name": "look"}</tool_call>',
            ("not_json",),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
            ("lone_surrogate",),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
            ("infinite_number",),
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', ("not_json",)),
        (
            "qwen3_coder",
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            ("key_twice",),
        ),
        ("qwen3_coder", "<tool_call>\n<function=write>\n</function>\n</tool_call>", MISSING),
        ("glm", "<tool_call>write</tool_call>", MISSING),
        ("llama3", '{"name": "write"}', MISSING),
        ("llama3", '{"name": "look", "parameters": [1]}', ("arguments_no_object",)),
        ("mistral", "[TOOL_CALLS][]", ("no_name",)),
        ("mistral", "[TOOL_CALLS]write[ARGS]{}", MISSING),
        ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=key>", ("unclosed",)),
        ("qwen3_coder", "<function=look>stray</function>", ("broken_argument",)),
        ("glm", "<tool_call><arg_key>a</arg_key></tool_call>", ("no_name",)),
        ("glm", "<tool_call>look<arg_key>a</arg_key>1</tool_call>", ("broken_argument",)),
        ("llama3", "<|python_tag|>print(1)", ("not_json",)),
        ("mistral", "[TOOL_CALLS]look[ARGS]{", ("not_json",)),
        ("mistral", '[TOOL_CALLS][{"name": 1}]', ("no_name",)),
        ("deepseek", "<｜tool▁call▁begin｜>look{}<｜tool▁call▁end｜>", ("no_name",)),
        ("deepseek", "<｜tool▁call▁begin｜>look<｜tool▁sep｜>{}", ("unclosed",)),
    ],
)
def test_a_malformed_call_is_text_with_a_reason(
    name: str, text: str, reasons: tuple[str, ...]
) -> None:
    parsed = parse_reply(text, style=FORMATS[name], tools=json.dumps(TOOLS))
    assert (parsed.content, parsed.calls, parsed.malformed) == (text, (), reasons)


@pytest.mark.parametrize(
    "text", ['{"name": "other", "parameters": {}}', '{"a": 1}', "{no json", "Say {1}."]
)
def test_json_that_calls_no_tool_of_the_program_is_text_of_a_llama(text: str) -> None:
    parsed = parse_reply(text, style=FORMATS["llama3"], tools=json.dumps(TOOLS))
    assert (parsed.content, parsed.calls, parsed.malformed) == (text, (), ())


def test_values_of_xml_are_typed_by_the_schema_of_the_tool() -> None:
    text = (
        "<function=look><parameter=key>3</parameter><parameter=box>[1, 2]</parameter>"
        "<parameter=count>many</parameter><parameter=other>4</parameter></function>"
    )
    assert calls_in("qwen3_coder", text) == [
        ("look", {"key": "3", "box": [1, 2], "count": "many", "other": "4"})
    ]


def test_an_alias_of_arguments_is_read() -> None:
    text = '<tool_call>{"name":"write","parameters":{"path":"a"}}</tool_call>'
    assert calls_in("hermes", text) == [("write", {"path": "a"})]


@pytest.mark.parametrize("number", [2**53 + 1, 2**64, -(2**64) - 1, 2**100 + 1])
def test_integers_of_calls_are_exact(number: int) -> None:
    hermes = f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>'
    coder = f"<function=look><parameter=count>{number}</parameter></function>"
    assert calls_in("hermes", hermes) == [("f", {"a": number})]
    assert calls_in("qwen3_coder", coder) == [("look", {"count": number})]


def test_tools_whose_schemas_are_odd_are_called_without_types() -> None:
    loop = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
    odd = [[1], {"properties": [1]}, {"properties": {"a": {"type": 3, "anyOf": {}}}}, loop]
    for parameters in (*odd, {"required": {"a": 1}}, {"properties": {"a": {"$ref": "#/x/y"}}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        text = "<function=f><parameter=a>1</parameter></function>"
        parsed = parse_reply(text, style=FORMATS["qwen3_coder"], tools=json.dumps([tool]))
        assert parsed.calls == (("f", '{"a":"1"}'),)


def test_a_good_call_next_to_a_malformed_one_is_read() -> None:
    parsed = parse_reply(
        f"<tool_call>x</tool_call>{HERMES}", style=FORMATS["hermes"], tools=json.dumps(TOOLS)
    )
    assert parsed.content == "<tool_call>x</tool_call>"
    assert (len(parsed.calls), parsed.malformed) == (1, ("not_json",))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES),
        ("qwen3_coder", CODER),
        ("glm", GLM),
        ("mistral", MISTRAL_NEW),
        ("deepseek", DEEPSEEK),
    ],
)
def test_a_call_beyond_those_that_the_program_takes_stays_in_the_text(name: str, text: str) -> None:
    tools, style = json.dumps(TOOLS), FORMATS[name]
    one = parse_reply(f"See. {text}{text}", style=style, tools=tools, max_calls=1)
    assert (len(one.calls), one.malformed) == (1, ("too_many_calls",))
    assert one.content.startswith("See. ")
    assert "look" in one.content
    none = parse_reply(text, style=style, max_calls=0)
    assert (none.content, none.calls, none.malformed) == (text, (), ("too_many_calls",))
    whole = parse_reply(text, style=style, tools=tools, max_calls=1)
    assert (whole.content, len(whole.calls), whole.malformed) == ("", 1, ())


@pytest.mark.parametrize(
    ("name", "text"),
    [("llama3", f"{LLAMA}; {LLAMA}"), ("hermes", f"<tool_call>[{LLAMA}, {LLAMA}]</tool_call>")],
)
def test_calls_of_one_block_stay_together(name: str, text: str) -> None:
    parsed = parse_reply(text, style=FORMATS[name], tools=json.dumps(TOOLS), max_calls=1)
    assert (parsed.content, parsed.calls, parsed.malformed) == (text, (), ("too_many_calls",))


def test_a_call_nested_too_deep_is_text() -> None:
    deep = "[" * 300 + "]" * 300
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}}}}}</tool_call>'
    parsed = parse_reply(text, style=FORMATS["hermes"], tools=json.dumps(TOOLS))
    assert (parsed.content, parsed.calls) == (text, ())
    assert parsed.malformed == ("nested_too_deep",)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n<function=' + call.name }}", "qwen3_coder"),
        ("{{ '<tool_call>' + name }}<arg_key>", "glm"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ message.content }}", "hermes"),
    ],
)
def test_the_format_is_that_of_the_chat_template(template: str, name: str) -> None:
    assert choose_format("auto", template=template).name == name
    assert choose_format("glm", template=template).name == "glm"


def test_ids_of_calls_fit_the_chat_template() -> None:
    assert FORMATS["hermes"].call_id("000000-0000-0/0#1", 2) == "call_000000-0000-0-0-1-2"
    ids = {FORMATS["mistral"].call_id("000000-0000-0/0#1", number) for number in range(50)}
    assert len(ids) == 50
    assert all(len(one) == 9 and one.isalnum() for one in ids)
