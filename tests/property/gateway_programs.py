"""Programs that keep their history in the form of one dialect, as a client of it would."""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from relax_events.packages.gateway.anthropic_dialect import AnthropicCall
from relax_events.packages.gateway.chat_dialect import ChatCall
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.dialect import AnswerHead, ModelCall
from relax_events.packages.gateway.responses_dialect import ResponsesCall

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
Item = dict[str, Any]


def copied(value: Any) -> Any:
    """Return a value as it is after a way through JavaScript, which writes 1.0 as 1."""
    return json.loads(json.dumps(value), parse_float=_number)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def read_events(stream: Sequence[bytes]) -> list[Item]:
    """Return the data of server-sent events."""
    lines = b"".join(stream).decode().splitlines()
    texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in texts if text != "[DONE]"]


def data_uri(image: bytes) -> str:
    """Return an image as a program names it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def images_of(value: Any) -> Iterator[bytes]:
    """Yield all images in a JSON value, in order."""
    if isinstance(value, list):
        for one in value:
            yield from images_of(one)
    elif isinstance(value, dict):
        if value.get("type") == "base64":
            yield base64.b64decode(value["data"])
        else:
            yield from images_of(list(value.values()))
    elif isinstance(value, str) and value.startswith("data:image/"):
        yield base64.b64decode(value.partition(",")[2])


class Program(ABC):
    """A program; `calls` are the ids of the tool calls of the last answer."""

    def __init__(self, text: str) -> None:
        self.history: list[Item] = []
        self.calls: list[str] = []
        self.say(text)

    @property
    def images(self) -> list[bytes]:
        """The images of the history, in order."""
        return list(images_of(self.history))

    async def ask(self, session: ChatSession, number: int, *, is_streamed: bool) -> None:
        """Have the policy answer, and append its turn."""
        call = self.parse(copied(self.body()))
        node = await session.chat(
            call.history(session),
            tools=call.write_tools(),
            max_tokens=call.bound,
            max_calls=call.max_calls,
        )
        head = AnswerHead(f"answer-{number}", "any", 0)
        call.record(session, node, head)
        whole = copied(call.answer(node, head))
        if is_streamed:
            joined = self.join(read_events(list(call.events(node, head))))
            assert joined == self.turn(whole)
        self.take(self.turn(whole), f"answer-{number}")

    def edit(self, index: int) -> None:
        """Replace a message of the history by another one."""
        self.history[index % len(self.history)] = self.user_message("edited")

    def compact(self) -> None:
        """Begin again with a summary."""
        self.history = []
        self.say("summary")

    def say(self, text: str, *images: bytes) -> None:
        """Append a message of the user."""
        self.history.append(self.user_message(text, *images))

    def user_message(self, text: str, *images: bytes) -> Item:
        """Return a message of the user."""
        return {"role": "user", "content": self.content(text, *images)}

    def continue_conversation(self, step: int, index: int, *images: bytes) -> None:
        """Change the history before the next call: edit a message at step 1, begin again with a
        summary at step 2, and answer the tool calls, if there are any, at others."""
        if step == 1:
            self.edit(index)
        if step == 2:
            self.compact()
        elif self.calls and step != 1:
            for call_id in self.calls:
                self.reply(call_id, str(step), *images)
        else:
            self.say(f"and {step}", *images)

    @abstractmethod
    def content(self, text: str, *images: bytes) -> Any:
        """Return a text, and images after it."""

    @abstractmethod
    def body(self) -> Item:
        """Return the body of the next call."""

    @abstractmethod
    def parse(self, body: Item) -> ModelCall:
        """Read a body as the gateway does."""

    @abstractmethod
    def turn(self, answer: Item) -> Any:
        """Return the policy's turn in an answer."""

    @abstractmethod
    def join(self, events: list[Item]) -> Any:
        """Return the policy's turn as the events of a stream give it."""

    @abstractmethod
    def take(self, turn: Any, name: str) -> None:
        """Append a turn of the policy, as clients send it back."""

    @abstractmethod
    def reply(self, call_id: str, text: str, *images: bytes) -> None:
        """Append the result of a tool."""


class ChatProgram(Program):
    """Speaks OpenAI's chat; it drops reasoning, and spells JSON and spaces in its own way."""

    def body(self) -> Item:
        tool = {"name": "look", "parameters": PARAMETERS}
        return {"messages": self.history, "tools": [{"type": "function", "function": tool}]}

    def parse(self, body: Item) -> ModelCall:
        return ChatCall.model_validate(body)

    def turn(self, answer: Item) -> Any:
        return answer["choices"][0]["message"]

    def join(self, events: list[Item]) -> Any:
        turn: Item = {"role": "assistant", "content": ""}
        for event in events:
            delta = event["choices"][0]["delta"]
            for key in ("content", "reasoning_content"):
                if key in delta:
                    turn[key] = turn.get(key, "") + delta[key]
            if "tool_calls" in delta:
                turn["tool_calls"] = [
                    {key: value for key, value in call.items() if key != "index"}
                    for call in delta["tool_calls"]
                ]
        if "tool_calls" in turn:
            turn["content"] = turn["content"] or None
        return turn

    def take(self, turn: Any, name: str) -> None:
        turn.pop("reasoning_content", None)
        for call in turn.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, sort_keys=True, indent=1)
        if turn["content"] is not None:
            turn["content"] = turn["content"].strip()
        self.history.append(turn)
        self.calls = [call["id"] for call in turn.get("tool_calls") or ()]

    def content(self, text: str, *images: bytes) -> Any:
        if not images:
            return text
        parts = [{"type": "image_url", "image_url": {"url": data_uri(one)}} for one in images]
        return [{"type": "text", "text": text}, *parts]

    def reply(self, call_id: str, text: str, *images: bytes) -> None:
        content = self.content(text, *images)
        self.history.append({"role": "tool", "tool_call_id": call_id, "content": content})


class ResponsesProgram(Program):
    """Speaks OpenAI's responses, and sends its items with each call."""

    def body(self) -> Item:
        tool = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": True}
        return {
            "input": self.history,
            "instructions": "be brief",
            "tools": [tool],
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }

    def parse(self, body: Item) -> ModelCall:
        return ResponsesCall.model_validate(body)

    def user_message(self, text: str, *images: bytes) -> Item:
        return {"type": "message", "role": "user", "content": self.content(text, *images)}

    def content(self, text: str, *images: bytes) -> Any:
        parts = [{"type": "input_image", "image_url": data_uri(one)} for one in images]
        return [{"type": "input_text", "text": text}, *parts]

    def turn(self, answer: Item) -> Any:
        return answer["output"]

    def join(self, events: list[Item]) -> Any:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        items: list[Item] = []
        for event in events:
            kind = event["type"]
            if kind == "response.output_item.added":
                items.append(event["item"])
            elif kind == "response.content_part.added":
                items[-1]["content"].append(event["part"])
            elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
                items[-1]["content"][-1]["text"] += event["delta"]
            elif kind == "response.function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            elif kind == "response.output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert items[-1] == event["item"]
        assert events[-1]["response"]["output"] == items
        return items

    def take(self, turn: Any, name: str) -> None:
        self.history += turn
        self.calls = [item["call_id"] for item in turn if item["type"] == "function_call"]

    def reply(self, call_id: str, text: str, *images: bytes) -> None:
        output = self.content(text, *images) if images else text
        self.history.append({"type": "function_call_output", "call_id": call_id, "output": output})


class StoredResponsesProgram(ResponsesProgram):
    """Speaks OpenAI's responses, and names the last answer instead of sending it."""

    previous = ""
    earlier: tuple[bytes, ...] = ()

    @property
    def images(self) -> list[bytes]:
        return [*self.earlier, *images_of(self.history)]

    def body(self) -> Item:
        return super().body() | {"previous_response_id": self.previous or None, "store": True}

    def take(self, turn: Any, name: str) -> None:
        super().take(turn, name)
        self.earlier = tuple(self.images)
        self.history, self.previous = [], f"resp_{name}"

    def edit(self, index: int) -> None:
        if self.history:
            super().edit(index)

    def compact(self) -> None:
        self.previous, self.earlier = "", ()
        super().compact()


class AnthropicProgram(Program):
    """Speaks Anthropic's messages; it drops empty texts, as that API wants it."""

    def body(self) -> Item:
        tool = {"name": "look", "description": "", "input_schema": PARAMETERS}
        return {
            "messages": self.history,
            "system": [
                {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}
            ],
            "tools": [tool],
            "max_tokens": 300,
        }

    def parse(self, body: Item) -> ModelCall:
        return AnthropicCall.model_validate(body)

    def turn(self, answer: Item) -> Any:
        return answer["content"]

    def join(self, events: list[Item]) -> Any:
        assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
        blocks: list[Item] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    blocks[event["index"]]["input"] = json.loads(delta["partial_json"])
                else:
                    key = delta["type"].removesuffix("_delta")
                    blocks[event["index"]][key] += delta[key]
        return blocks

    def take(self, turn: Any, name: str) -> None:
        blocks = [one for one in turn if one["type"] != "text" or one["text"].strip()]
        self.history.append({"role": "assistant", "content": blocks})
        self.calls = [one["id"] for one in turn if one["type"] == "tool_use"]

    def content(self, text: str, *images: bytes) -> Any:
        sources = [
            {"type": "base64", "media_type": "image/png", "data": base64.b64encode(one).decode()}
            for one in images
        ]
        blocks = [{"type": "image", "source": source} for source in sources]
        return [{"type": "text", "text": text}, *blocks]

    def reply(self, call_id: str, text: str, *images: bytes) -> None:
        content = self.content(text, *images)
        result = {"type": "tool_result", "tool_use_id": call_id, "content": content}
        self.history.append({"role": "user", "content": [result]})


PROGRAMS = (ChatProgram, ResponsesProgram, StoredResponsesProgram, AnthropicProgram)
