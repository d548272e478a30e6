"""The dialect of OpenAI's responses: the answer, whole and as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relax_events.api.drivers import Node
from relax_events.data.conversations import ASSISTANT
from relax_events.packages.gateway.dialect import (
    AnswerHead,
    Problem,
    count_tokens,
    is_cut_off,
    named_event,
)


def response_id(head: AnswerHead) -> str:
    """Return the id under which a later call may name an answer."""
    return f"resp_{head.name}"


def build_response(
    node: Node, head: AnswerHead, *, request_fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an answer.

    Args:
        node: The turn.
        head: Of the answer.
        request_fields: The fields that it repeats of its call.
    """
    num_read, num_sampled = count_tokens(node)
    usage = {
        "input_tokens": num_read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_read + num_sampled,
    }
    ended: dict[str, Any] = {"status": "completed"}
    if is_cut_off(node):
        reason = {"reason": "max_output_tokens"}
        ended = {"status": "incomplete", "incomplete_details": reason}
    return (
        _response(head, request_fields)
        | ended
        | {"output": list(_items(node, head)), "usage": usage}
    )


def answer_events(
    node: Node, head: AnswerHead, *, request_fields: Mapping[str, Any]
) -> Iterator[bytes]:
    """Yield the events of an answer: each item in one piece."""
    whole = build_response(node, head, request_fields=request_fields)
    begun = _response(head, request_fields)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(whole["output"]):
        position = {"output_index": index}
        field = ("arguments", "") if item["type"] == "function_call" else ("content", [])
        empty = {**item, "status": "in_progress", field[0]: field[1]}
        kinds.append(("response.output_item.added", position | {"item": empty}))
        kinds += _item_events(item, position | {"item_id": item["id"]})
        kinds.append(("response.output_item.done", position | {"item": item}))
    kinds.append((f"response.{whole['status']}", {"response": whole}))
    for number, (kind, fields) in enumerate(kinds):
        yield named_event(kind, {"type": kind, "sequence_number": number} | fields)


def failed_event(problem: Problem, head: AnswerHead, *, request_fields: Mapping[str, Any]) -> bytes:
    """Return the event that ends a stream without an answer."""
    kind = "response.failed"
    error = {"code": problem.code, "message": problem.text}
    response = _response(head, request_fields) | {"status": "failed", "error": error}
    return named_event(kind, {"type": kind, "sequence_number": 0, "response": response})


def _response(head: AnswerHead, request_fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": response_id(head),
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": [],
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        **request_fields,
    }


def _items(node: Node, head: AnswerHead) -> Iterator[dict[str, Any]]:
    """Yield a turn as output items; a turn without anything is an empty message."""
    reply = node.reply
    status = "incomplete" if is_cut_off(node) else "completed"
    if reply.reasoning:
        yield {
            "type": "reasoning",
            "id": f"rs_{head.name}",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": reply.reasoning}],
            "status": status,
        }
    if reply.text or not reply.tool_calls:
        yield {
            "type": "message",
            "id": f"msg_{head.name}",
            "role": ASSISTANT,
            "content": [
                {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
            ],
            "status": status,
        }
    for number, call in enumerate(reply.tool_calls):
        yield {
            "type": "function_call",
            "id": f"fc_{head.name}-{number}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": status,
        }


def _item_events(
    item: Mapping[str, Any], position: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of an item's content."""
    if item["type"] == "function_call":
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield f"{kind}.delta", {**position, "delta": arguments}
        yield f"{kind}.done", {**position, "name": item["name"], "arguments": arguments}
        return
    (part,) = item["content"]
    inner, kind = {**position, "content_index": 0}, part["type"]
    more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    yield "response.content_part.added", inner | {"part": {**part, "text": ""}}
    yield f"response.{kind}.delta", inner | more | {"delta": part["text"]}
    yield f"response.{kind}.done", inner | more | {"text": part["text"]}
    yield "response.content_part.done", inner | {"part": part}
