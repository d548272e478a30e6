"""A model behind `relax serve`: SGLang's own tests pass, and invalid requests get clear errors."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pytest
from engine_gate import Gate
from engine_requests import other_weights, plain_logprobs, tiny_model
from routed_samples import check_experts
from served_model import served
from sglang_servers import BOUNDS

from relax_events.cli.serve import EngineOptions, serve
from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.deadline import Deadline
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.server import SGLangServer
from relax_events.errors import ConfigError
from relax_events.examples.tiny_models import make_tiny
from relax_events.serving.app import bound_body
from relax_events.weights import Weights

KITS = Path(__file__).with_name("sglang_kits.py")
SECONDS = 60.0
PROMPT = [40, 41, 42]
LONGEST = {"max_new_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the address of a served model whose streamed events contain all tokens so far."""
    with served(max_context_tokens=4096, max_running_samples=32) as address:
        yield address


def ask(url: str, path: str, body: dict[str, Any], code: int = 200) -> Any:
    """Post, and return the reply."""
    reply = httpx2.post(f"{url}{path}", json=body, timeout=SECONDS, trust_env=False)
    assert reply.status_code == code, reply.text
    return reply.json() if reply.content else None


def generate(
    url: str,
    *,
    code: int = 200,
    num_tokens: int = 8,
    sampling: dict[str, Any] | None = None,
    **body: Any,
) -> Any:
    """Request in SGLang's format."""
    prompt = {} if "text" in body else {"input_ids": PROMPT}
    return ask(
        url,
        "/generate",
        prompt
        | {
            "sampling_params": {
                "max_new_tokens": num_tokens,
                "ignore_eos": True,
                **(sampling or {}),
            }
        }
        | body,
        code,
    )


def events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Read a stream to its end."""
    with httpx2.stream(
        "POST", f"{url}{path}", json=body, timeout=SECONDS, trust_env=False
    ) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.timeout(300)
def test_sglang_test_kits_and_client_pass(url: str, sglang_python: str) -> None:
    ran = subprocess.run(
        [sglang_python, str(KITS), url], capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stderr.count("... ok") >= 13
    assert "skipped" not in ran.stderr


def test_logprobs_of_prompt_and_completion_are_those_of_the_model(url: str) -> None:
    reply = generate(
        url, return_logprob=True, logprob_start_len=0, sampling={"temperature": 0.7, "top_k": 5}
    )
    entries = reply["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == reply["output_ids"]
    expected = plain_logprobs(np.array(PROMPT), np.array(reply["output_ids"]), temperature=0.7)
    np.testing.assert_allclose([entry[0] for entry in entries], expected, atol=1e-5)
    (first, *others) = reply["meta_info"]["input_token_logprobs"]
    assert first[:2] == [None, PROMPT[0]]
    np.testing.assert_allclose(
        [entry[0] for entry in others],
        plain_logprobs(np.array(PROMPT[:1]), np.array(PROMPT[1:])),
        atol=1e-5,
    )


def test_seeded_and_greedy_sampling_are_reproducible(url: str) -> None:
    sampled = [generate(url, sampling={"sampling_seed": 5})["output_ids"] for _ in range(2)]
    assert sampled[0] == sampled[1] != generate(url, sampling={"sampling_seed": 6})["output_ids"]
    assert (
        len({tuple(generate(url, sampling={"temperature": 0})["output_ids"]) for _ in range(2)})
        == 1
    )


def test_batched_prompts_keep_their_order_and_sampling_parameters(url: str) -> None:
    body = {
        "text": ["12=", "a"],
        "rid": ["one", "two"],
        "sampling_params": [{"max_new_tokens": count, "ignore_eos": True} for count in (2, 5)],
    }
    replies = ask(url, "/generate", body)
    assert [(reply["meta_info"]["id"], len(reply["output_ids"])) for reply in replies] == [
        ("one", 2),
        ("two", 5),
    ]
    again = generate(url, rid="many", sampling={"n": 3})
    assert [reply["meta_info"]["id"] for reply in again] == ["many/0", "many/1", "many/2"]


def test_stop_string_ends_the_response_before_itself(url: str) -> None:
    whole = generate(url, num_tokens=60, sampling={"temperature": 0, "top_k": 1})["text"]
    stop = next(
        text
        for index in range(5, len(whole))
        if "\ufffd" not in (text := whole[index : index + 2]) and len(text) == 2
    )
    for more in ({}, {"no_stop_trim": True}):
        reply = generate(
            url, num_tokens=60, sampling={"temperature": 0, "stop": ["never there", stop], **more}
        )
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert reply["text"] == whole[: whole.index(stop) + (len(stop) if more else 0)]
        assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"]) < 60


def test_streamed_response_equals_the_unstreamed_one(url: str) -> None:
    sampling = {"max_new_tokens": 300, "ignore_eos": True, "sampling_seed": 9}
    *growing, last = events(
        url, "/generate", {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
    )
    assert growing
    whole = generate(url, sampling=sampling)
    assert (last["output_ids"], last["text"]) == (whole["output_ids"], whole["text"])
    assert all(
        event["output_ids"] == whole["output_ids"][: len(event["output_ids"])] for event in growing
    )
    assert {event["meta_info"]["finish_reason"] is None for event in growing} == {True}


def test_chat_completion_works_with_and_without_streaming(url: str) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "12="}]}],
        "max_tokens": 20,
        "seed": 3,
    }
    whole = ask(url, "/v1/chat/completions", body | {"n": 2})
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert (
        whole["usage"]["total_tokens"]
        == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
    )
    pieces = [
        event["choices"][0]
        for event in events(url, "/v1/chat/completions", body | {"stream": True})
    ]
    assert "".join(piece["delta"]["content"] for piece in pieces) == texts[0] != texts[1]
    assert pieces[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert httpx2.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/generate", {"sampling_params": {}}, "give the prompt once, as text or as input_ids"),
        ("/generate", {"text": "a", "sampling_params": {"max_tokens": 3}}, "max_tokens"),
        (
            "/generate",
            {"text": "a", "sampling_params": {"min_p": 0.5}},
            "sampling by min_p is not supported here",
        ),
        ("/generate", {"text": "a", "image_data": "x.png"}, "image_data is not accepted here"),
        (
            "/generate",
            {"text": "a", "return_routed_experts": True},
            "start the server with --enable-return-routed-experts",
        ),
        (
            "/generate",
            {"input_ids": [1, 5000]},
            "prompt 0 must have at least one token, of ids from 0 to",
        ),
        ("/generate", {"input_ids": []}, "must have at least one token"),
        ("/generate", {"input_ids": [1] * 5000}, "must leave room for one more"),
        (
            "/generate",
            {"text": ["a", "b"], "rid": "one"},
            "each of 2 prompts needs a rid of its own",
        ),
        (
            "/generate",
            {"text": ["a", "b"], "rid": ["one", "one"]},
            "rid 'one' is given more than once",
        ),
        ("/pause_generation", {"mode": "softly"}, "mode"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "/nowhere holds no config.json"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        (
            "/v1/completions",
            {"prompt": "a", "return_routed_experts": True},
            "return_routed_experts is not supported here",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "frequency_penalty": 0.4},
            "frequency_penalty is not supported here",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
            "tools is not supported here",
        ),
    ],
)
def test_invalid_request_gets_status_400_and_a_specific_message(
    url: str, path: str, body: dict[str, Any], text: str
) -> None:
    assert text in json.dumps(ask(url, path, body, code=400))
    assert len(generate(url)["output_ids"]) == 8


def test_new_weights_take_effect_between_two_tokens(tmp_path: Path, gate: Gate) -> None:
    weights, other = other_weights(1)
    folder = ModelFolder.read(tiny_model())
    version = folder.write_version(folder.match_tensors(weights.tensors), tmp_path / "version")
    with served(max_context_tokens=4096) as url:
        replies: list[Any] = []
        caller = threading.Thread(
            target=lambda: replies.append(generate(url, num_tokens=600, return_logprob=True))
        )
        gate.shut()
        caller.start()
        assert gate.reached.wait(SECONDS)
        ask(url, "/pause_generation", {"mode": "retract"})
        assert ask(
            url, "/update_weights_from_disk", {"model_path": str(version), "weight_version": "v1"}
        )["success"]
        ask(url, "/continue_generation", {})
        gate.open()
        caller.join(SECONDS)
        (reply,) = replies
        assert httpx2.get(f"{url}/model_info", trust_env=False).json()["weight_version"] == "v1"
    before, after = reply["meta_info"]["weight_versions"]
    assert [(span["version"], span["start"]) for span in (before, after)] == [
        ("default", 0),
        ("v1", before["end"]),
    ]
    tokens, logprobs = (
        np.array(reply["output_ids"]),
        np.array([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]),
    )
    for span, path in ((before, tiny_model()), (after, other)):
        tokens_of_span = slice(span["start"], span["end"])
        np.testing.assert_allclose(
            logprobs[tokens_of_span],
            plain_logprobs(np.array(PROMPT), tokens, path=path)[tokens_of_span],
            atol=1e-5,
        )


def reported(reply: dict[str, Any], *, num_layers: int = 2, top_k: int = 2) -> np.ndarray:
    """Read what is reported of experts, as SGLang's `extract_routed_experts_from_meta_info`
    does."""
    return np.frombuffer(b64decode(reply["meta_info"]["routed_experts"]), np.int32).reshape(
        -1, num_layers, top_k
    )


def test_routed_experts_are_reported_only_at_the_end_as_in_sglang() -> None:
    path = tiny_model("qwen3_moe")
    with served(path, records_experts=True) as url:
        assert (
            httpx2.get(f"{url}/server_info", trust_env=False).json()["enable_return_routed_experts"]
            is True
        )
        whole = generate(
            url, num_tokens=300, return_routed_experts=True, sampling={"sampling_seed": 3}
        )
        tokens, experts = np.array(PROMPT + whole["output_ids"]), reported(whole)
        assert len(experts) == len(tokens) - 1
        check_experts(experts, path, tokens)
        assert "routed_experts" not in generate(url, num_tokens=2)["meta_info"]
        sampling = {"max_new_tokens": 300, "ignore_eos": True, "sampling_seed": 3}
        body = {
            "input_ids": PROMPT,
            "sampling_params": sampling,
            "stream": True,
            "return_routed_experts": True,
            "routed_experts_start_len": 2,
        }
        *growing, last = events(url, "/generate", body)
        assert growing
        assert not any("routed_experts" in event["meta_info"] for event in growing)
        assert reported(last).tolist() == experts[2:].tolist()
        stop = whole["text"][100:103]
        cut = generate(
            url,
            num_tokens=300,
            return_routed_experts=True,
            sampling={"sampling_seed": 3, "stop": stop},
        )
        assert 0 < len(reported(cut)) == len(PROMPT) + len(cut["output_ids"]) - 1 < len(experts)
        for asked, text in {
            (4, 8): "must lie in each prompt, got 4 for one of 3 tokens",
            (0, 0): "generate a token",
        }.items():
            start, num_tokens = asked
            refused = generate(
                url,
                code=400,
                num_tokens=num_tokens,
                return_routed_experts=True,
                routed_experts_start_len=start,
            )
            assert text in refused["message"]


def test_returning_routed_experts_of_a_dense_model_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match="is no mixture of experts; leave --enable-return-routed-experts out"
    ):
        serve(tiny_model(), engine=EngineOptions(enable_return_routed_experts=True))


def test_checksums_of_expert_weights_equal_the_checkpoints(tmp_path: Path) -> None:
    path = make_tiny(
        tmp_path / "experts", corpus=["12=21"], family="qwen3_moe", hidden_size=32, seed=1
    )
    with served(path) as url:
        (rank,) = ask(url, "/weights_checker", {"action": "checksum"})["ranks"]
    folder = ModelFolder.read(path)
    assert (
        rank["checksums"].keys()
        == folder.match_tensors(Weights(0, folder.tensors(), b"").tensors).keys()
    )


def test_generation_stops_when_the_client_disconnects(url: str, gate: Gate) -> None:
    gate.shut()  # samples that are not aborted would run until the test ends
    asked = {"input_ids": PROMPT, "sampling_params": LONGEST}
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)) as caller:
        caller.request(
            "POST",
            "/generate",
            body=json.dumps(asked),
            headers={"Content-Type": "application/json"},
        )
        assert gate.reached.wait(SECONDS)
    await_none(gate)
    with httpx2.stream(
        "POST", f"{url}/generate", json={**asked, "stream": True}, timeout=SECONDS, trust_env=False
    ) as reply:
        next(reply.iter_lines())
    await_none(gate)
    gate.open()
    generate(url, num_tokens=2)
    assert ask(url, "/abort_request", {"abort_all": True}) is None


def await_none(gate: Gate) -> None:
    """Wait until the engine that reached the gate runs nothing any more."""
    deadline, pause = Deadline(SECONDS), threading.Event()
    while gate.num_running:
        assert not deadline.passed, "what was asked for by a caller that is gone still runs"
        pause.wait(0.01)


BEARER = {"Authorization": "Bearer secret"}


def test_server_answers_only_requests_with_the_token() -> None:
    with served(token="secret") as url:
        assert httpx2.get(f"{url}/ready", trust_env=False).status_code == 401
        assert httpx2.post(f"{url}/pause_generation", json={}, trust_env=False).status_code == 401
        assert httpx2.get(f"{url}/health", trust_env=False).status_code == 200
        ready = httpx2.get(f"{url}/ready", headers=BEARER, trust_env=False)
        assert ready.status_code == 200


def test_body_costs_no_more_than_the_prompts_of_all_rows() -> None:
    """30 MB of lists would become 800 MB: they are refused by their length, or by their number."""
    usual = EngineConfig(max_context_tokens=4096, max_running_samples=64)
    assert bound_body(usual, longest_token_bytes=128).num_bytes < 8 * 1024**2
    with served(max_context_tokens=512, max_running_samples=64) as url:
        for size in (10_000_000, 150_000):
            body = b'{"text": [' + b"[]," * size + b"[]]}"
            answer = httpx2.post(f"{url}/generate", content=body, trust_env=False)
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
        while server.poll() is None:
            try:
                ready = httpx2.get(f"{url}/ready", headers=bearer, timeout=SECONDS, trust_env=False)
                if ready.status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.1)
        assert httpx2.get(f"{url}/ready", timeout=SECONDS, trust_env=False).status_code == 401
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


def test_engine_attaches_to_a_server_with_its_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    with served(is_incremental=True, token="secret") as url:
        model = ModelConfig(dtype="float32", path=tiny_model())
        sglang = SGLangConfig(urls=(url,))
        config = EngineConfig(threads=1, **BOUNDS, sglang=sglang)
        with pytest.raises(ConfigError, match="requires a token"):
            SGLangServer(tiny_model(), config=config, model=model)
        sglang = SGLangConfig(urls=(url,), token_file=tmp_path / "token")
        config = EngineConfig(threads=1, **BOUNDS, sglang=sglang)
        SGLangServer(tiny_model(), config=config, model=model).close()


def test_weights_are_loaded_only_from_within_the_weights_root(tmp_path: Path) -> None:
    outside = {"model_path": str(tmp_path / "root" / ".." / "missing"), "weight_version": "1"}
    with served(weights_root=tmp_path / "root") as address:
        assert (
            "not loaded from there"
            in ask(address, "/update_weights_from_disk", outside, 403)["message"]
        )
        below = outside | {"model_path": str(tmp_path / "root" / "x")}
        assert (
            "holds no config.json"
            in ask(address, "/update_weights_from_disk", below, 400)["message"]
        )
    with served(weights_root=None) as address:
        assert (
            "not loaded from there"
            in ask(address, "/update_weights_from_disk", outside, 403)["message"]
        )
