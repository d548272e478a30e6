"""How model families write tool calls: where a call stands in a turn, and how it is read.

    hermes        <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    qwen3_coder   <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    glm           <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    llama3        {"name": "f", "parameters": {"a": 1}}; {...}          the whole turn
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
                  [TOOL_CALLS]f[ARGS]{"a": 1}                           newer models
    deepseek      <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>

The format is the one whose marks the chat template has. A value of `qwen3_coder` and `glm` is text;
the tool's schema says whether it is JSON. Objects have their arguments under `arguments` or
`parameters`, and may stand inside of `function`, as in OpenAI's form, or in a list.
"""
# ruff: noqa: RUF001, RUF002 - the tags of DeepSeek have a wide bar

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from types import NoneType
from typing import Any

from relax_events.events.json_text import (
    TOO_DEEP,
    RepeatedKey,
    build_object,
    decode_begin,
    decode_json,
    parse_json,
    refuse_constant,
)

Call = tuple[str, Mapping[str, Any]]
"""A tool's name, and its arguments."""
Schemas = Mapping[str, Mapping[str, Any]]
"""The schemas of the arguments by tool."""
ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = frozenset({"name", "id", "type", *ARGUMENT_KEYS})
ARGUMENTS_MISSING = "arguments_missing"
KINDS: Mapping[Any, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": float,
    "array": list,
    "object": dict,
    "null": NoneType,
}
"""The types of JSON by their names in schemas; a bool is an int in Python, so it comes first."""
UNLIKE_TEXT = frozenset({"array", "object", "null"})
"""Kinds whose JSON is hardly ever meant as text; a number where text is allowed is text."""
PYTHON_VALUES = {"True": True, "False": False, "None": None}
MAX_SCHEMA_DEPTH = 16
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
        blocks: Matches a call with its tags; group 1 is the argument of `read`, None for a call
            without an end, which is the rest of the turn: each character is read once.
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
    return {
        str(one["name"]): schema if isinstance(schema := one.get("parameters"), dict) else {}
        for one in functions
        if "name" in one
    }


def require_arguments(call: Call, schemas: Schemas) -> None:
    """Refuse a call without the arguments that its tool requires.

    Raises:
        MalformedCall: One is missing.
    """
    name, arguments = call
    required = schemas.get(name, {}).get("required")
    if isinstance(required, list) and not all(key in arguments for key in required):
        raise MalformedCall(ARGUMENTS_MISSING)


def read_json(text: str) -> Any:
    """Parse JSON; integers of any size are exact.

    Raises:
        MalformedCall: It is none, is nested too deep, or an object has a key twice.
    """
    with _named_reasons():
        return decode_json(text, parse_constant=refuse_constant, object_pairs_hook=build_object)


@contextmanager
def _named_reasons() -> Iterator[None]:
    """Raise errors of the JSON decoder as MalformedCall."""
    try:
        yield
    except RepeatedKey:
        raise MalformedCall("key_twice") from None
    except ValueError as error:
        is_deep = str(error) == TOO_DEEP
        raise MalformedCall("nested_too_deep" if is_deep else "not_json") from None


def _read_call(call: Any) -> Call:
    """Return a call of the form {"name": ..., "arguments": {...}}."""
    call = _unwrap(call)
    if not isinstance(name := call.get("name"), str) or not name:
        raise MalformedCall("no_name")
    present = [key for key in ARGUMENT_KEYS if key in call]
    if len(present) > 1:
        raise MalformedCall("arguments_twice")
    if call.keys() - CALL_KEYS:
        raise MalformedCall("unknown_key" if present else ARGUMENTS_MISSING)
    arguments = call[present[0]] if present else None
    if not isinstance(arguments, dict | None):
        raise MalformedCall("arguments_no_object")
    return name, arguments or {}


def _unwrap(call: Any) -> dict[str, Any]:
    """Return the object that has the name: the one in `function`, in OpenAI's form."""
    if not isinstance(call, dict):
        raise MalformedCall("no_name")
    function = call.get("function")
    return function if isinstance(function, dict) and "name" not in call else call


def _read_calls(value: Any) -> list[Call]:
    """Return the calls of an object, or of a list of objects."""
    if not (calls := value if isinstance(value, list) else [value]):
        raise MalformedCall("no_name")
    return [_read_call(call) for call in calls]


def _read_hermes(text: str, schemas: Schemas) -> list[Call]:
    return _read_calls(read_json(text.strip()))


FUNCTION = re.compile(r"\A<function=([^>\n]+)>(.*)</function>\Z", re.DOTALL)
PARAMETER = re.compile(r"\s*+<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
ARGUMENT = re.compile(
    r"\s*+<arg_key>(?>(.*?)</arg_key>)\s*+<arg_value>(.*?)</arg_value>", re.DOTALL
)


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
    arguments, end = dict[str, Any](), 0
    while (pair := pattern.match(text, end)) is not None:
        if (key := pair.group(1).strip()) in arguments:
            raise MalformedCall("key_twice")
        arguments[key] = _typed(pair.group(2), _list_kinds(_find_property(schema, key), schema))
        end = pair.end()
    if text[end:].strip():
        raise MalformedCall("broken_argument")
    return arguments


def _find_property(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _list_kinds(schema: Any, root: Mapping[str, Any], *, depth: int = 0) -> set[str]:
    """Return the JSON types that a schema allows, as far as it names them.

    Args:
        schema: Of a value.
        root: The schema that its references point into.
        depth: How many schemas it stands in; references may be circular.
    """
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return set()
    names = schema.get("type")
    kinds = set(filter(KINDS.__contains__, names if isinstance(names, list) else [names]))
    kinds |= {_name_kind(value) for value in [*_get_list(schema, "enum"), *_list_const(schema)]}
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _get_list(schema, key)]
    parts.append(_follow(schema.get("$ref"), root))
    return kinds.union(*(_list_kinds(part, root, depth=depth + 1) for part in parts))


def _get_list(schema: Mapping[str, Any], key: str) -> list[Any]:
    return values if isinstance(values := schema.get(key), list) else []


def _list_const(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else []


def _follow(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return what a reference like `#/$defs/Point` points at; None if there is no such thing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    target: Any = root
    for name in reference[2:].split("/"):
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


def _name_kind(value: Any) -> str:
    return next((name for name, types in KINDS.items() if isinstance(value, types)), "number")


def _typed(value: str, kinds: set[str]) -> Any:
    """Return a value as one of its kinds: text, or the JSON that it is; text if it is none."""
    if not kinds - {"string"}:
        return value
    try:
        parsed = read_json(value)
    except MalformedCall:
        parsed = PYTHON_VALUES.get(value.strip(), value)
    if "string" in kinds and _name_kind(parsed) not in kinds & UNLIKE_TEXT:
        return value
    return parsed


def _read_llama3(text: str, schemas: Schemas) -> list[Call]:
    """Read a turn that is nothing but calls; without a tag, only of tools that were offered."""
    is_tagged = text.startswith(PYTHON_TAG)
    try:
        values = _read_values(text.removeprefix(PYTHON_TAG))
        names = [_unwrap(value).get("name") for value in values]
    except MalformedCall:
        if is_tagged:
            raise
        raise NoCall from None
    if not is_tagged and not all(isinstance(name, str) and name in schemas for name in names):
        raise NoCall
    return _read_calls(values)


DECODER = json.JSONDecoder(parse_constant=refuse_constant, object_pairs_hook=build_object)
SEMICOLON = re.compile(r"\s*+(?:;\s*+|\Z)")


def _read_values(text: str) -> list[Any]:
    """Return JSON objects with semicolons between them, or those of one list."""
    text = text.strip().rstrip("; \n")
    values, end = list[Any](), 0
    while end < len(text) or not values:
        with _named_reasons():
            value, end = decode_begin(text, end, decoder=DECODER)
        values.append(value)
        if (gap := SEMICOLON.match(text, end)) is None:
            raise MalformedCall("not_json")
        end = gap.end()
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


MISTRAL_CALL = re.compile(
    r"\A\s*+([^\[\]{}\s]++)\s*+(?:\[CALL_ID\][^\[]*+)?+(?:\[ARGS\])?+\s*+(\{.*)\Z", re.DOTALL
)


def _read_mistral(text: str, schemas: Schemas) -> list[Call]:
    if text.lstrip().startswith("["):
        return _read_calls(read_json(text))
    if (match := MISTRAL_CALL.match(text)) is None:
        raise MalformedCall("no_name")
    return [_read_call({"name": match[1], "arguments": read_json(match[2])})]


FENCE = re.compile(r"\A```(?:json)?+(.*)```\Z", re.DOTALL)


def _read_deepseek(text: str, schemas: Schemas) -> list[Call]:
    head, mark, rest = text.partition("<｜tool▁sep｜>")
    if not mark:
        raise MalformedCall("no_name")
    if head.strip() == "function":  # V3 and R1: the type, and after it name and fenced arguments
        head, _, rest = rest.partition("\n")
    fenced = FENCE.match(rest.strip())
    arguments = read_json(fenced[1].strip() if fenced else rest)
    return [_read_call({"name": head.strip(), "arguments": arguments})]


PYTHON_TAG = "<|python_tag|>"
_block = partial(re.compile, flags=re.DOTALL)
TAGGED = _block(r"<tool_call>(?:(.*?)</tool_call>|.*)")
FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat(
            "qwen3_coder",
            ("<function=",),
            _block(
                r"(?:<tool_call>\s*+)?"
                r"(?:(<function=.*?</function>)(?:\s*+</tool_call>)?|<function=.*)"
            ),
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
            _block(r"(?<!\s)\s*+<｜tool▁call▁begin｜>(?:(.*?)<｜tool▁call▁end｜>|.*)"),
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
