"""HTTP input: bodies of the APIs, streams of an SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from relax_events.controller.api_schemas import CancelBody, ScaleInBody, ScaleOutBody
from relax_events.data.messages import refuse_part
from relax_events.errors import PoisonSample
from relax_events.http.guard import RequestGuard
from relax_events.http.identity import Identity, identify_by_token
from relax_events.packages.gateway.anthropic_dialect import AnthropicCall
from relax_events.packages.gateway.chat_dialect import ChatCall
from relax_events.packages.gateway.dialect import ModelCall
from relax_events.packages.gateway.responses_dialect import ResponsesCall
from relax_events.packages.gateway.sampling import CallSampling
from relax_events.packages.gateway.token_route import TokenBody
from tests.fuzz.inputs import TEXTS, as_json, json_bytes, mutated
from tests.fuzz.target import Target

BODIES: dict[type[BaseModel], list[Any]] = {
    TokenBody: [
        {
            "token_ids": [1, 2],
            "sampling_params": {"max_tokens": 4, "top_p": 0.9, "min_p": 0, "stop_token_ids": [1]},
        },
        {"token_ids": [3], "request_id": "a", "sampling_params": {"temperature": 0, "seed": 1}},
    ],
    ChatCall: [
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 3,
            "seed": -2,
        }
    ],
    ResponsesCall: [{"input": "hi", "instructions": "be brief", "max_output_tokens": 3}],
    AnthropicCall: [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0.5}
    ],
    ScaleOutBody: [
        {
            "model_name": "default",
            "num_replicas": 3,
            "engine_urls": ["http://a:1"],
            "timeout_secs": 5.0,
        }
    ],
    ScaleInBody: [{"num_replicas": 1, "force": True, "dry_run": True}],
    CancelBody: [{"model_name": "reward", "status_filter": "PENDING"}],
}


def body(data: bytes) -> None:
    """Read a body as every route that takes one would, and what is made of it before anything is
    computed."""
    for kind in BODIES:
        with suppress(ValidationError):
            made = kind.model_validate_json(data)
            sampling = made.sampling_params if isinstance(made, TokenBody) else made
            if isinstance(sampling, CallSampling):
                _ = sampling.build_config(1), sampling.choose_seed()
            if isinstance(made, ModelCall):
                session: Any = SimpleNamespace(read_part=refuse_part, answers={})
                for read in (made.write_tools, partial(made.history, session)):
                    with suppress(PoisonSample):
                        read()


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


class Chunks:
    """What a connection brings, in pieces of one size."""

    def __init__(self, data: bytes, size: int) -> None:
        self._pieces = [data[at : at + size] for at in range(0, len(data), size)]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the pieces."""
        for piece in self._pieces:
            yield piece


def stream(data: bytes) -> None:
    """Read a server's stream in chunks of several sizes: all yield the same events."""
    from relax_events.engines.sglang.inflight import (
        InflightRequest,  # loads torch, which no other target needs
    )

    found = [_run(_events(Chunks(data, size))) for size in (max(1, len(data)), 1000, 7)]
    assert found[0] == found[1] == found[2]
    sample = SimpleNamespace(top_tokens=np.zeros((0, 1), np.int32), sequence=np.zeros(2, np.int32))
    request = InflightRequest(sample, "a", 1)  # type: ignore[arg-type]
    with suppress(
        ValueError, KeyError, TypeError, IndexError, AttributeError
    ):  # what it can't understand makes the engine doubt the server
        for event in found[0]:
            request.add_event(orjson.loads(event))


async def _events(chunks: Any) -> list[bytes]:
    from relax_events.engines.sglang.client import _read_events

    return [event async for event in _read_events(aiter(chunks), what="stream", max_bytes=2**20)]


def guard(data: bytes) -> None:
    """Let the guard of the HTTP servers check a call: only one with the token passes."""
    headers = [
        (name, value) for name, _, value in (line.partition(b":") for line in data.split(b"\n"))
    ]
    answered: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"{}"
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        answered.append(message.get("status", 0))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    guarded = RequestGuard(
        app,
        problem=lambda _, status, text: text.encode("ascii"),
        host="127.0.0.1",
        identify=identify_by_token("token", Identity(name="token")),
    )
    asyncio.run(guarded({"type": "http", "headers": headers}, receive, send))
    assert answered[0] != 200 or b"bearer token" in data.lower()


HEADERS = b"host:127.0.0.1:80\nauthorization:Bearer token\ncontent-length:2"
EVENT = {
    "output_ids": [5],
    "meta_info": {
        "id": "a",
        "finish_reason": None,
        "prompt_tokens": 2,
        "output_token_logprobs": [[-0.5, 5, None]],
        "output_top_logprobs": [[[-0.5, 5]]],
    },
}
LAST = {
    "output_ids": [],
    "meta_info": {
        **EVENT["meta_info"],
        "finish_reason": {"type": "stop"},
        "weight_versions": [{"version": "1", "start": 0, "end": 1}],
    },
}  # type: ignore[dict-item]
STREAM = (
    b"".join(b"data: " + as_json(event) + b"\n\n" for event in (EVENT, LAST)) + b"data: [DONE]\n\n"
)

TARGETS = [
    Target(
        "api-body", st.one_of([json_bytes(seeds, odd=TEXTS) for seeds in BODIES.values()]), body
    ),
    Target("sglang-stream", mutated([STREAM]), stream),
    Target(
        "guarded-call",
        mutated([HEADERS, HEADERS + b"\norigin:http://127.0.0.1:80\nsec-fetch-site:same-origin"]),
        guard,
    ),
]
