"""Calls of tools, written as the chat templates of the families write them, are read back exactly."""
# ruff: noqa: RUF001 - the tags of DeepSeek have a wide bar

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from relax_events.data.tool_formats import FORMATS
from relax_events.packages.gateway.tool_calls import parse_reply

Arguments = dict[str, Any]
Call = tuple[str, Arguments]
CALL_BEGIN, SEPARATOR, CALL_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)


def write_python(value: Any) -> str:
    """Write a value as Jinja's `tojson` for containers and `string` for others, as Qwen has it."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def write_json(value: Any) -> str:
    """Write a value as GLM does: text as it is, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_qwen3_coder(name: str, arguments: Arguments) -> str:
    """Write a call as the template of Qwen3-Coder."""
    pairs = "".join(
        f"<parameter={key}>\n{write_python(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def write_glm(name: str, arguments: Arguments, *, line: str = "\n") -> str:
    """Write a call as the templates of GLM-4.5 (with lines) and GLM-4.7 (without)."""
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{write_json(value)}</arg_value>{line}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{line}{pairs}</tool_call>"


def write_hermes(call: Any) -> str:
    """Write a call as the templates of Qwen2.5, Qwen3 and Hermes."""
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def named(name: str, arguments: Arguments, *, key: str = "arguments") -> dict[str, Any]:
    """Return the object of a call."""
    return {"name": name, key: arguments}


def nested(name: str, arguments: Arguments) -> dict[str, Any]:
    """Return the object of a call as OpenAI nests it."""
    return {"id": "1", "type": "function", "function": named(name, arguments)}


def write_deepseek_v3(name: str, arguments: Arguments) -> str:
    """Write a call as the template of DeepSeek V3 and R1."""
    fenced = f"```json\n{json.dumps(arguments)}\n```"
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n{fenced}{CALL_END}"


def each(write: Callable[[str, Arguments], str], *, between: str = "") -> Callable[..., str]:
    """Return a writer of several calls from that of one."""
    return lambda calls: between.join(write(*call) for call in calls)


WRITERS: Mapping[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "hermes": ("hermes", each(lambda *call: write_hermes(named(*call)), between="\n")),
    "hermes, alias": (
        "hermes",
        each(lambda *call: write_hermes(named(*call, key="parameters"))),
    ),
    "hermes, nested": ("hermes", each(lambda *call: write_hermes(nested(*call)))),
    "hermes, list": ("hermes", lambda calls: write_hermes([named(*call) for call in calls])),
    "qwen3_coder": ("qwen3_coder", each(write_qwen3_coder, between="\n")),
    "glm 4.5": ("glm", each(write_glm)),
    "glm 4.7": ("glm", each(lambda *call: write_glm(*call, line=""))),
    "llama3": (
        "llama3",
        each(lambda *call: json.dumps(named(*call, key="parameters")), between="; "),
    ),
    "llama3, alias and type": (
        "llama3",
        each(lambda *call: json.dumps({"type": "function"} | named(*call)), between=";"),
    ),
    "llama3, tag": (
        "llama3",
        lambda calls: (
            "<|python_tag|>"
            + "; ".join(json.dumps(named(*call, key="parameters")) for call in calls)
        ),
    ),
    "mistral, list": (
        "mistral",
        lambda calls: (
            "[TOOL_CALLS]" + json.dumps([named(*call) | {"id": "abcdefghi"} for call in calls])
        ),
    ),
    "mistral, newer": (
        "mistral",
        each(lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"),
    ),
    "mistral, ids": (
        "mistral",
        each(
            lambda name, arguments: (
                f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{json.dumps(arguments)}"
            )
        ),
    ),
    "deepseek v3": (
        "deepseek",
        lambda calls: (
            "<｜tool▁calls▁begin｜>"
            + "\n".join(write_deepseek_v3(*call) for call in calls)
            + "<｜tool▁calls▁end｜>"
        ),
    ),
    "deepseek v3.1": (
        "deepseek",
        lambda calls: (
            "<｜tool▁calls▁begin｜>"
            + "".join(
                f"{CALL_BEGIN}{name}{SEPARATOR}{json.dumps(arguments)}{CALL_END}"
                for name, arguments in calls
            )
            + "<｜tool▁calls▁end｜>"
        ),
    ),
}

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<>{}[];`｜\r"), max_size=12)
NUMBERS = st.integers(-(2**80), 2**80)
VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "string": TEXTS.filter(lambda text: text.strip() not in ("null", "None")),
    "integer": NUMBERS,
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "array": st.lists(NUMBERS | TEXTS, max_size=3),
    "object": st.dictionaries(st.sampled_from("xyz"), NUMBERS | TEXTS, max_size=3),
    "null": st.none(),
}
DEFINITIONS = {kind: {"type": kind} for kind in VALUES}
UNAMBIGUOUS = (
    [(kind,) for kind in VALUES]
    + [(kind, "null") for kind in VALUES if kind != "null"]
    + [("string", "array"), ("object", "array")]
)


@dataclass(frozen=True)
class Tool:
    """A tool, and the kinds of each of its arguments."""

    name: str
    kinds: Mapping[str, tuple[str, ...]]
    schemas: Mapping[str, Any]

    def print(self) -> dict[str, Any]:
        """Return it as chat templates read it; all its arguments are required."""
        parameters = {
            "type": "object",
            "properties": self.schemas,
            "required": list(self.kinds),
            "$defs": DEFINITIONS,
        }
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


def spell(kinds: tuple[str, ...], form: str) -> dict[str, Any]:
    """Return a schema of kinds in one of the forms in which generators write it."""
    match form:
        case "type":
            return {"type": kinds[0] if len(kinds) == 1 else list(kinds)}
        case "any":
            return {"anyOf": [{"type": kind} for kind in kinds]}
        case "reference":
            return {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds]}
        case _:
            return {"allOf": [{"anyOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds]}]}


@st.composite
def tools(draw: st.DrawFn) -> Tool:
    """Draw a tool."""
    kinds = draw(
        st.dictionaries(st.sampled_from(["a", "b_1", "key"]), st.sampled_from(UNAMBIGUOUS))
    )
    forms = st.sampled_from(["type", "any", "reference", "all"])
    schemas = {key: spell(each, draw(forms)) for key, each in kinds.items()}
    return Tool(draw(st.sampled_from(["look", "mcp__find-it", "a.b"])), kinds, schemas)


@st.composite
def calls_of(draw: st.DrawFn, tool: Tool) -> Call:
    """Draw a call with all arguments."""
    values = {key: st.one_of([VALUES[kind] for kind in kinds]) for key, kinds in tool.kinds.items()}
    return tool.name, {key: draw(value) for key, value in values.items()}


@given(st.sampled_from(sorted(WRITERS)), tools(), st.data())
def test_calls_are_read_as_the_families_write_them(
    writer: str, tool: Tool, data: st.DataObject
) -> None:
    style, write = WRITERS[writer]
    calls = data.draw(st.lists(calls_of(tool), min_size=1, max_size=3))
    parsed = parse_reply(write(calls), style=FORMATS[style], tools=json.dumps([tool.print()]))
    assert (parsed.content, parsed.malformed) == ("", ())
    assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == calls


@given(st.sampled_from(sorted(WRITERS)), tools(), st.data())
def test_a_call_without_a_required_argument_is_text_and_counted(
    writer: str, tool: Tool, data: st.DataObject
) -> None:
    style, write = WRITERS[writer]
    name, arguments = data.draw(calls_of(tool))
    assume(arguments)
    del arguments[data.draw(st.sampled_from(sorted(arguments)))]
    text = write([(name, arguments)])
    parsed = parse_reply(text, style=FORMATS[style], tools=json.dumps([tool.print()]))
    assert (parsed.content, parsed.calls) == (text, ())
    assert parsed.malformed == ("arguments_missing",)


@given(tools(), st.data(), st.sampled_from(["args", "input", "kwargs", "inputs", "Arguments"]))
def test_arguments_under_another_key_never_vanish(
    tool: Tool, data: st.DataObject, key: str
) -> None:
    text = write_hermes(named(*data.draw(calls_of(tool)), key=key))
    parsed = parse_reply(text, style=FORMATS["hermes"], tools=json.dumps([tool.print()]))
    assert (parsed.content, parsed.calls, parsed.malformed) == (text, (), ("arguments_missing",))
