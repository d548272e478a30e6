"""Talk with a gateway by the clients of OpenAI and Anthropic: argv has its address and a key.

The policy says in turn: a tool call, an answer with reasoning. The last line printed is JSON.
"""

from __future__ import annotations

import json
import sys

import anthropic
import openai

URL, KEY = sys.argv[1:]
SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}
ASKED = "What is the value?"
RESULT = "42"


def chat(client: openai.OpenAI, *, is_streamed: bool) -> str:
    """Call a tool through chat completions, and return the last answer."""
    function = {"name": "look", "description": "", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": f"chat {is_streamed}: {ASKED}"}]
    if is_streamed:
        calls: list[tuple[str, str, str]] = []
        for chunk in client.chat.completions.create(
            model="any", messages=messages, tools=tools, stream=True, parallel_tool_calls=False
        ):
            calls += [
                (call.id, call.function.name, call.function.arguments)
                for call in chunk.choices[0].delta.tool_calls or ()
            ]
        ((identity, name, arguments),) = calls
        call = {"name": name, "arguments": arguments}
        calls_back = [{"id": identity, "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls_back})
    else:
        message = (
            client.chat.completions.create(model="any", messages=messages, tools=tools)
            .choices[0]
            .message
        )
        identity = message.tool_calls[0].id
        messages.append(message.model_dump())
    messages.append({"role": "tool", "tool_call_id": identity, "content": RESULT})
    last = client.chat.completions.create(model="any", messages=messages, tools=tools)
    return str(last.choices[0].message.content)


def respond(client: openai.OpenAI, *, is_streamed: bool) -> str:
    """Call a tool through responses, and return the last answer."""
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
    items = [{"role": "user", "content": f"responses {is_streamed}: {ASKED}"}]
    if is_streamed:
        with client.responses.stream(model="any", input=items, tools=tools) as stream:
            kinds = [event.type for event in stream]
            first = stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds, kinds
    else:
        first = client.responses.create(model="any", input=items, tools=tools)
    (call,) = [item for item in first.output if item.type == "function_call"]
    items += [item.to_dict() for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
    return str(client.responses.create(model="any", input=items, tools=tools).output_text)


def respond_by_id(client: openai.OpenAI) -> str:
    """Call a tool through responses that are kept, and return the last answer."""
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
    first = client.responses.create(model="any", input=f"kept: {ASKED}", tools=tools)
    (call,) = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    return str(
        client.responses.create(
            model="any", input=[output], tools=tools, previous_response_id=first.id
        ).output_text
    )


def message(client: anthropic.Anthropic, *, is_streamed: bool) -> str:
    """Call a tool through messages, and return the last answer."""
    tools = [{"name": "look", "description": "", "input_schema": SCHEMA}]
    messages = [{"role": "user", "content": f"messages {is_streamed}: {ASKED}"}]
    settings = {"model": "any", "max_tokens": 100, "tools": tools}
    if is_streamed:
        with client.messages.stream(messages=messages, **settings) as stream:
            first = stream.get_final_message()
    else:
        first = client.messages.create(messages=messages, **settings)
    assert first.stop_reason == "tool_use", first
    (call,) = [block for block in first.content if block.type == "tool_use"]
    messages.append({"role": "assistant", "content": [one.to_dict() for one in first.content]})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    messages.append({"role": "user", "content": [result]})
    counted = client.messages.count_tokens(model="any", messages=messages, tools=tools)
    last = client.messages.create(messages=messages, **settings)
    assert last.usage.input_tokens == counted.input_tokens, (last, counted)
    return "".join(block.text for block in last.content if block.type == "text")


def run_tools(client: anthropic.Anthropic) -> str:
    """Have the client call the tool, which wants a thread of the server at first."""

    @anthropic.beta_tool
    def look(key: str) -> str:
        """Look a value up.

        Args:
            key: Its key.
        """
        return RESULT

    messages = [{"role": "user", "content": f"runner: {ASKED}"}]
    settings = {"model": "any", "max_tokens": 100, "messages": messages, "tools": [look]}
    last = client.beta.messages.tool_runner(**settings).until_done()
    return "".join(block.text for block in last.content if block.type == "text")


def errors() -> list[str]:
    """Return the classes of the errors that bad calls raise."""
    other = openai.OpenAI(base_url=f"{URL}/v1", api_key="other", timeout=60)
    claude = anthropic.Anthropic(base_url=URL, api_key=KEY, timeout=60)
    long = [{"role": "user", "content": "long " * 5000}]
    found = []
    for call in (
        lambda: other.responses.create(model="any", input="a"),
        lambda: claude.messages.create(model="any", max_tokens=9, messages=long),
        lambda: list(claude.messages.create(model="any", max_tokens=9, messages=long, stream=True)),
    ):
        try:
            call()
        except (openai.APIError, anthropic.APIError) as error:
            found.append(type(error).__name__)
    return found


def main() -> None:
    """Have each conversation once, and print the last answers."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=60)
    claude = anthropic.Anthropic(base_url=URL, api_key=KEY, timeout=60)
    answers = [
        *(chat(client, is_streamed=streamed) for streamed in (False, True)),
        *(respond(client, is_streamed=streamed) for streamed in (False, True)),
        respond_by_id(client),
        *(message(claude, is_streamed=streamed) for streamed in (False, True)),
        run_tools(claude),
    ]
    models = [client.models.list().data[0].id, claude.models.list().data[0].id]
    print(json.dumps({"answers": answers, "errors": errors(), "models": models}))


main()
