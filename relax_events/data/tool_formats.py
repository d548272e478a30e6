"""How model families write tool calls: where a call stands in a turn, and how it is read.

    hermes        <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    qwen3_coder   <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    glm           <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    llama3        {"name": "f", "parameters": {"a": 1}}; {...}          the whole turn
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
                  [TOOL_CALLS]f[ARGS]{"a": 1}                           newer models
    deepseek      <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>

The format is the one whose marks the chat template has. A value of `qwen3_coder` and `glm` is text;
the tool's schema says whether it is JSON.
"""
# ruff: noqa: RUF001, RUF002 - the tags of DeepSeek have a wide bar

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from relax_events.events.json_text import parse_json

Call = tuple[str, Mapping[str, Any]]
"""A tool's name, and its arguments."""
Schemas = Mapping[str, Mapping[str, Any]]
"""The schemas of the arguments by tool."""
NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_-]")
"""Characters that ids of tool calls may not have in every dialect."""


class MalformedCall(Exception):
    """A tool call can't be read; the text is the reason in one word, for a counter."""


class NoCall(Exception):
    """The matched block is ordinary text."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        name: As `environment.tool_call_format` has it.
        template_marks: A chat template with such a mark writes the format.
        blocks: Matches a call with its tags; group 1 is the argument of `read`.
        read: Returns the calls of a block; raises MalformedCall, or NoCall.
        openers: Begin a call; an opener that is left over has no end.
        wrappers: Stand around all calls of a turn.
        takes_text: Whether the chat template takes the arguments as text, not as an object.
        has_short_ids: Whether the chat template demands alphanumeric ids of nine characters.
    """

    name: str
    template_marks: tuple[str, ...]
    blocks: re.Pattern[str]
    read: Callable[[str, Schemas], Sequence[Call]]
    openers: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    takes_text: bool = False
    has_short_ids: bool = False

    def call_id(self, name: str, number: int) -> str:
        """Return the id of a turn's call.

        Args:
            name: Of the turn, unique in the run.
            number: Of the call in the turn.
        """
        if self.has_short_ids:
            return blake2b(f"{name}-{number}".encode(), digest_size=5).hexdigest()[:9]
        return f"call_{NOT_IN_IDS.sub('-', name)}-{number}"


def index_schemas(tools: str) -> Schemas:
    """Return the schemas of the arguments of tools, a JSON list, by name."""
    functions = [tool.get("function") or tool for tool in parse_json(tools or "[]")]
    return {str(one["name"]): one.get("parameters") or {} for one in functions if "name" in one}


def read_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        MalformedCall: It is none.
    """
    try:
        return parse_json(text)
    except ValueError:
        raise MalformedCall("not_json") from None


def _named(call: Any, *, key: str) -> Call:
    """Return a call of the form {"name": ..., key: {...}}."""
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        raise MalformedCall("no_name")
    if not isinstance(arguments := call.get(key, {}), dict):
        raise MalformedCall("arguments_no_object")
    return name, arguments


def _read_hermes(text: str, schemas: Schemas) -> list[Call]:
    return [_named(read_json(text), key="arguments")]


FUNCTION = re.compile(r"\A<function=([^>\n]+)>(.*)</function>\Z", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_qwen3_coder(text: str, schemas: Schemas) -> list[Call]:
    if (function := FUNCTION.match(text.strip())) is None:
        raise MalformedCall("no_name")
    name = function.group(1).strip()
    return [(name, _read_pairs(PARAMETER, function.group(2), schemas.get(name, {})))]


def _read_glm(text: str, schemas: Schemas) -> list[Call]:
    name, mark, rest = text.partition("<arg_key>")
    if not (name := name.strip()) or "\n" in name or "<" in name or "{" in name:
        raise MalformedCall("no_name")
    return [(name, _read_pairs(ARGUMENT, mark + rest, schemas.get(name, {})))]


def _read_pairs(pattern: re.Pattern[str], text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with their values, and refuse a text that has something else."""
    arguments, end = {}, 0
    for pair in pattern.finditer(text):
        if text[end : pair.start()].strip():
            break
        key = pair.group(1).strip()
        arguments[key] = _typed(pair.group(2), (schema.get("properties") or {}).get(key))
        end = pair.end()
    if text[end:].strip():
        raise MalformedCall("broken_argument")
    return arguments


def _typed(value: str, schema: Any) -> Any:
    """Return a value as its schema says: text, or the JSON that it is; text if it is none."""
    kinds = schema.get("type", ()) if isinstance(schema, Mapping) else ()
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if not kinds or "string" in kinds:
        return value
    try:
        return parse_json(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


def _read_llama3(text: str, schemas: Schemas) -> list[Call]:
    """Read a turn that is nothing but calls; without a tag, only of tools that were offered."""
    is_tagged = text.startswith(PYTHON_TAG)
    try:
        values = _read_values(text.removeprefix(PYTHON_TAG))
        calls = [_named(value, key="parameters") for value in values]
    except MalformedCall:
        if is_tagged:
            raise
        raise NoCall from None
    if not is_tagged and any(name not in schemas for name, _ in calls):
        raise NoCall
    return calls


def _read_values(text: str) -> list[Any]:
    """Return JSON objects with semicolons between them."""
    try:
        return [parse_json(text)]
    except ValueError:
        pieces, values = text.split(";"), []
    begun = ""
    for piece in pieces:
        begun += piece
        try:
            values.append(parse_json(begun))
            begun = ""
        except ValueError:
            begun += ";"
    if begun.strip("; \n"):
        raise MalformedCall("not_json")
    return values


MISTRAL_CALL = re.compile(
    r"\A\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(\{.*)\Z", re.DOTALL
)


def _read_mistral(text: str, schemas: Schemas) -> list[Call]:
    if text.lstrip().startswith("["):
        calls = read_json(text)
        return [_named(call, key="arguments") for call in calls]
    if (match := MISTRAL_CALL.match(text)) is None:
        raise MalformedCall("no_name")
    return [_named({"name": match[1], "arguments": read_json(match[2])}, key="arguments")]


FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)


def _read_deepseek(text: str, schemas: Schemas) -> list[Call]:
    head, mark, rest = text.partition("<｜tool▁sep｜>")
    if not mark:
        raise MalformedCall("no_name")
    if head.strip() == "function":  # V3 and R1: the type, and after it name and fenced arguments
        head, _, rest = rest.partition("\n")
    fenced = FENCE.match(rest.strip())
    arguments = read_json(fenced[1] if fenced else rest)
    return [_named({"name": head.strip(), "arguments": arguments}, key="arguments")]


PYTHON_TAG = "<|python_tag|>"
_block = partial(re.compile, flags=re.DOTALL)
TAGGED = _block(r"<tool_call>\s*(.*?)\s*</tool_call>")
FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat(
            "qwen3_coder",
            ("<function=",),
            _block(r"(?:<tool_call>\s*)?(<function=.*?</function>)(?:\s*</tool_call>)?"),
            _read_qwen3_coder,
            ("<tool_call>", "<function="),
        ),
        ToolFormat("glm", ("<arg_key>",), TAGGED, _read_glm, ("<tool_call>",)),
        ToolFormat(
            "mistral",
            ("[TOOL_CALLS]",),
            _block(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|\Z)"),
            _read_mistral,
            ("[TOOL_CALLS]",),
            has_short_ids=True,
        ),
        ToolFormat(
            "deepseek",
            ("<｜tool▁call▁begin｜>",),
            _block(r"\s*<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>"),
            _read_deepseek,
            ("<｜tool▁call▁begin｜>",),
            wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            takes_text=True,
        ),
        ToolFormat(
            "llama3",
            (PYTHON_TAG, '"parameters": dictionary of argument name and its value'),
            _block(r"\A\s*((?:<\|python_tag\|>|\{).*)\Z"),
            _read_llama3,
            (PYTHON_TAG,),
        ),
        ToolFormat("hermes", ("<tool_call>",), TAGGED, _read_hermes, ("<tool_call>",)),
    )
}
"""By name; of several whose marks a chat template has, the first."""
DEFAULT = "hermes"


def choose_format(name: str, *, template: str) -> ToolFormat:
    """Return the format of a name; `auto` chooses by the chat template.

    Args:
        name: A key of `FORMATS`, or `auto`.
        template: The text of the chat template.
    """
    if name != "auto":
        return FORMATS[name]
    marked = (
        one for one in FORMATS.values() if any(mark in template for mark in one.template_marks)
    )
    return next(marked, FORMATS[DEFAULT])
