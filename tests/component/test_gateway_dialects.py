"""The dialects over HTTP, by programs against a real engine: one session, errors, streams."""

from __future__ import annotations

from pathlib import Path

import structlog
from gateway_agents import begin, episodes, finish

ANTHROPIC = """
def claude(body, path="/messages", key=os.environ["ANTHROPIC_API_KEY"]):
    status, text = post(path, body, key, header="x-api-key")
    return status, (text if body.get("stream") else json.loads(text))
def respond(body, key=os.environ["OPENAI_API_KEY"]):
    status, text = post("/responses", body, key)
    return status, (text if body.get("stream") else json.loads(text))
"""


def test_a_conversation_continues_in_another_dialect(tmp_path: Path) -> None:
    body = """
messages += [say(messages, max_tokens=4), {"role": "user", "content": "two"}]
status, found = respond({"input": messages, "max_output_tokens": 4})
assert status == 200 and found["object"] == "response", found
second = [part["text"] for item in found["output"] for part in item["content"]]
messages += [{"role": "assistant", "content": "".join(second)}]
messages += [{"role": "user", "content": "three"}]
status, counted = claude({"messages": messages}, "/messages/count_tokens")
status, found = claude({"messages": messages, "max_tokens": 4})
assert status == 200 and found["type"] == "message", found
assert found["usage"]["input_tokens"] == counted["input_tokens"], (found, counted)
status, found = claude({"messages": messages, "max_tokens": 4}, key="other")
assert status == 401 and found["error"]["type"] == "authentication_error", found
proxied = {"x-api-key": os.environ["ANTHROPIC_API_KEY"]}
counted = {"messages": messages}
assert post("/messages/count_tokens", counted, "a proxy's", others=proxied)[0] == 200
assert post("/messages/count_tokens", counted, "a proxy's", others={"x-api-key": "b"})[0] == 401
"""
    with structlog.testing.capture_logs() as logs, episodes(tmp_path, ANTHROPIC + body) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert sample.error == ""
    assert [turn.role for turn in sample.turns] == [*("assistant", "user") * 2, "assistant"]
    assert [one for one in logs if one["event"] == "session.forked"] == []


def test_a_response_is_continued_by_its_id(tmp_path: Path) -> None:
    body = """
more = {"instructions": "be brief", "max_output_tokens": 3}
status, first = respond({"input": "one"} | more)
status, second = respond({"input": "two", "previous_response_id": first["id"]} | more)
assert status == 200 and second["previous_response_id"] == first["id"], second
status, found = respond({"input": "two", "previous_response_id": "resp_other"} | more)
assert status == 400 and "no answer of this session" in found["error"]["message"], found
"""
    with episodes(tmp_path, ANTHROPIC + body, attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert sample.error == ""
    assert [message.role for message in sample.prompt_messages] == ["system", "user"]
    assert [turn.text for turn in sample.turns if turn.role == "user"] == ["two"]


def test_bad_calls_are_refused_in_the_words_of_their_dialect(tmp_path: Path) -> None:
    body = """
def refused(answer, text, kind="invalid_request_error", status=400):
    assert answer[0] == status and text in answer[1]["error"]["message"], answer
    assert answer[1]["error"]["type"] == kind, answer
hello = [{"role": "user", "content": "a"}]
refused(claude({"messages": hello}), "max_tokens: Field required")
refused(claude({"messages": hello, "max_tokens": 2, "stop_sequences": ["x"]}), "stop_sequences")
refused(claude({"messages": [{"role": "tool"}], "max_tokens": 2}), "message 0 has the role 'tool'")
tool = {"type": "bash_20250124", "name": "bash"}
refused(claude({"messages": hello, "max_tokens": 2, "tools": [tool]}), "type 'bash_20250124'")
deep = {}
for _ in range(300):
    deep = {"a": deep}
tool = {"name": "f", "input_schema": deep}
refused(claude({"messages": hello, "max_tokens": 2, "tools": [tool]}), "the tools are no JSON")
long = [{"role": "user", "content": "a" * 5000}]
refused(claude({"messages": long, "max_tokens": 2}), "prompt is too long: ")
refused(claude({"messages": long, "max_tokens": 2, "stream": False}), "prompt is too long: ")
status, text = claude({"messages": long, "max_tokens": 2, "stream": True})
assert status == 400 and "prompt is too long" in text, text
refused(respond({"input": "a", "tools": [{"type": "web_search"}]}), "type 'web_search'")
refused(respond({"input": [{"type": "item_reference", "id": "x"}]}), "type 'item_reference'")
refused(respond({"input": "a", "text": {"format": {"type": "json_object"}}}), "json_object")
refused(respond({"input": "a", "background": True}), "background = True")
refused(respond({}), "input: Field required")
refused(respond({"input": "a"}, key="other"), "no key, or none of an open session", status=401)
say(messages, max_tokens=2)
"""
    with episodes(tmp_path, ANTHROPIC + body, attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert sample.error == ""


def test_streams_have_the_events_of_their_dialect(tmp_path: Path) -> None:
    body = """
def names(text):
    return [line[7:] for line in text.splitlines() if line.startswith("event: ")]
hello = [{"role": "user", "content": "a"}]
status, text = claude({"messages": hello, "max_tokens": 3, "stream": True})
found = names(text)
assert found[:2] == ["message_start", "content_block_start"], found
assert found[-3:] == ["content_block_stop", "message_delta", "message_stop"], found
status, text = respond({"input": "a", "max_output_tokens": 3, "stream": True})
found = names(text)
assert found[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
assert found[-1] in ("response.completed", "response.incomplete"), found
"""
    with episodes(tmp_path, ANTHROPIC + body, attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert sample.error == ""
