"""`relax try --url`: a server of chat completions plays the policy, in environments too."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from engine_requests import tiny_model
from gateway_agents import write_program
from served_model import TOKEN, served

from relax_events.cli.try_task import try_task
from relax_events.config import DataConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.errors import ConfigError, PoisonSample
from relax_events.events.parts import ChatMessage, ToolCall

ENVIRONMENT = """
from relax_events.api.environments import Reply

def reply(completion, *, messages):
    return Reply("7", role="tool") if completion == "ask" else None
"""
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AGENT = """
tools = [{"type": "function", "function": {"name": "calc", "description": "adds", "parameters": {"type": "object"}}}]
reply = say(messages, tools=tools)
(call,) = reply["tool_calls"]
say([*messages, reply, {"role": "tool", "tool_call_id": call["id"], "content": "7"}], tools=tools)
"""
FUNCTION = {"name": "calc", "description": "adds", "parameters": {"type": "object"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"a": 3}'}}


@contextmanager
def answering(*replies: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve chat completions on a free port, and give address and bodies; a number is a status, and
    bytes are a whole reply.
    """
    bodies: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                reply = replies[len(bodies) % len(replies)]
                bodies.append(body)
            status = reply if isinstance(reply, int) else 200
            usage = {"prompt_tokens": 10, "completion_tokens": 2}
            choice = (
                {"message": {"role": "assistant"} | reply, "finish_reason": "stop"}
                if isinstance(reply, dict)
                else {}
            )
            content = (
                reply
                if isinstance(reply, bytes)
                else orjson.dumps({"choices": [choice], "usage": usage})
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _keep_logs() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def write_run(folder: Path, **sections: Any) -> Path:
    rows = folder / "rows.jsonl"
    rows.write_bytes(b"\n".join(orjson.dumps({"prompt": f"{n}", "answer": "12"}) for n in range(3)))
    (folder / "template.jinja").write_text(TEMPLATE)
    tree: dict[str, Any] = {
        "run": {"id": "tried", "directory": str(folder / "run"), "samples_per_prompt": 2},
        "model": {"path": str(tiny_model()), "dtype": "float32", "device": "cpu"},
        "data": {"source": f"jsonl:{rows}", "chat_template_file": f"{folder / 'template.jinja'}"},
        "engine": {"threads": 1, "max_context_tokens": 512, "sampling": {"max_new_tokens": 64}},
        "reward": {"function": "exact_match"},
    }
    file = folder / "run.json"
    file.write_bytes(orjson.dumps(tree | sections))
    return file


def play(file: Path, capsys: pytest.CaptureFixture[str], **flags: Any) -> Any:
    try_task(file, output="json", **{"prompts": 1, "samples": 1} | flags)
    return json.loads(capsys.readouterr().out)


def test_prompts_are_answered_by_a_server_with_its_key_and_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", TOKEN)
    with served() as url:
        (played,) = play(
            write_run(tmp_path), capsys, url=url, model=["tiny"], key_variable="MY_KEY", price="1/1"
        )
    assert not played["prompts"][0]["failure"]
    (sample,) = played["prompts"][0]["samples"]
    assert sample["error"] == ""
    assert sample["score"]["reward"] in (0.0, 1.0)
    assert played["summary"]["model"] == "tiny"
    assert played["summary"]["cost"] > 0


def test_servers_and_folders_are_compared_and_the_server_counts_the_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering({"content": "12"}, {"content": "13"}) as (url, bodies):
        played = play(
            write_run(tmp_path), capsys, url=url, model=["run", "big"], samples=2, price="1/2"
        )
    assert [one["summary"]["model"] for one in played] == [str(tiny_model()), "big"]
    rewards = [one["score"]["reward"] for one in played[1]["prompts"][0]["samples"]]
    assert sorted(rewards) == [0.0, 1.0]
    assert played[1]["summary"]["cost"] == pytest.approx((2 * 10 + 2 * 2 * 2) / 1e6)
    assert [body["model"] for body in bodies] == ["big", "big"]
    assert bodies[0]["max_tokens"] == 64


def test_environment_replies_are_sent_with_the_whole_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tool.py").write_text(ENVIRONMENT)
    environment = {"function": f"{tmp_path / 'tool.py'}:reply", "max_turns": 4}
    with answering({"content": "ask"}, {"content": "12"}) as (url, bodies):
        (played,) = play(write_run(tmp_path, environment=environment), capsys, url=url)
    assert not played["prompts"][0]["failure"]
    (sample,) = played["prompts"][0]["samples"]
    assert [turn["content"] for turn in sample["turns"]] == ["ask", "7", "12"]
    assert sample["score"]["reward"] == 1.0
    prompt = bodies[0]["messages"]
    assert bodies[1]["messages"] == [
        *prompt,
        {"role": "assistant", "content": "ask"},
        {"role": "user", "content": "7"},
    ]


def test_program_gets_the_tool_calls_of_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"command": list(write_program(tmp_path, AGENT)), "max_turns": 4}
    with answering({"content": None, "tool_calls": [CALL]}, {"content": "12"}) as (url, bodies):
        (played,) = play(write_run(tmp_path, environment=environment), capsys, url=url)
    assert not played["prompts"][0]["failure"]
    (sample,) = played["prompts"][0]["samples"]
    assert sample["error"] == ""
    assert sample["score"]["reward"] == 1.0
    assert [turn["role"] for turn in sample["turns"]] == ["assistant", "tool", "assistant"]
    assert bodies[0]["tools"][0]["function"]["name"] == "calc"
    called, result = bodies[1]["messages"][-2:]
    assert called["tool_calls"][0]["function"]["name"] == "calc"
    assert called["tool_calls"][0]["id"] == result["tool_call_id"]


def test_tool_calls_that_the_template_does_not_show_fail_by_name(tmp_path: Path) -> None:
    renderer = PromptRenderer.from_folder(tiny_model(), DataConfig(source="http"))
    reply = ChatMessage("assistant", tool_calls=[ToolCall("calc", "{}", "c1")])
    with pytest.raises(PoisonSample, match="does not show tool_calls"):
        renderer.reply_tokens([ChatMessage.of_text("user", "3")], reply)


def test_server_that_refuses_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(403) as (url, _):
        assert try_task(write_run(tmp_path), prompts=1, samples=1, url=url) == 6
    assert f"{url}/chat/completions refused with status 403" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "the environment variable MY_KEY is not set or empty"),
        (" \r\n", "the environment variable MY_KEY is not set or empty"),
        ("sk-abc\rX-Header: 1", "the token in MY_KEY has a control character"),
        ("sk-abc\u00e9", "the token in MY_KEY has a control character, or one beyond ASCII"),
    ],
)
def test_key_that_no_header_holds_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, text: str
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    with (
        answering({"content": "12"}) as (url, bodies),
        pytest.raises(ConfigError, match=f"--key-variable: {text}") as refused,
    ):
        try_task(write_run(tmp_path), url=url, model=["run", "big"], key_variable="MY_KEY")
    assert "sk-abc" not in str(refused.value)
    assert bodies == []


def test_unforeseen_error_of_a_reply_costs_its_sample_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = b'{"choices": [{"message": {"role": "assistant", "content": "12"}}], "usage": {"prompt_tokens": 1e999}}'
    with answering(endless, {"content": "12"}) as (url, _):
        (played,) = play(write_run(tmp_path), capsys, url=url, prompts=2)
    rewards = [
        sample["score"]["reward"] for group in played["prompts"] for sample in group["samples"]
    ]
    assert rewards == [1.0]
    (finding,) = played["findings"]
    assert finding["what"] == "samples"
    assert "unforeseen OverflowError" in finding["text"]


def test_no_renderer_is_used_by_two_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uses: list[tuple[PromptRenderer, str]] = []
    encode, decode = PromptRenderer.encode_rendered, PromptRenderer.completion_text

    def note(renderer: PromptRenderer) -> None:
        uses.append((renderer, threading.current_thread().name))

    def encode_rendered(self: PromptRenderer, text: str) -> Any:
        note(self)
        return encode(self, text)

    def completion_text(self: PromptRenderer, tokens: Any, **options: Any) -> str:
        note(self)
        return decode(self, tokens, **options)

    monkeypatch.setattr(PromptRenderer, "encode_rendered", encode_rendered)
    monkeypatch.setattr(PromptRenderer, "completion_text", completion_text)
    with answering({"content": "12"}) as (url, _):
        play(write_run(tmp_path), capsys, url=url)
    pairs = {(id(renderer), thread) for renderer, thread in uses}
    assert len({thread for _, thread in pairs}) == 2
    assert len({renderer for renderer, _ in pairs}) == len(pairs)


def test_server_needs_no_top_tokens_of_a_distillation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(
        tmp_path,
        algorithm={
            "distill_coefficient": 1.0,
            "distill_placement": "loss",
            "distill_tokens": "union",
            "distill_top_k": 3,
        },
        teacher={"model_path": str(tiny_model(seed=4))},
    )
    with answering({"content": "12"}) as (url, _):
        (played,) = play(file, capsys, url=url)
    assert played["summary"]["num_scored"] == 1


def test_time_limit_is_found_with_the_prompts_that_were_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Passing:
        num_left = 2

        def __init__(self, _: float) -> None: ...

        @property
        def passed(self) -> bool:
            self.num_left -= 1
            return self.num_left < 0

    monkeypatch.setattr("relax_events.deadline.Deadline", Passing)
    with answering({"content": "12"}) as (url, _):
        file = write_run(tmp_path, engine={"threads": 1, "max_running_samples": 1})
        (played,) = play(file, capsys, url=url, prompts=3, seconds=5.0)
    summary = played["summary"]
    assert summary["num_asked"] == 3
    assert summary["num_prompts"] < 3
    (finding,) = played["findings"]
    assert finding["what"] == "time"
    assert "of 3 prompts ended within 5 s: raise --seconds" in finding["text"]


def test_reply_with_a_tool_call_becomes_the_tokens_that_the_policy_would_write(
    tmp_path: Path,
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    data = DataConfig(source="http", chat_template_file=file)
    renderer = PromptRenderer.from_folder(tiny_model(), data)
    tools = orjson.dumps([{"type": "function", "function": FUNCTION}]).decode()
    question = [ChatMessage.of_text("user", "3")]
    reply = ChatMessage("assistant", tool_calls=[ToolCall("calc", '{"a": 3}', "c1")])
    tokens = renderer.reply_tokens(question, reply, tools=tools)
    assert int(tokens[-1]) in renderer.stop_token_ids
    assert sum(int(token) in renderer.stop_token_ids for token in tokens) == 1
    text = renderer.turn_text(tokens)
    assert text.startswith("<tool_call>")
    (call,) = renderer.tool_format.read(
        text.partition("<tool_call>")[2].partition("</tool_call>")[0], {}
    )
    assert call[0] == "calc"
    assert (
        renderer.turn_text(renderer.reply_tokens(question, ChatMessage.of_text("assistant", "12")))
        == "12"
    )
