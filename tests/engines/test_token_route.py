"""The token route of `relax serve`: exact tokens and log-probabilities, typed errors."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
from engine_requests import plain_logprobs, tiny_model
from routed_samples import check_experts
from served_model import BEARER, SECONDS, served
from served_model import post as post_to

from relax_events.http import call_queue

PATH = "/inference/v1/generate"
PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the address of a served model."""
    with served(max_context_tokens=64, max_running_samples=1) as address:
        yield address


def post(url: str, body: dict[str, Any]) -> httpx2.Response:
    """Post to the token route."""
    return post_to(url, PATH, body)


def generate(url: str, **sampling: Any) -> dict[str, Any]:
    """Return a successful answer."""
    reply = post(url, {"token_ids": PROMPT, "sampling_params": sampling})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_token_route_returns_the_engines_tokens_with_the_models_logprobs(url: str) -> None:
    answer = generate(url, max_tokens=8, seed=7, ignore_eos=True)
    (choice,) = answer["choices"]
    tokens = choice["token_ids"]
    entries = choice["logprobs"]["content"]
    assert answer["prompt_token_ids"] == PROMPT
    assert len(tokens) == 8
    assert choice["finish_reason"] == "length"
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in tokens]
    np.testing.assert_allclose(
        [entry["logprob"] for entry in entries],
        plain_logprobs(np.array(PROMPT), np.array(tokens)),
        atol=1e-4,
    )
    assert generate(url, max_tokens=8, seed=7, ignore_eos=True)["choices"] == [choice]


def test_token_route_ends_after_a_stop_token_which_it_keeps(url: str) -> None:
    tokens = generate(url, max_tokens=8, seed=7, ignore_eos=True)["choices"][0]["token_ids"]
    (choice,) = generate(url, max_tokens=8, seed=7, ignore_eos=True, stop_token_ids=[tokens[2]])[
        "choices"
    ]
    assert choice["token_ids"] == tokens[: tokens.index(tokens[2]) + 1]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "status", "code", "text"),
    [
        ({"token_ids": [10**6]}, 400, "invalid_tokens", "vocabulary"),
        ({"token_ids": [2**31]}, 400, "invalid_request", "token_ids.0"),
        (
            {"token_ids": PROMPT, "sampling_params": {"top_k": 2**31}},
            400,
            "invalid_request",
            "top_k",
        ),
        (
            {"token_ids": PROMPT, "sampling_params": {"stop_token_ids": [2**31]}},
            400,
            "invalid_request",
            "stop_token_ids.0",
        ),
        ({"token_ids": [1] * 64}, 400, "invalid_tokens", "shorter prompt"),
        ({"token_ids": PROMPT, "model": "other"}, 404, "model_not_found", "'tiny'"),
        ({"token_ids": PROMPT, "features": {"a": 1}}, 400, "invalid_request", "features"),
        (
            {"token_ids": PROMPT, "sampling_params": {"min_p": 0.5}},
            400,
            "invalid_request",
            "min_p = 0.5 is not supported here",
        ),
    ],
)
def test_token_route_refuses_with_the_cause(
    url: str, body: dict[str, Any], status: int, code: object, text: str
) -> None:
    reply = post(url, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code)
    assert text in error["message"]
    assert "Retry-After" not in reply.headers


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e6},
        {"temperature": 1e-300},
        {"top_p": 1e-300},
        {"top_k": 2**31 - 1},
        {"seed": -(2**80)},
        {"stop_token_ids": [2**31 - 1]},
    ],
)
def test_engine_survives_the_extremes_of_each_parameter(url: str, extreme: dict[str, Any]) -> None:
    (choice,) = generate(url, max_tokens=4, ignore_eos=True, **extreme)["choices"]
    assert len(choice["token_ids"]) == 4


def test_token_route_pushes_back_when_its_queue_is_full(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_queue, "MAX_WAITING", 4)

    async def flood() -> list[httpx2.Response]:
        limits = httpx2.Limits(max_connections=64)
        async with httpx2.AsyncClient(
            headers=BEARER, trust_env=False, timeout=SECONDS, limits=limits
        ) as client:
            body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 60, "ignore_eos": True}}
            calls = [client.post(f"{url}{PATH}", json=body) for _ in range(40)]
            return list(await asyncio.gather(*calls))

    replies = asyncio.run(flood())
    refused = [reply for reply in replies if reply.status_code == 429]
    assert {reply.status_code for reply in replies} == {200, 429}
    assert all(reply.headers["Retry-After"] == "1" for reply in refused)
    assert all("too many calls" in reply.json()["error"]["message"] for reply in refused)


def test_token_route_reports_the_experts_of_each_token() -> None:
    path = tiny_model("qwen3_moe")
    with served(path, records_experts=True) as url:
        answer = generate(url, max_tokens=4, seed=1, ignore_eos=True)
    (choice,) = answer["choices"]
    found = choice["routed_experts"]
    experts = np.frombuffer(b64decode(found["data"]), found["dtype"]).reshape(found["shape"])
    tokens = np.array([*PROMPT, *choice["token_ids"]])
    assert len(experts) == len(tokens) - 1
    check_experts(experts, path, tokens)
