"""Messages in the form of OpenAI's chat, which rows, programs and chat templates have.

    dict --> parse_message --> ChatMessage --> print_message --> dict

Tools are the text of a JSON list everywhere, empty where there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from relax_events.errors import PoisonSample
from relax_events.events.json_text import format_json, parse_json
from relax_events.events.parts import ChatMessage, ContentPart, Modality, ToolCall

Tool = Mapping[str, Any]
PartReader = Callable[[Any], ContentPart]
"""Reads a part of a content that is no text; raises PoisonSample if it can't be used."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names that servers and chat templates have for an assistant's thoughts."""
MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", *REASONING_FIELDS}
)
MEDIA_KEYS = ("image", "video", "audio", "input_audio")
"""How keys begin that hold files."""
LOST_FIELDS = ("function", "tools", "refusal", "reasoning_details", "thinking_blocks", "prefix")
"""How fields of messages begin elsewhere that the policy would read, and that no prompt shows."""
SYSTEM = "system"
FOREIGN_ROLES = {
    **dict.fromkeys(("gpt", "model", "bot", "chatgpt", "ai"), "assistant"),
    "human": "user",
}
"""Roles that most chat templates print as they are, which no model was trained on."""
ECHOED_FIELDS = frozenset({"refusal", "annotations"})
"""Fields of OpenAI's answers that clients send back, and that no prompt shows."""


def refuse_part(part: Any) -> NoReturn:
    """Refuse a part that is no text; see `PartReader`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    raise PoisonSample(f"a message has a part of type {kind!r}; this gateway takes text parts only")


def refuse_unknown_fields(message: Mapping[str, Any], *, what: str) -> None:
    """Refuse a message with a field that would get lost.

    Raises:
        PoisonSample: It has one; the text names it.
    """
    for field, value in message.items():
        if value is not None and field not in MESSAGE_FIELDS | ECHOED_FIELDS:
            raise PoisonSample(
                f"{what} has the field {field!r}, which no prompt shows; leave it out"
            )


def refuse_lost_fields(message: Mapping[str, Any], *, what: str) -> None:
    """Refuse a row's message with a field that would get lost and has something to read or learn,
    and one of a role that other datasets have.

    Raises:
        PoisonSample: It has one, or two different thoughts; the text names the field or role.
    """
    if role := FOREIGN_ROLES.get(str(message.get("role"))):
        raise PoisonSample(f"{what} has the role {message['role']!r}; write {role!r}")
    for field, value in message.items():
        if value and field.startswith((*LOST_FIELDS, *MEDIA_KEYS)):
            raise PoisonSample(f"{what} has {field}, which no prompt shows; leave it out")
        is_weight = field in ("weight", "loss", "train") and message["role"] == "assistant"
        if is_weight and value not in (None, 1):
            raise PoisonSample(
                f"{what} has {field} = {value!r:.40}; leave out, or set data.train_on"
            )
    if len({str(message[field]) for field in REASONING_FIELDS if message.get(field)}) > 1:
        raise PoisonSample(f"{what} has several thoughts; keep one of {REASONING_FIELDS}")


def parse_message(
    message: Mapping[str, Any], *, what: str = "a message", read_part: PartReader = refuse_part
) -> ChatMessage:
    """Parse a message; other fields than those of `MESSAGE_FIELDS` are ignored. A developer's
    message is a system message, since chat templates know one name of it.

    Args:
        message: In OpenAI's form, its thoughts under one of `REASONING_FIELDS`.
        what: Names it in errors.
        read_part: Reads the parts of its content that are no text.
    Raises:
        PoisonSample: A field has another type; the text names it.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise PoisonSample(f"{what} has no role")
    role = SYSTEM if role == "developer" else role
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise PoisonSample(f"{what} has tool_calls that are no list")
    thoughts = (_read_text(message, field, what) for field in REASONING_FIELDS)
    return ChatMessage(
        role,
        parse_content(message.get("content"), what=what, read_part=read_part),
        reasoning=next(filter(None, thoughts), ""),
        tool_calls=[_parse_call(call, what) for call in calls],
        name=_read_text(message, "name", what),
        tool_call_id=_read_text(message, "tool_call_id", what),
    )


def parse_content(
    content: Any, *, what: str = "a message", read_part: PartReader = refuse_part
) -> list[ContentPart]:
    """Parse a content: nothing, a text, or a list of parts; neighbouring texts become one.

    Raises:
        PoisonSample: It is none of these, or as `read_part`.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [ContentPart(Modality.TEXT, content)]
    if not isinstance(content, list | tuple):
        raise PoisonSample(f"{what} has a content that is neither text nor a list of parts")
    parts: list[ContentPart] = []
    for each in content:
        part = _parse_part(each, read_part)
        if parts and part.kind is parts[-1].kind is Modality.TEXT:
            part = ContentPart(Modality.TEXT, f"{parts.pop().text}{part.text}")
        parts.append(part)
    return parts


def _parse_part(part: Any, read_part: PartReader) -> ContentPart:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    has_file = is_text and any(part[key] for key in part if key.startswith(MEDIA_KEYS))
    if is_text and isinstance(text := part.get("text"), str) and not has_file:
        return ContentPart(Modality.TEXT, text)
    return read_part(part)


def _parse_call(call: Any, what: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise PoisonSample(f"{what} has a tool call without a function's name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, str):
        arguments = write_json(arguments, what=f"the arguments of {name!r}")
    parsed = ToolCall(name, arguments, str(call.get("id") or ""))
    if isinstance(value := parse_arguments(parsed), dict) or value is arguments:
        return parsed
    raise PoisonSample(
        f"{what} has a call of {name!r} with the arguments {arguments!r:.80}; write a JSON object"
    )


def _read_text(message: Mapping[str, Any], field: str, what: str) -> str:
    value = message.get(field)
    if value is not None and not isinstance(value, str):
        raise PoisonSample(f"{what} has {field} that is no text")
    return value or ""


def write_json(value: Any, *, what: str) -> str:
    """Return a value as JSON text.

    Raises:
        PoisonSample: It can't be written; the text begins with `what`.
    """
    try:
        return format_json(value)
    except (TypeError, ValueError) as error:
        raise PoisonSample(f"{what} are no JSON that can be shown: {error}") from None


def print_message(
    message: ChatMessage,
    *,
    show_part: Callable[[ContentPart], dict[str, Any]] = lambda part: {"type": part.kind.value},
    parses_arguments: bool = False,
    reasoning_field: str = REASONING_FIELDS[0],
) -> dict[str, Any]:
    """Return a message in OpenAI's form, without empty fields.

    Args:
        message: The message.
        show_part: Returns a part that is no text.
        parses_arguments: Whether arguments of tool calls that are JSON are parsed, as most chat
            templates read them.
        reasoning_field: The name of its thoughts.
    """
    content: str | list[dict[str, Any]] = message.text
    if any(part.kind is not Modality.TEXT for part in message.parts):
        content = [
            {"type": "text", "text": part.text or ""}
            if part.kind is Modality.TEXT
            else show_part(part)
            for part in message.parts
        ]
    fields = {
        reasoning_field: message.reasoning,
        "tool_calls": [_print_call(call, parses_arguments) for call in message.tool_calls],
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    shown = {field: value for field, value in fields.items() if value}
    return {"role": message.role, "content": content} | shown


def _print_call(call: ToolCall, parses_arguments: bool) -> dict[str, Any]:
    arguments = parse_arguments(call) if parses_arguments else call.arguments
    function = {"name": call.name, "arguments": arguments}
    head = {"id": call.id} if call.id else {}
    return head | {"type": "function", "function": function}


def continue_turn(begun: ChatMessage, rest: ChatMessage) -> ChatMessage:
    """Return the message of a turn that a conversation begins and the policy ends."""
    *parts, last = begun.parts or [ContentPart(Modality.TEXT, "")]
    first, *others = rest.parts or [ContentPart(Modality.TEXT, "")]
    if last.kind is first.kind is Modality.TEXT:
        parts.append(ContentPart(Modality.TEXT, f"{last.text}{first.text}"))
    else:
        parts += last, first
    return replace(
        rest,
        parts=[*parts, *others],
        reasoning=begun.reasoning + rest.reasoning,
        tool_calls=[*begun.tool_calls, *rest.tool_calls],
        name=begun.name or rest.name,
    )


def parse_arguments(call: ToolCall) -> Any:
    """Return the value of a tool call's arguments; their text if it is no JSON."""
    try:
        return parse_json(call.arguments)
    except ValueError:
        return call.arguments


def describe_message(
    message: ChatMessage, *, show_part: Callable[[ContentPart], str] = lambda part: part.text or ""
) -> str:
    """Return a message for people: its thoughts, its content and its tool calls.

    Args:
        message: The message.
        show_part: Returns a part of its content.
    """
    thoughts = f"<think>{message.reasoning}</think>" if message.reasoning else ""
    content = "".join(map(show_part, message.parts))
    calls = (f"{call.name}({call.arguments})" for call in message.tool_calls)
    return "\n".join(filter(None, [thoughts, content, *calls]))


def list_texts(messages: Iterable[ChatMessage]) -> Iterator[str]:
    """Yield all texts of messages, those of tool calls and names among them."""
    for message in messages:
        yield from (message.role, message.reasoning, message.name, message.tool_call_id)
        yield from (part.text for part in message.parts if part.text)
        for call in message.tool_calls:
            yield from (call.name, call.arguments, call.id)


def count_text_bytes(messages: Iterable[ChatMessage], *, tools: str = "") -> int:
    """Return how many bytes of text messages and tools have, without media."""
    texts = (tools, *list_texts(messages))
    return sum(len(text.encode("utf-8", "replace")) for text in texts)
