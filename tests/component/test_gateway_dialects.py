"""The dialects over HTTP, by programs against a real engine: one session, errors, streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
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
refused(claude({"messages": hello, "max_tokens": 2, "tools": [tool]}), "it is nested too deep")
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


def test_role_developer_is_the_system_role_wherever_it_stands(tmp_path: Path) -> None:
    body = """
ask_me = {"role": "user", "content": "one"}
rule = {"role": "developer", "content": "be brief"}
for history in (
    [rule, ask_me],
    [{"role": "system", "content": "be kind"}, rule, ask_me],
    [ask_me, rule, {"role": "user", "content": "two"}],
):
    say(history, max_tokens=2)
"""
    with episodes(tmp_path, body, attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
        assert sample.prompt_tokens is not None
        tokens = np.concatenate([sample.prompt_tokens, sample.tokens])
        text = engine._renderer.completion_text(tokens, skip_special_tokens=False)
    assert sample.error == ""
    assert "developer" not in text
    assert "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none" in text
    assert text.count("be brief") == 3


def test_calls_of_claude_code_are_taken(tmp_path: Path) -> None:
    body = """
cached = {"cache_control": {"type": "ephemeral"}}
tool = {"name": "look", "description": "", "input_schema": {"type": "object"}}
thought = {"type": "thinking", "thinking": "I look.", "signature": ""}
call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": "no file"}
more = {
    "system": [{"type": "text", "text": "be brief"} | cached, {"type": "text", "text": "be kind"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "one"} | cached]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I do."}, call]},
        {"role": "user", "content": [result | cached, {"type": "text", "text": "and now?"}]},
    ],
    "tools": [tool | cached],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "metadata": {"user_id": "a"},
}
status, counted = claude(more, "/messages/count_tokens?beta=true")
assert status == 200, counted
status, answer = claude(more | {"max_tokens": 32000}, "/messages?beta=true")
assert status == 200, answer
assert answer["usage"]["input_tokens"] == counted["input_tokens"], (answer, counted)
"""
    with episodes(tmp_path, ANTHROPIC + body, attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
        assert sample.prompt_tokens is not None
        text = engine._renderer.completion_text(sample.prompt_tokens)
    assert sample.error == ""
    for part in ("be brief", "be kind", "one", "I do.", "no file", "and now?"):
        assert part in text


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"guided_json": {"type": "object"}},
        {"min_p": 0.1},
        {"regex": "a*"},
    ],
)
def test_settings_of_other_servers_are_refused_by_name(
    tmp_path: Path, extra: dict[str, object]
) -> None:
    (field,) = extra
    body = f"""
status, text = ask(messages, max_tokens=2, **{extra!r})
assert status == 400 and "{field}" in text, (status, text)
say(messages, max_tokens=2)
"""
    with episodes(tmp_path, body, attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert sample.error == ""
