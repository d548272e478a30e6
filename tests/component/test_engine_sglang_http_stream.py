"""An SGLang server's stream is parsed in linear time, up to a bound that follows
from the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import orjson
import pytest

from relax_events.config import SamplingConfig
from relax_events.engines.sglang import client
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.client import ServerRejected, SGLangClient, _read_events
from relax_events.events.routed_experts import ExpertShape

ANSWER = b"HTTP/1.1 %d X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = 64 * 1024


class Counted:
    """Bytes that were copied or searched."""

    num_bytes = 0


class Piece(bytes):
    """A piece that counts what is copied where it is put behind others."""

    def __radd__(self, before: bytes) -> bytes:
        Counted.num_bytes += len(before) + len(self)
        return before.__add__(self)


class Buffer(bytearray):
    """A buffer that counts what is put into it, and how much of it is searched."""

    def __iadd__(self, piece: Any) -> Buffer:
        Counted.num_bytes += len(piece)
        super().__iadd__(piece)
        return self

    def find(
        self, part: Any, start: SupportsIndex | None = 0, end: SupportsIndex | None = None
    ) -> int:
        """Find a substring, and count the bytes that were read."""
        found = super().find(part, start, end)
        Counted.num_bytes += (len(self) if found < 0 else found + len(part)) - int(start or 0)
        return found


async def pieces(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def events(parts: Iterable[bytes], *, max_bytes: int) -> list[bytes]:
    return [
        event
        async for event in _read_events(
            pieces(parts), what="POST http://a/generate", max_bytes=max_bytes
        )
    ]


@pytest.mark.parametrize("size", [100, 4000])
def test_cost_of_reading_a_chunked_event_is_linear_in_its_bytes(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 MB in pieces of 100 bytes were copied 10,000 times over."""
    monkeypatch.setattr(client, "bytearray", Buffer, raising=False)
    monkeypatch.setattr(Counted, "num_bytes", 0)
    first, second = b"x" * 2_000_000, b"y" * 3000
    stream = b"data: " + first + b"\n\ndata: " + second + b"\n\ndata: [DONE]\n\n"
    parts = [Piece(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert asyncio.run(events(parts, max_bytes=3_000_000)) == [first, second]
    assert len(stream) <= Counted.num_bytes < 4 * len(stream)


def test_unterminated_event_is_rejected_at_the_size_limit() -> None:
    taken = 0

    def endless() -> Iterable[bytes]:
        nonlocal taken
        yield b"data: {}\n\n"
        while taken < 100 * PIECE:
            taken += 1000
            yield b"x" * 1000

    with pytest.raises(
        ServerRejected,
        match=r"POST http://a/generate: an event of the response has 11000 bytes or more, .* at most 10000; is it an SG",
    ):
        asyncio.run(events(endless(), max_bytes=10_000))
    assert taken == 11_000


@pytest.mark.parametrize(("num_bytes", "fits"), [(10_000, True), (10_001, False)])
def test_size_limit_applies_to_an_event_in_one_chunk(num_bytes: int, fits: bool) -> None:
    stream = b"data: " + b"x" * (num_bytes - 6) + b"\n\n"
    if fits:
        assert asyncio.run(events([stream * 2], max_bytes=10_000)) == [b"x" * (num_bytes - 6)] * 2
        return
    with pytest.raises(ServerRejected, match="has 10001 bytes"):
        asyncio.run(events([stream * 2], max_bytes=10_000))


def folder(experts: ExpertShape | None = None) -> ModelFolder:
    sizes: dict[str, Any] = {
        "hidden_size": 1,
        "vocab_size": 9,
        "max_context_tokens": 9,
        "num_layers": 48,
    }
    layers = tuple(range(48)) if experts else ()
    return ModelFolder(
        Path(), {}, **sizes, has_tied_head=False, layout=None, experts=experts, expert_layers=layers
    )


async def generated(status: int, piece: bytes, *, sent: list[int]) -> None:
    """Request a server that responds with a status and the same chunk repeatedly."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER % status)
        with suppress(ConnectionError):
            while True:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
                sent[0] += len(piece)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    asked = SGLangClient(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
        model=folder(),
        weights_seconds=1.0,
    )
    prompts = [
        {
            "rid": "a",
            "input_ids": [1, 2],
            "max_new_tokens": 100,
            "stop_token_ids": [],
            "num_routed": 0,
        }
    ]
    try:
        async for _ in asked.generate(
            prompts, media=[], sampling=SamplingConfig(), extra_key="a", num_top=2
        ):
            pass
    finally:
        await asked.close()
        server.close()


@pytest.mark.parametrize(
    ("status", "what"),
    [(200, r"an event of the response has \d+ bytes or more"), (400, r"status 400: b'x{500}'")],
)
def test_unterminated_response_is_cut_off_and_error_names_the_server(
    status: int, what: str
) -> None:
    sent = [0]
    with pytest.raises(ServerRejected, match=rf"POST http://127\.0\.0\.1:\d+/generate: {what}"):
        asyncio.run(asyncio.wait_for(generated(status, b"x" * PIECE, sent=sent), 60))
    assert sent[0] < 64 * 2**20  # what was read, and what the sockets hold


def test_size_limit_admits_the_largest_possible_response() -> None:
    """All tokens of a long sample at once, each with the longest text, and the experts of a mixture
    with 48 layers, 8 of 128 each."""
    model = folder(ExpertShape(48, 8, 128))
    num_prompt, num_new, num_top = 1000, 500, 4
    asked = SGLangClient("http://127.0.0.1:1", model=model, weights_seconds=1.0)
    prompts = [
        {"input_ids": [1] * 3, "max_new_tokens": 9},
        {"input_ids": [1] * num_prompt, "max_new_tokens": num_new},
    ]
    entry = [-1.2345678901234567e-10, 1_234_567, None]
    event = {
        "text": "\n" * 200 * num_new,
        "output_ids": [1_234_567] * num_new,
        "meta_info": {
            "id": "a" * 32,
            "finish_reason": {"type": "length", "length": num_new},
            "output_token_logprobs": [entry] * num_new,
            "output_top_logprobs": [[entry] * num_top] * num_new,
            "weight_versions": [{"version": "20000-0123abcd", "start": 1_000_000, "end": 1_000_001}]
            * num_new,
            "routed_experts": model.encode_experts(
                np.full((num_prompt + num_new, 48, 8), 127, np.uint8)
            ),
        },
    }
    size, bound = len(orjson.dumps(event)), asked._max_event_bytes(prompts, num_top=num_top)
    assert size < bound < 2 * size
