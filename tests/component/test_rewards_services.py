"""Rewards that call a service: a local one that responds, fails, stalls or sends nonsense."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from relax_events.config import RewardConfig
from relax_events.errors import ConfigError, RewardError
from relax_events.rewards.http_client import MAX_REPLY_BYTES, post_json
from relax_events.rewards.llm_judge import (
    REFERENCE_TEMPLATE,
    Grading,
    load_template,
    read_score,
    read_verdict,
    win_shares,
)
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.scores import Score

pytestmark = pytest.mark.unit
Answer = Callable[[dict[str, Any]], Any]


@dataclass
class Service:
    """A web server in a thread. `answer` makes a JSON document of a request; statuses in `failures`
    are given first."""

    url: str = ""
    answer: Answer = lambda _: 0.0
    failures: deque[int] = field(default_factory=deque)
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            service.requests.append((self.path, body, dict(self.headers)))
            status = service.failures.popleft() if service.failures else 200
            content = service.answer(body)
            self.send_response(status)
            for name, value in service.headers.items():
                self.send_header(name, value)
            if isinstance(content, Iterator):
                self.end_headers()
                with suppress(OSError):  # the client is gone
                    for piece in content:
                        self.wfile.write(piece)
                return
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield service
    service.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


def score(
    function: str, items: list[RewardItem], *, timeout_seconds: float = 20.0, **options: Any
) -> list[Score | RewardError]:
    with RewardPool(
        RewardConfig(function=function, options=options, timeout_seconds=timeout_seconds)
    ) as pool:
        return pool.score_batch(items)


def prompt_group(*completions: str) -> list[RewardItem]:
    return [
        RewardItem(f"s{index}", text, "label", '{"k": 1}', "question", "group")
        for index, text in enumerate(completions)
    ]


def rewards(results: list[Score | RewardError]) -> list[float | None]:
    return [result.reward if isinstance(result, Score) else None for result in results]


def test_remote_posts_the_sample_and_takes_numbers_and_components(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "open sesame")
    service.answer = lambda body: (
        {"form": 0.25, "content": 0.5}
        if body["response"] == "parts"
        else float(len(body["response"]))
    )
    results = score(
        "remote", prompt_group("four", "parts"), url=service.url, token_variable="REWARD_TOKEN"
    )
    assert rewards(results) == [4.0, 0.75]
    bodies = sorted((body for _, body, _ in service.requests), key=lambda body: body["response"])
    assert bodies[0] == {
        "prompt": "question",
        "response": "four",
        "label": "label",
        "metadata": {"k": 1},
    }
    assert all(headers["Authorization"] == "Bearer open sesame" for *_, headers in service.requests)


def test_token_is_not_sent_unencrypted_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "open sesame")
    with pytest.raises(
        RewardError,
        match=r"the token in JUDGE_TOKEN would be sent unencrypted to http://judge\.example",
    ):
        asyncio.run(post_json("http://judge.example", {}, retries=0, token_variable="JUDGE_TOKEN"))


def test_token_is_sent_without_the_end_of_its_line_and_no_error_shows_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answer = lambda _: 1.0
    monkeypatch.setenv("REWARD_TOKEN", "open sesame\r\n")
    asyncio.run(post_json(service.url, {}, token_variable="REWARD_TOKEN"))
    ((*_, headers),) = service.requests
    assert headers["Authorization"] == "Bearer open sesame"
    for value in ("open\rsesame", "open\nsesame", "open\u20acsesame"):
        monkeypatch.setenv("REWARD_TOKEN", value)
        with pytest.raises(RewardError, match="the token in REWARD_TOKEN has") as refused:
            asyncio.run(post_json(service.url, {}, token_variable="REWARD_TOKEN"))
        assert "sesame" not in str(refused.value)
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(RewardError, match="REWARD_TOKEN is not set or empty"):
        asyncio.run(post_json(service.url, {}, token_variable="REWARD_TOKEN"))
    assert len(service.requests) == 1


def test_remote_retries_only_transient_failures(service: Service) -> None:
    service.answer = lambda _: 1.0
    service.failures.extend([503, 500])
    assert rewards(score("remote", prompt_group("a"), url=service.url)) == [1.0]
    assert len(service.requests) == 3
    service.failures.append(422)
    (result,) = score("remote", prompt_group("a"), url=service.url)
    assert "refused with status 422" in str(result)
    assert len(service.requests) == 4


def test_remote_fails_the_sample_when_the_service_stays_unavailable(service: Service) -> None:
    (result,) = score("remote", prompt_group("a"), url="http://127.0.0.1:9", retries=1)
    assert "http://127.0.0.1:9 failed 2 time(s), at last with ConnectError" in str(result)
    service.failures.extend([500] * 3)
    (result,) = score("remote", prompt_group("a"), url=service.url, retries=2)
    assert "failed 3 time(s), at last with status 500; is the service up? on sample s0" in str(
        result
    )


def test_remote_does_not_wait_for_a_service_that_stalls(service: Service) -> None:
    def stall(body: dict[str, Any]) -> float:
        if body["response"] == "stall":
            service.released.wait(100)
        return 1.0

    service.answer = stall
    results = score(
        "remote", prompt_group("a", "stall", "b"), url=service.url, request_seconds=3.0, retries=0
    )
    assert rewards(results) == [1.0, None, 1.0]
    assert "no complete reply within 3 s" in str(results[1])


def test_remote_refuses_replies_that_are_compressed_or_too_large(service: Service) -> None:
    service.headers["Content-Encoding"] = "gzip"
    service.answer = lambda _: zlib.compress(bytes(10 * MAX_REPLY_BYTES), wbits=31)
    (result,) = score("remote", prompt_group("a"), url=service.url)
    assert "answered in the encoding 'gzip'" in str(result)
    assert service.requests[0][2]["Accept-Encoding"] == "identity"
    service.headers["Content-Encoding"] = "identity"
    service.answer = lambda _: b"1" + b" " * (MAX_REPLY_BYTES - 1)
    assert rewards(score("remote", prompt_group("a"), url=service.url)) == [1.0]
    service.answer = lambda _: b"1" + b" " * MAX_REPLY_BYTES
    (result,) = score("remote", prompt_group("a"), url=service.url)
    assert f"answered with more than {MAX_REPLY_BYTES} bytes" in str(result)
    assert len(service.requests) == 3


def test_remote_does_not_wait_for_a_service_that_sends_byte_by_byte(service: Service) -> None:
    def drip() -> Iterator[bytes]:
        while not service.released.wait(0.05):
            yield b" "

    service.answer = lambda _: drip()
    (result,) = score("remote", prompt_group("a"), url=service.url, request_seconds=1.0, retries=0)
    assert "at last with no complete reply within 1 s" in str(result)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"<html>", "answered '<html>', which is not JSON"),
        ("1", "must answer with a number"),
        ({"error": "no idea"}, "says: no idea"),
        (True, "must answer"),
    ],
)
def test_remote_counts_a_malformed_response_as_a_failure(
    service: Service, content: Any, text: str
) -> None:
    service.answer = lambda _: content
    (result,) = score("remote", prompt_group("a"), url=service.url)
    assert isinstance(result, RewardError)
    assert text in str(result)


def test_remote_group_posts_the_whole_prompt_group_at_once(service: Service) -> None:
    def chat_response(body: dict[str, Any]) -> list[dict[str, Any]]:
        size = len(body["responses"])
        return [
            {"error": "no idea"} if one == "x" else {"reward": len(one), "size": size}
            for one in body["responses"]
        ]

    service.answer = chat_response
    results = score("remote_group", prompt_group("a", "x", "ccc"), url=service.url)
    assert rewards(results) == [1.0, None, 3.0]
    assert len(service.requests) == 1
    service.answer = lambda _: [1.0]
    assert rewards(score("remote_group", prompt_group("a", "b"), url=service.url)) == [None, None]


def chat(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def question_of(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])


def test_genrm_asks_a_chat_endpoint_and_reads_the_score(service: Service) -> None:
    service.answer = lambda body: chat(
        "<think>Score: 1</think>Fine.\n**Score: 8**"
        if "good one" in question_of(body)
        else "I refuse."
    )
    results = score(
        "genrm",
        prompt_group("<think>hidden</think>good one", "other"),
        url=f"{service.url}/v1",
        model="judge",
        rubric="Is it $kind?",
    )
    assert rewards(results) == [0.8, None]
    assert "the judge's answer has no line 'Score: N': 'I refuse.' on sample s1" in str(results[1])
    path, body, _ = next(
        request for request in service.requests if "good one" in question_of(request[1])
    )
    assert (path, body["model"], body["temperature"]) == ("/v1/chat/completions", "judge", 0.0)
    assert "hidden" not in question_of(body)
    assert "Is it $kind?" in question_of(body)


def test_genrm_prompt_includes_the_reference_or_uses_a_custom_template(service: Service) -> None:
    def chat_response(body: dict[str, Any]) -> dict[str, Any]:
        question = question_of(body)
        return chat(
            "Score: 1"
            if "[Reference]\nlabel" in question or question == "question|$5|label"
            else "Score: 0"
        )

    service.answer = chat_response
    assert rewards(
        score("genrm", prompt_group("a"), url=service.url, template="reference", max_score=1)
    ) == [1.0]
    assert rewards(
        score(
            "genrm",
            prompt_group("$5"),
            url=service.url,
            template="$prompt|$completion|$answer",
            max_score=1,
        )
    ) == [1.0]


def test_reference_template_fails_without_a_reference() -> None:
    with pytest.raises(ValueError, match=r"no reference answer; see data.answer_key"):
        Grading(REFERENCE_TEMPLATE).build_prompt("a", answer=" ", metadata={}, prompt="q")


def test_genrm_pairwise_ranks_the_prompt_group_in_both_orders(service: Service) -> None:
    def longer_wins(body: dict[str, Any]) -> dict[str, Any]:
        first, second = (part.split("\n")[1] for part in question_of(body).split("[Answer ")[1:])
        verdict = "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
        return chat(f"Well.\nVerdict: {verdict}")

    service.answer = longer_wins
    assert rewards(
        score("genrm_pairwise", prompt_group("a", "bb", "cc", "dddd"), url=service.url)
    ) == [0.0, 0.5, 0.5, 1.0]
    assert len(service.requests) == 12
    assert rewards(
        score(
            "genrm_pairwise",
            prompt_group("a", "a long one"),
            url=service.url,
            opponents="reference",
        )
    ) == [0.0, 1.0]


def test_genrm_pairwise_cancels_out_position_bias(service: Service) -> None:
    service.answer = lambda _: chat("Verdict: A")
    assert rewards(score("genrm_pairwise", prompt_group("a", "b"), url=service.url)) == [0.5, 0.5]


def test_comparison_without_verdict_fails_only_the_two_compared_samples() -> None:
    error = RewardError("no verdict")
    assert win_shares(3, [(0, 1), (0, 2), (1, 2)], [error, 1.0, 0.5]) == [error, error, 0.25]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Score: 7", 0.7),
        ("Score: 3\nScore: 10", 1.0),
        ("- score : 2.5 of 10", 0.25),
        ("Score: 0", 0.0),
    ],
)
def test_score_line_is_read(text: str, value: float) -> None:
    assert read_score(text, max_score=10) == value


@pytest.mark.parametrize(
    "text", ["", "7", "Score: high", "Score: 11", "Score: -1", "The Score: 7 is mine"]
)
def test_missing_or_out_of_range_score_is_rejected(text: str) -> None:
    with pytest.raises(RewardError, match="the judge's"):
        read_score(text, max_score=10)


@pytest.mark.parametrize(
    ("text", "value"),
    [("Verdict: A", 1.0), ("Verdict: A\n**Verdict: B**", 0.0), ("verdict: Tie", 0.5)],
)
def test_verdict_line_is_read(text: str, value: float) -> None:
    assert read_verdict(text) == value


@pytest.mark.parametrize("text", ["", "A", "Verdict: C", "Verdict: both"])
def test_missing_verdict_is_rejected(text: str) -> None:
    with pytest.raises(RewardError, match="no line 'Verdict"):
        read_verdict(text)


def test_template_must_be_a_known_name_or_contain_a_placeholder() -> None:
    with pytest.raises(
        ConfigError, match=r"reward.options.template must be rubric, reference, pair or a text"
    ):
        load_template("rubrik")
