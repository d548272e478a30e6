"""An agent that shows the policy images and audio by the clients of OpenAI and Anthropic, in
messages and in results of tools: argv has the folder of the files, and whether the policy hears.
Each conversation is a path of its own, its first text names it.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai

FOLDER, HEARS = Path(sys.argv[1]), sys.argv[2] == "hears"
MODEL, MAX_TOKENS = "any", 4


def encoded(name: str) -> str:
    """Return a file of the test in base64."""
    return base64.b64encode((FOLDER / name).read_bytes()).decode()


FIRST, SECOND = encoded("first.png"), encoded("second.png")


def chat(client: openai.OpenAI) -> None:
    """Show images, and audio if the policy hears, through chat completions."""
    first, second = (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}}
        for one in (FIRST, SECOND)
    )
    shown: list[dict[str, Any]] = [{"type": "text", "text": "chat"}, first]
    if HEARS:
        sound = {"data": encoded("sound.wav"), "format": "wav"}
        shown.append({"type": "input_audio", "input_audio": sound})
    messages: list[Any] = [{"role": "user", "content": shown}]
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=MAX_TOKENS, stream=True
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    messages.append({"role": "assistant", "content": said})
    messages.append({"role": "tool", "tool_call_id": "a", "content": [second]})
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=MAX_TOKENS)


def respond(client: openai.OpenAI) -> None:
    """Show images through responses, the second by the id of the first answer."""
    first, second = (
        {"type": "input_image", "image_url": f"data:image/png;base64,{one}", "detail": "auto"}
        for one in (FIRST, SECOND)
    )
    content = [{"type": "input_text", "text": "responses"}, first]
    answer = client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": content}],
        max_output_tokens=MAX_TOKENS,
    )
    result = {"type": "function_call_output", "call_id": "a", "output": [second]}
    client.responses.create(
        model=MODEL,
        input=[result],
        previous_response_id=answer.id,
        max_output_tokens=MAX_TOKENS,
    )


def message(client: anthropic.Anthropic) -> None:
    """Show images through messages."""
    first, second = (
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": one},
        }
        for one in (FIRST, SECOND)
    )
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "messages"}, first]}
    ]
    with client.messages.stream(model=MODEL, messages=messages, max_tokens=MAX_TOKENS) as stream:
        answer = stream.get_final_message()
    messages.append({"role": "assistant", "content": [one.to_dict() for one in answer.content]})
    result = {"type": "tool_result", "tool_use_id": "a", "content": [second]}
    messages.append({"role": "user", "content": [result]})
    client.messages.create(model=MODEL, messages=messages, max_tokens=MAX_TOKENS)


def main() -> None:
    """Have each conversation."""
    chat(openai.OpenAI(timeout=60))
    respond(openai.OpenAI(timeout=60))
    message(anthropic.Anthropic(base_url=os.environ["ANTHROPIC_BASE_URL"], timeout=60))


main()
