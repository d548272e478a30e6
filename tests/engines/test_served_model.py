"""A model behind `relax serve`: chats in all dialects, and clear errors for invalid requests."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from engine_gate import Gate
from engine_requests import tiny_model
from served_model import BEARER, SECONDS, TOKEN, complete_tokens, post, served

from relax_events.cli.serve import EngineOptions, serve
from relax_events.deadline import Deadline
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import ConfigError

CHAT, TOKENS = "/v1/chat/completions", "/inference/v1/generate"
QUESTION = [{"role": "user", "content": [{"type": "text", "text": "12="}]}]
PROMPT = [40, 41, 42]
LONGEST = {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the address of a served model."""
    with served(max_context_tokens=4096, max_running_samples=32) as address:
        yield address


def chat(url: str, **more: Any) -> dict[str, Any]:
    """Return the answer of OpenAI's chat API."""
    reply = post(url, CHAT, {"messages": QUESTION, "max_tokens": 20} | more)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_every_dialect_answers_with_the_same_tokens(url: str) -> None:
    answer = chat(url, temperature=0)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    body = {"input": "12=", "max_output_tokens": 20, "temperature": 0}
    response = post(url, "/v1/responses", body).json()
    assert response["output"][-1]["content"][0]["text"] == text_of(answer)
    key = {"x-api-key": TOKEN, "anthropic-version": "2023-06-01"}
    message = httpx2.post(
        f"{url}/v1/messages",
        json={"messages": QUESTION, "max_tokens": 20, "temperature": 0},
        headers=key,
        timeout=SECONDS,
        trust_env=False,
    ).json()
    assert message["content"][0]["text"] == text_of(answer)
    assert message["usage"]["input_tokens"] == usage["prompt_tokens"]
    listed = httpx2.get(
        f"{url}/v1/models", headers=BEARER, timeout=SECONDS, trust_env=False
    ).json()["data"]
    assert [model["id"] for model in listed] == ["tiny"]


def test_chat_samples_as_the_call_asks_for_it(url: str) -> None:
    fixed = {text_of(chat(url, seed=seed)) for seed in (3, 3, -3, -3)}
    assert len(fixed) == 2
    assert len({text_of(chat(url)) for _ in range(4)}) > 1
    greedy = text_of(chat(url, temperature=0))
    for settings in ({"top_p": 0}, {"temperature": 0, "seed": 9}, {"top_k": 1}):
        assert text_of(chat(url, **settings)) == greedy


def test_streamed_chat_equals_the_unstreamed_one(url: str) -> None:
    reply = post(
        url, CHAT, {"messages": QUESTION, "max_tokens": 20, "temperature": 0, "stream": True}
    )
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    *events, end = [line for line in lines if not line.startswith(":")]
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert ("".join(pieces), end) == (text_of(chat(url, temperature=0)), "[DONE]")


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": QUESTION, "frequency_penalty": 0.4}, "frequency_penalty = 0.4 is not"),
        (CHAT, {"messages": QUESTION, "temperature": -1}, "temperature"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 60_000}]}, "the context ends at"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "image_url",
        ),
        (
            "/v1/responses",
            {"input": "a", "previous_response_id": "resp_1"},
            "is no answer of this session",
        ),
    ],
)
def test_invalid_request_gets_status_400_and_a_specific_message(
    url: str, path: str, body: dict[str, Any], text: str
) -> None:
    reply = post(url, path, body)
    assert (reply.status_code, text in reply.text) == (400, True), reply.text
    assert text_of(chat(url, temperature=0))


def test_chat_with_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with served(folder) as url:
        refused = post(url, CHAT, {"messages": QUESTION})
        assert (refused.status_code, "has no chat template" in refused.text) == (400, True)
        assert len(complete_tokens(url, PROMPT, max_tokens=4, ignore_eos=True)[0]) == 4


def test_returning_routed_experts_of_a_dense_model_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match="is no mixture of experts; leave --enable-return-routed-experts out"
    ):
        serve(tiny_model(), engine=EngineOptions(enable_return_routed_experts=True))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TOKENS, {"token_ids": PROMPT, "sampling_params": LONGEST}),
        (CHAT, {"messages": QUESTION, "stream": True, "temperature": 0}),
    ],
)
def test_generation_stops_when_the_client_disconnects(
    url: str, gate: Gate, path: str, body: dict[str, Any]
) -> None:
    """Greedy: one sampled chat in 300 ends at its first token, and never waits at the gate."""
    gate.shut(1)  # samples that are not aborted would run until the test ends
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)) as caller:
        headers = BEARER | {"Content-Type": "application/json"}
        caller.request("POST", path, body=json.dumps(body), headers=headers)
        assert gate.reached.wait(SECONDS)
    deadline, pause = Deadline(SECONDS), threading.Event()
    while gate.num_running:
        assert not deadline.passed, "what was asked for by a caller that is gone still runs"
        pause.wait(0.01)
    gate.open()
    assert complete_tokens(url, PROMPT, max_tokens=2, ignore_eos=True)[0]


def test_failed_engine_answers_every_call_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with served() as url:
        assert httpx2.get(f"{url}/health", timeout=SECONDS, trust_env=False).status_code == 200
        monkeypatch.setattr(TransformersEngine, "poll", fail)
        for path, body in ((CHAT, {"messages": QUESTION}), (TOKENS, {"token_ids": PROMPT})) * 2:
            reply = post(url, path, body)
            assert (reply.status_code, "out of memory" in reply.text) == (503, True), reply.text
            assert reply.headers["Retry-After"] == "1"
        assert httpx2.get(f"{url}/health", timeout=SECONDS, trust_env=False).status_code == 503


def test_server_answers_only_requests_with_the_token(url: str) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}, {"x-api-key": "other"}):
        for path in ("/v1/models", TOKENS, CHAT):
            reply = httpx2.post(
                f"{url}{path}", json={}, headers=headers, timeout=SECONDS, trust_env=False
            )
            assert reply.status_code == 401
    assert httpx2.post(f"{url}/health", timeout=SECONDS, trust_env=False).status_code == 401
    assert httpx2.get(f"{url}/health", timeout=SECONDS, trust_env=False).status_code == 200
    listed = httpx2.get(
        f"{url}/v1/models", headers={"x-api-key": TOKEN}, timeout=SECONDS, trust_env=False
    )
    assert listed.status_code == 200


def test_body_costs_no_more_than_a_prompt_that_fills_the_context() -> None:
    """30 MB of lists would become 800 MB: they are refused by their length, or by their number."""
    with served(max_context_tokens=512, max_running_samples=64) as url:
        for size in (10_000_000, 36_000):
            body = b'{"token_ids": [' + b"[]," * size + b"[]]}"
            answer = httpx2.post(
                f"{url}{TOKENS}", content=body, headers=BEARER, timeout=SECONDS, trust_env=False
            )
            assert answer.status_code == 413, answer.text


def test_serve_command_runs_until_it_is_terminated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relax_events.cli", "serve", str(tiny_model()), "--port"]
    token_file = tmp_path / ".relax" / "serve-token"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "0"], cwd=tmp_path, **streams) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        assert f"in {token_file}, shown once" in server.stderr.readline()
        url = server.stdout.readline().strip()
        bearer = {"Authorization": f"Bearer {token_file.read_text()}"}
        assert token_file.stat().st_mode & 0o777 == 0o600
        models = f"{url}/v1/models"
        while server.poll() is None:
            try:
                reply = httpx2.get(models, headers=bearer, timeout=SECONDS, trust_env=False)
                if reply.status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.1)
        assert httpx2.get(models, timeout=SECONDS, trust_env=False).status_code == 401
        taken = subprocess.run(
            [*command, url.rpartition(":")[2]],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=tmp_path,
        )
        server.send_signal(signal.SIGTERM)
        assert server.wait(SECONDS) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    assert taken.returncode == 2
    assert "Address already in use; give another --port, 0 for a free one" in taken.stderr
    assert "shown once" not in taken.stderr
